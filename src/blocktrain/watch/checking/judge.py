"""A process that judges updates on secret text; it needs torch.

    python -m blocktrain.watch.checking.judge

A question names a block's weights, payloads of updates or whole versions, and the seed of the text.
It was drawn after the payloads were stored, so nobody could train for it. The answer has, for each
of them, how much the loss falls (`gain`) and how much that may be off (`noise`).

An update is judged by its slope: the loss a quarter of the way back less the loss a quarter of the
way on, both from the version that it would change. The loss at its end says little. At full
learning rate honest steps end higher than they began, because a version is a mean of several
workers, and a mean is lower than what it is made of. The slope of an honest update is down all the
same, and that of a turned one is up.
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

Losses = np.ndarray[Any, np.dtype[np.float64]]  # of the groups of a canary

GROUPS = 8  # of sequences: their differences tell the noise
MOST_SEQUENCES = 32
MOST_TOKENS = 8192  # of all sequences: without a GPU a forward pass of a large block takes minutes
DEVIATIONS = 3.0  # standard errors that a gain may be off
PART = 0.25  # of an update, each way, that its slope is measured over
MOST_RISE = 0.1  # of the loss: a higher one at the end of an update or of a version is harm


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
    before = unpack(blobs.read(question["weights"]))
    canary, found = Canary(config, blobs, corpus, question, before), []
    for suspect in question["suspects"]:
        is_version = suspect.get("weights") is not None
        judge = canary.judge_version if is_version else canary.judge_update
        found.append(judge(_proposal(blobs, before, suspect)))
    return found


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
    """Text that was drawn for one round, and the loss on it of a block with these weights."""

    def __init__(
        self,
        config: Config,
        blobs: BlobReader,
        corpus: TokenCorpus,
        question: Mapping[str, Any],
        before: Tensors,
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
        self._before, self._start = before, self.losses(before)

    @torch.no_grad()
    def losses(self, weights: Tensors) -> Losses:
        """The loss of every group."""
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

    def judge_version(self, after: Tensors) -> dict[str, float]:
        """What these weights gain. Chance in training counts as noise, too."""
        end = self.losses(after)
        gain, noise = _compare(self._start - end)
        return _verdict(gain, noise + MOST_RISE * float(self._start.mean()), end)

    def judge_update(self, after: Tensors) -> dict[str, float]:
        """What the whole update gains by its slope, or loses, if it ends far too high."""
        verdict = self.judge_version(after)
        if verdict["gain"] < -verdict["noise"]:
            return verdict
        back, on = (self.losses(self._part(after, part)) for part in (-PART, PART))
        gain, noise = _compare((back - on) / (2 * PART))
        return {**_verdict(gain, noise, back), "loss": verdict["loss"]}

    def _part(self, after: Tensors, part: float) -> Tensors:
        """So much of the way to these weights."""
        step = np.float32(part)
        return {name: b + step * (after[name] - b) for name, b in self._before.items()}


def _compare(differences: Losses) -> tuple[float, float]:
    """The mean over the groups, and how much that may be off."""
    noise = DEVIATIONS * float(differences.std(ddof=1)) / math.sqrt(GROUPS)
    return float(differences.mean()), noise


def _verdict(gain: float, noise: float, end: Losses) -> dict[str, float]:
    loss = float(end.mean())
    if not all(map(math.isfinite, (gain, noise, loss))):
        return {"gain": -1e9, "noise": 0.0, "loss": 1e9}
    return {"gain": gain, "noise": noise, "loss": loss}


if __name__ == "__main__":
    answer_lines(_answer)
