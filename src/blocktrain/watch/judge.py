"""A process that judges updates on secret text; it needs torch.

    python -m blocktrain.watch.judge

A question names a block's weights, payloads of updates or whole versions, and the seed of the text.
It was drawn after the payloads were stored, so nobody could train for it. The answer has, for each
of them, how much the loss fell (`gain`) and how much that may be off (`noise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from blocktrain.config import Config, make_config
from blocktrain.errors import BlockTrainError
from blocktrain.learning.compose import build_block, composition_of
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.model import Block, FusionBlock, IndependentBlock, target_table
from blocktrain.learning.shards import SequenceOrder, batches
from blocktrain.learning.tokenizer import load_tokenizer
from blocktrain.learning.train import put_weights
from blocktrain.protocol.compression import open_update
from blocktrain.protocol.tensors import Tensors, schema_of, unpack
from blocktrain.store.contract import BlobReader
from blocktrain.store.open import read_blobs
from blocktrain.watch.scorer import StoredCorpus, answer_lines

GROUPS = 8  # of sequences: their differences tell the noise
MOST_SEQUENCES = 32
MOST_TOKENS = 8192  # of all sequences: without a GPU a forward pass of a large block takes minutes
DEVIATIONS = 3.0  # standard errors that a gain may be off


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        config = make_config({**question["config"], "device": "cpu"})
        blobs = read_blobs(question["store"])
        if question["tokenizer"] is not None:
            load_tokenizer(blobs.read(question["tokenizer"]))
        corpus = StoredCorpus(blobs, question["index"])
        return {"judged": judge_suspects(config, blobs, corpus, question)}
    except (BlockTrainError, OSError, RuntimeError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def judge_suspects(
    config: Config, blobs: BlobReader, corpus: TokenCorpus, question: Mapping[str, Any]
) -> list[dict[str, float]]:
    """The fields of `Judged` for each suspect."""
    canary = Canary(config, blobs, corpus, question)
    before = unpack(blobs.read(question["weights"]))
    return [canary.judge(before, _proposal(blobs, before, s)) for s in question["suspects"]]


def _proposal(blobs: BlobReader, before: Tensors, suspect: Mapping[str, Any]) -> Tensors:
    """The weights that an update, or a version, would make of these."""
    if (whole := suspect.get("weights")) is not None:
        return unpack(blobs.read(whole))
    schema = schema_of(before)
    content = blobs.read(suspect["payload"])
    update = open_update(content, schema, method=suspect["compression"])
    if not update.absolute:
        return {name: before[name] + change for name, change in update.tensors.items()}
    base = before if suspect["base"] is None else unpack(blobs.read(suspect["base"]), schema)
    return {name: before[name] + (new - base[name]) for name, new in update.tensors.items()}


class Canary:
    """Text that was drawn for one round, and a block's loss on it."""

    def __init__(
        self, config: Config, blobs: BlobReader, corpus: TokenCorpus, question: Mapping[str, Any]
    ) -> None:
        self._config, self._index, self._seed = config, question["block"], question["seed"]
        self._block = build_block(config, self._index).requires_grad_(False).eval()
        self._sources: list[IndependentBlock] = []
        for number, name in sorted(question["features"].items(), key=lambda item: int(item[0])):
            source: Block = build_block(config, int(number)).requires_grad_(False).eval()
            put_weights(source, unpack(blobs.read(name)))
            if isinstance(source, IndependentBlock):
                self._sources.append(source)
        if isinstance(self._block, FusionBlock):
            self._block.readout.copy_from(self._sources)
        self._table = target_table(config)
        length = min(config.context, MOST_TOKENS // GROUPS)
        count = max(GROUPS, min(MOST_SEQUENCES, 2 * config.batch, MOST_TOKENS // length))
        order = SequenceOrder(corpus.index, config.context, self._seed, self._index)
        rows = batches(order, count, corpus.open)(0)[:, : length + 1]
        self._groups = np.array_split(rows, GROUPS)
        self._before: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}

    @torch.no_grad()
    def losses(self, weights: Tensors) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The loss of every group."""
        if id(weights) in self._before:
            return self._before[id(weights)]
        put_weights(self._block, weights)
        composition, found = composition_of(self._config), []
        for number, group in enumerate(self._groups):
            seed = np.random.SeedSequence([self._seed, number]).generate_state(1, np.uint64)
            generator = torch.Generator().manual_seed(int(seed[0]))
            draws = composition.draw(self._block, self._config, len(group), generator)
            loss = composition.loss(
                self._block,
                self._sources,
                torch.from_numpy(group),
                draws,
                config=self._config,
                index=self._index,
                table=self._table,
            )
            found.append(float(loss.ce))
        return np.array(found)

    def judge(self, before: Tensors, after: Tensors) -> dict[str, float]:
        """What these weights gain over those before."""
        if id(before) not in self._before:
            self._before[id(before)] = self.losses(before)
        losses = self.losses(after)
        differences = self._before[id(before)] - losses
        gain = float(differences.mean())
        if not math.isfinite(gain):
            return {"gain": -1e9, "noise": 0.0, "loss": 1e9}
        noise = DEVIATIONS * float(differences.std(ddof=1)) / math.sqrt(GROUPS)
        return {"gain": gain, "noise": noise, "loss": float(losses.mean())}


if __name__ == "__main__":
    answer_lines(_answer)
