"""What a worker has at hand: the blobs it fetched, and the one trainer with the state that its next task continues."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from blocktrain.config import Config
from blocktrain.learning.compose import build_block, independent
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.model import Block
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.learning.train import Trainer, put_weights
from blocktrain.protocol import messages as m
from blocktrain.protocol.compression import METHODS, compress, compress_weights
from blocktrain.protocol.ledger import lineage
from blocktrain.protocol.tensors import Tensors, pack, unpack
from blocktrain.protocol.transfer import sha256
from blocktrain.web.client import fetch
from blocktrain.worker.state import Facts, Halfway, Kept, Pause
from blocktrain.worker.transport import Line

BYTES_OF_A_PARAMETER = 16  # weight, gradient, and the two moments of AdamW
SAVED_PER_LAYER = (
    24  # floats of width size that autograd keeps of one position in one layer (bench memory)
)


def footprint(config: Config, index: int) -> int:
    """About how many bytes training a block takes: state, gradients, activations, and for fusion the blocks that it reads."""
    width, vocabulary = config.width, tokenizer_of(config).vocabulary
    block = config.layers_per_block * 12 * width**2 + (config.lookback + 1) * vocabulary * width
    reads = config.reads(index)
    saved = config.layers_per_block * SAVED_PER_LAYER * width + 3 * vocabulary + 4 * reads * width
    own = (block + 3 * reads * width**2) * BYTES_OF_A_PARAMETER
    return own + 4 * config.batch * config.context * saved + 4 * reads * block


def corpus_folder(cache: Path, corpus: m.Corpus) -> Path:
    """Where the two files of a corpus are, whatever run they are for."""
    return cache / "corpora" / f"{corpus.train.sha256[:32]}-{corpus.valid.sha256[:32]}"


class Downloads:
    """Blobs by hash, in files: the corpus shared by all workers of a machine, weights of this worker alone."""

    def __init__(self, line: Line, cache: Path, weights: Path, stopped: Callable[[], bool]) -> None:
        self._line, self._cache, self._weights, self._stopped = line, cache, weights, stopped

    def corpus(self, corpus: m.Corpus) -> Corpus:
        """The corpus of a run; fetched once, also when several workers start together."""
        folder = corpus_folder(self._cache, corpus)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for blob, name in ((corpus.train, "train.txt"), (corpus.valid, "valid.txt")):
                if not _holds(
                    folder / name, blob
                ):  # damaged on the disk: what is trained on it could not be checked by anyone
                    (folder / name).unlink(missing_ok=True)
                self._fetch(blob, folder / name)
        found = open_corpus(str(folder), None, self._cache)
        return replace(found, name=corpus.name)

    def tensors(self, blob: m.Blob) -> Tensors:
        """Weights, after their bytes were found to be those of the name."""
        path = self._weights / blob.sha256
        content = self._fetch(blob, path).read_bytes()
        if sha256(content) != blob.sha256:  # the disk has changed it
            path.unlink()
            content = self._fetch(blob, path).read_bytes()
        return unpack(content)

    def keep(self, needed: Iterable[m.Blob]) -> None:
        """Remove weights that are not needed any more."""
        names = {blob.sha256 for blob in needed}
        for path in self._weights.glob("*"):
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _fetch(self, blob: m.Blob, target: Path) -> Path:
        if target.exists() and target.stat().st_size == blob.length:
            return target
        target.unlink(missing_ok=True)
        line = self._line
        line.told("fetching", sha256=blob.sha256, bytes=blob.length)
        return line.insist(
            lambda: fetch(line.client, blob, target, worker=line.identity.worker), self._stopped
        )


def _holds(path: Path, blob: m.Blob) -> bool:
    if not path.exists() or path.stat().st_size != blob.length:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == blob.sha256


@dataclass
class Desk:
    """One block being trained: its trainer, and where the trainer's optimizer and the residual come from."""

    trainer: Trainer
    facts: Facts = field(default_factory=Facts)
    residual: Tensors = field(default_factory=dict)
    base: Tensors = field(default_factory=dict)
    reads: tuple[str, ...] = ()  # hashes of the weights that a fusion block reads
    known: tuple[str, Tensors] | None = (
        None  # the hash that the weights at hand have as a version, if nobody else has a part in it
    )

    @property
    def block(self) -> int:
        """The block's number."""
        return self.trainer.index

    def take(self, kept: Kept) -> None:
        """Continue with another state."""
        self.trainer.restore(kept.moments)
        self.facts, self.residual = kept.facts, kept.residual

    def begin(self, order: m.Order, weights: Callable[[m.Blob], Tensors]) -> None:
        """Put the trainer where the order begins."""
        self.base = (
            self.known[1]
            if self.known and self.known[0] == order.weights.sha256
            else weights(order.weights)
        )
        self.known = None
        self.trainer.load_weights(self.base)
        self.trainer.step, self.trainer.stream = order.start_step, order.stream

    @property
    def continued(self) -> m.Lineage:
        """What the optimizer and the residual at hand were left by."""
        return m.Lineage(optimizer=self.facts.optimizer, residual=self.facts.residual)

    def halfway(self, order: m.Order, losses: Sequence[float], seconds: float) -> Halfway:
        """The order as far as it has come."""
        step, first, last = self.trainer.step, losses[0], losses[-1]
        pause = Pause(
            order=order,
            began=self.facts,
            step=step,
            first_loss=first,
            last_loss=last,
            seconds=seconds,
        )
        return Halfway(pause, self.trainer.weights(), self.trainer.moments())

    def go_on(self, halfway: Halfway) -> list[float]:
        """Put the trainer where it was told to stop; the first and the last loss up to there."""
        self.trainer.load_weights(halfway.weights)
        self.trainer.restore(halfway.moments)
        self.trainer.step = halfway.pause.step
        return [halfway.pause.first_loss, halfway.pause.last_loss]

    def finish(self, order: m.Order) -> tuple[Kept, bytes]:
        """The state after the order, and its update. The residual at hand must be that of the last accepted update."""
        new = self.trainer.weights()
        left: Tensors = {}
        if METHODS[order.compression].exact:
            payload = compress_weights(new, order.compression)
            self.known = (sha256(pack(new)), dict(new))
        else:
            payload, left = compress(
                {name: new[name] - self.base[name] for name in new},
                self.residual,
                order.compression,
            )
        self.base = {}
        after = Facts(
            optimizer=order.task,
            residual=order.task,
            lineage=lineage(self.facts.lineage, order, self.continued),
            version=order.base + 1,
            step=order.start_step + order.steps,
        )
        # The moments go on from here at once; the residual only when the update was accepted.
        self.facts = after.model_copy(update={"residual": self.facts.residual})
        return Kept(after, self.trainer.moments(), left), payload


def read_blocks(
    config: Config, pins: Iterable[m.BlockVersion], weights: Callable[[m.Blob], Tensors]
) -> dict[int, Block]:
    """Blocks by number at pinned versions."""
    blocks = {}
    for pin in pins:
        blocks[pin.block] = build_block(config, pin.block)
        put_weights(blocks[pin.block], weights(pin.weights))
    return blocks


def open_desk(
    config: Config, order: m.Order, weights: Callable[[m.Blob], Tensors], old: Desk | None
) -> Desk:
    """A desk for an order: the old one if it is of the same block, with what the order reads."""
    reads = tuple(pin.weights.sha256 for pin in order.features)
    if old is not None and old.block == order.block:
        if old.reads != reads:
            old.trainer.read(independent(read_blocks(config, order.features, weights)))
            old.reads = reads
        return old
    sources = independent(read_blocks(config, order.features, weights))
    return Desk(Trainer(config, order.block, sources), reads=reads)
