"""One task: the blobs it needs, and the trainer with the state that it continues."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.config import Config
from blocktrain.errors import RunError, WrongBytes
from blocktrain.files import make_private, write_atomic
from blocktrain.learning.compose import build_block, independent
from blocktrain.learning.model import Block
from blocktrain.learning.shards import LARGEST_INDEX, CorpusIndex, read_index
from blocktrain.learning.tokenizer import LARGEST_JSON, load_tokenizer
from blocktrain.learning.train import Trainer, put_weights
from blocktrain.processes import return_memory
from blocktrain.protocol import messages as m
from blocktrain.protocol.compression import (
    METHODS,
    add_delta,
    add_residual,
    compress,
    compress_weights,
)
from blocktrain.protocol.ledger import lineage
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import Tensors, pack, unpack
from blocktrain.protocol.transfer import sha256
from blocktrain.web.client import fetch
from blocktrain.worker.session import RESENDS, WorkerSession
from blocktrain.worker.state import CheckpointInfo, Provenance, TaskCheckpoint, TrainingState


class Downloads:
    """Blobs by hash, in files. All workers of a machine share a corpus; weights are per worker.

    Weights that follow from others on the disk are made here, and only deltas are fetched.
    """

    def __init__(
        self, session: WorkerSession, cache: Path, weights: Path, stopped: Callable[[], bool]
    ) -> None:
        self._session, self._stopped = session, stopped
        self._cache, self._weights = cache, weights
        self._deltas: tuple[m.VersionDelta, ...] = ()
        self._firsts: dict[str, int] = {}  # weights of version 0 -> their block
        self._draw: Callable[[int], Tensors] = lambda _: {}
        self._sent: tuple[str, bytes] = ("", b"")

    def index(self, corpus: m.CorpusBlobs) -> CorpusIndex:
        """The index of a run's corpus. Its tokenizer, if it has one, is known from then on."""
        if corpus.tokenizer is not None:
            load_tokenizer(self._small(corpus.tokenizer, LARGEST_JSON))
        return read_index(self._small(corpus.index, LARGEST_INDEX))

    def _small(self, blob: m.Blob, limit: int) -> bytes:
        """A blob that is kept for all runs of this machine."""
        if blob.length > limit:
            raise RunError(f"blob {blob.sha256[:12]}... has {blob.length} bytes; {limit} are read")
        folder = self._cache / "indexes"
        make_private(folder)
        with (folder / "lock").open("w") as lock:  # workers that start together fetch it once
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._read(blob, folder / blob.sha256)

    def shard(self, blob: m.Blob, target: Path) -> Path:
        """A shard of the corpus as a file."""
        return self._fetch(blob, target)

    def follow(self, task: m.Task, draw: Callable[[int], Tensors]) -> None:
        """Know how the versions that a task needs come about.

        They follow from others by deltas, and version 0 of a block is what `draw` gives, unless it
        comes from another run.
        """
        self._deltas, self._draw = task.deltas, draw
        self._firsts = {pin.weights.sha256: pin.block for pin in task.versions if pin.version == 0}
        self._firsts |= {step.parent: step.block for step in task.deltas if step.version == 1}

    def keep_sent(self, payload: bytes) -> None:
        """An update. A version that is made of it alone has it as its delta."""
        self._sent = sha256(payload), payload

    def tensors(self, blob: m.Blob) -> Tensors:
        """Weights, after their bytes have been checked against their hash."""
        if not self._has(blob.sha256):
            self._make(blob)
        return unpack(self._read(blob, self._weights / blob.sha256))

    def _has(self, name: str) -> bool:
        """Whether these weights are on the disk, or can be drawn from the seed."""
        path, block = self._weights / name, self._firsts.pop(name, None)
        if block is not None and not path.exists():
            self._keep(pack(self._draw(block)), name)
        return path.exists()

    def _keep(self, content: bytes, name: str) -> None:
        """Weights that were made here, if they are what they should be."""
        if sha256(content) == name:
            make_private(self._weights)
            write_atomic(self._weights / name, content)

    def _make(self, blob: m.Blob) -> None:
        """Weights out of others on the disk and deltas. Where that fails, they are fetched."""
        path = m.delta_path(blob.sha256, self._deltas, self._has)
        if not path:
            return
        try:
            tensors = unpack((self._weights / path[0].parent).read_bytes())
            for step in path:
                tensors = add_delta(tensors, self._delta(step.delta))
        except Refused as error:  # gone at the coordinator, or the bytes on the disk are damaged
            if error.code not in (Code.NOT_FOUND, Code.MALFORMED, Code.WRONG_SHAPE):
                raise
            return
        self._keep(pack(tensors), blob.sha256)

    def _delta(self, blob: m.Blob) -> bytes:
        name, payload = self._sent
        return payload if name == blob.sha256 else self._read(blob, self._weights / blob.sha256)

    def _read(self, blob: m.Blob, path: Path) -> bytes:
        content = self._fetch(blob, path).read_bytes()
        if sha256(content) != blob.sha256:  # damaged on the disk
            path.unlink()
            content = self._fetch(blob, path).read_bytes()
        return content

    def keep_only(self, needed: Iterable[m.Blob]) -> None:
        """Delete all other weights."""
        names = {blob.sha256 for blob in needed}
        for path in self._weights.glob("*"):
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _fetch(self, blob: m.Blob, target: Path) -> Path:
        if target.exists() and target.stat().st_size == blob.length:
            return target
        target.unlink(missing_ok=True)
        session, failures = self._session, 0

        def attempt() -> Path:
            nonlocal failures
            try:
                return fetch(session.client, blob, target, worker=session.identity.worker)
            except WrongBytes:
                failures += 1
                if failures < RESENDS:
                    raise
                raise RunError(
                    f"blob {blob.sha256} arrived {failures} times with other bytes than its name "
                    "says; ask the coordinator's operator to restore it from a backup"
                ) from None

        session.emit("fetching", sha256=blob.sha256, bytes=blob.length)
        return session.retries.call(attempt, self._stopped)


@dataclass
class BlockTraining:
    """One block in training: its trainer, and the origin of the optimizer state and residual."""

    trainer: Trainer
    origin: Provenance = field(default_factory=Provenance)
    residual: Tensors = field(default_factory=dict)
    base: Tensors = field(default_factory=dict)
    carried: bool = False  # whether the order in work began with the residual in the weights
    reads: tuple[str, ...] = ()  # hashes of the weights that a fusion block reads
    # The weights of the last task, by the hash of the version that they are if no other update is
    # merged with them. Saves fetching what this worker has just sent.
    own_version: tuple[str, Tensors] | None = None

    @property
    def block(self) -> int:
        return self.trainer.index

    @property
    def lineage_before(self) -> m.Lineage:
        """The tasks that left the optimizer state and the residual."""
        return m.Lineage(optimizer=self.origin.optimizer, residual=self.origin.residual)

    def load_state(self, state: TrainingState) -> None:
        self.trainer.restore(state.moments)
        self.origin, self.residual = state.origin, state.residual

    def begin(
        self, order: m.Order, weights: Callable[[m.Blob], Tensors], *, alone: bool = False
    ) -> None:
        """Put the trainer where the order begins. `alone`: no other worker trains the block."""
        own, self.own_version = self.own_version, None
        known = own is not None and own[0] == order.weights.sha256
        self.base = own[1] if own and known else weights(order.weights)
        residual, carries = self.origin.residual, METHODS[order.compression].carries
        named = residual is not None and residual == order.continues.residual
        self.carried = alone and carries and named
        self.trainer.load_weights(
            add_residual(self.base, self.residual) if self.carried else self.base
        )
        self.trainer.step = order.start_step
        self.trainer.shift = order.position - order.start_step

    def checkpoint(self, order: m.Order, losses: Sequence[float], seconds: float) -> TaskCheckpoint:
        """The order as far as it has come."""
        info = CheckpointInfo(
            order=order,
            began=self.origin,
            step=self.trainer.step,
            first_loss=losses[0],
            last_loss=losses[-1],
            seconds=seconds,
        )
        return TaskCheckpoint(info, self.trainer.weights(), self.trainer.moments())

    def resume(self, checkpoint: TaskCheckpoint) -> list[float]:
        """Continue from a checkpoint; returns the first and the last loss up to there."""
        self.trainer.load_weights(checkpoint.weights)
        self.trainer.restore(checkpoint.moments)
        self.trainer.step = checkpoint.info.step
        return [checkpoint.info.first_loss, checkpoint.info.last_loss]

    def finish(self, order: m.Order) -> tuple[TrainingState, bytes]:
        """The state after the order, and its update.

        The residual must be that of the last accepted update.
        """
        self.trainer.drop_gradients()
        return_memory()  # of the activations, before the update needs it
        new, base, self.base = self.trainer.weights(), self.base, {}
        residual: Tensors = {}
        if METHODS[order.compression].exact:
            payload = compress_weights(new, order.compression)
            self.own_version = (sha256(pack(new)), dict(new))
        else:
            for name in new:  # in place: the new weights become the delta
                new[name] -= base.pop(name)
            left = None if self.carried else self.residual
            payload, residual = compress(new, left, order.compression)
        after = Provenance(
            optimizer=order.task,
            residual=order.task,
            lineage=lineage(self.origin.lineage, order, self.lineage_before),
            version=order.base + 1,
            step=order.start_step + order.steps,
        )
        return_memory()
        # The next task continues the moments at once, the residual only after acceptance.
        self.origin = after.model_copy(update={"residual": self.origin.residual})
        return TrainingState(after, self.trainer.moments(), residual), payload


def read_blocks(
    config: Config, pins: Iterable[m.BlockVersion], weights: Callable[[m.Blob], Tensors]
) -> dict[int, Block]:
    """Blocks by number, at pinned versions."""
    blocks = {}
    for pin in pins:
        blocks[pin.block] = build_block(config, pin.block)
        put_weights(blocks[pin.block], weights(pin.weights))
    return blocks


def open_training(
    config: Config,
    order: m.Order,
    weights: Callable[[m.Blob], Tensors],
    old: BlockTraining | None,
) -> BlockTraining:
    """A trainer for an order and the blocks that it reads; the old one if the block is the same."""
    reads = tuple(pin.weights.sha256 for pin in order.features)
    if old is not None and old.block == order.block:
        if old.reads != reads:
            old.trainer.read(independent(read_blocks(config, order.features, weights)))
            old.reads = reads
        return old
    sources = independent(read_blocks(config, order.features, weights))
    return BlockTraining(Trainer(config, order.block, sources), reads=reads)
