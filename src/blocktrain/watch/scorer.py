"""A process that scores versions of a run; it needs torch.

Requests are JSON lines on stdin, answers go to stdout, until stdin ends.

    python -m blocktrain.watch.scorer

It reads weights and corpus from the coordinator's blobs and writes nothing but its answers.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from blocktrain.config import Config, make_config
from blocktrain.errors import BlockTrainError
from blocktrain.learning.compose import Model, Predictors, build_block, composition_of
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import cross_entropies, cross_entropies_of_rows, spread_rows
from blocktrain.learning.model import Block
from blocktrain.learning.pool import fit_pool_weights
from blocktrain.learning.shards import Shard, read_index
from blocktrain.learning.threads import use_threads
from blocktrain.learning.tokenizer import Ids, load_tokenizer
from blocktrain.learning.train import put_weights
from blocktrain.protocol.tensors import unpack
from blocktrain.store.contract import BlobReader
from blocktrain.store.open import read_blobs

NICE = 10
FIT_BYTES = 1 << 13  # of the calibration part that the pool is fitted on
Names = dict[str, str]  # by block: the sha256 of its weights


def main() -> None:
    """Score until stdin ends."""
    os.nice(NICE)
    answer_lines(_answer)


def answer_lines(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer until stdin ends. A thread reads it, to notice at once if the parent dies."""
    # Ctrl-C is for the coordinator, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_threads()
    requests: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    while True:
        print(json.dumps(answer(json.loads(requests.get()))), flush=True)


def _listen(requests: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    began, worked = time.monotonic(), time.process_time()
    try:
        config = make_config({**request["config"], "device": "cpu"})
        blobs = read_blobs(request["store"])
        if request["tokenizer"] is not None:
            load_tokenizer(blobs.read(request["tokenizer"]))
        corpus = StoredCorpus(blobs, request["index"])
        scores, count = score(
            config,
            blobs,
            corpus,
            request["newest"],
            request["features"],
            request["bytes"],
        )
    except (BlockTrainError, OSError, RuntimeError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {
        "scores": scores,
        "valid_bytes": count,
        "bytes_per_token": round(corpus.bytes_per_token, 4),
        "seconds": round(time.monotonic() - began, 3),
        "processor_seconds": round(time.process_time() - worked, 3),
    }


def score(
    config: Config,
    blobs: BlobReader,
    corpus: TokenCorpus,
    newest: Names,
    features: Names,
    limit: int,
) -> tuple[dict[str, float], int]:
    """Nats per token by name on about `limit` bytes of the valid part, and how many they were.

    `features` are the blocks that the newest fusion block was trained on, and works with.
    """
    fusion, tokens = str(config.fusion), int(limit / corpus.bytes_per_token)
    own = {number: name for number, name in newest.items() if number != fusion}
    model = _model(config, blobs, own)
    fused = _model(config, blobs, {**features, fusion: newest[fusion]}) if features else None
    if fused is not None and features == own:
        model, fused = fused, None  # one pass for both
    entropies: dict[str, float] = {}
    if config.predicts_without_noise:
        model.pool_weights = fit_pool_weights(model, corpus.calibration, limit=FIT_BYTES)
    for predict in model.composition.quick_predictors(model, seed=config.seed):
        entropies |= sample_cross_entropies(predict, corpus.valid, config.context, tokens)
    if fused is not None:
        for predict in fused.composition.quick_predictors(fused, seed=config.seed):
            scores = sample_cross_entropies(predict, corpus.valid, config.context, tokens)
            entropies[config.compose] = scores[config.compose]
    named = {
        name.replace("block_", "block-").replace("fuse", "fused"): ce
        for name, ce in entropies.items()
    }
    scores = {name: round(ce, 5) for name, ce in named.items() if math.isfinite(ce)}
    return scores, min(limit, corpus.valid_bytes)


def _model(config: Config, blobs: BlobReader, names: Names) -> Model:
    blocks: dict[int, Block] = {}
    for number, name in names.items():
        blocks[int(number)] = build_block(config, int(number))
        put_weights(blocks[int(number)], unpack(blobs.read(name)))
    composition = composition_of(config)
    composition.connect(config, blocks)
    return composition.assemble(config, blocks)


class StoredCorpus(TokenCorpus):
    """A corpus whose shards are blobs. They stay mapped after their names in a folder are gone."""

    def __init__(self, blobs: BlobReader, index: str) -> None:
        super().__init__(read_index(blobs.read(index)), Path())
        self._blobs = blobs
        self._maps: dict[str, Ids] = {}

    def open(self, shard: Shard) -> Ids:
        if shard.sha256 not in self._maps:
            with tempfile.TemporaryDirectory(prefix="blocktrain-score-") as folder:
                path = Path(folder) / shard.sha256
                self._blobs.verify(shard.sha256)
                self._blobs.export(shard.sha256, path)
                self._maps[shard.sha256] = np.memmap(path, self.index.dtype, "r")
        return self._maps[shard.sha256]


def sample_cross_entropies(
    predict: Predictors, split: Ids, context: int, limit: int
) -> dict[str, float]:
    """`cross_entropies` on rows spread over a split."""
    if len(split) <= max(limit, context + 1):
        return cross_entropies(predict, split, context)
    return cross_entropies_of_rows(predict, split, context, spread_rows(split, context, limit))


if __name__ == "__main__":
    main()
