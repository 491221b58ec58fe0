"""What a worker keeps on its disk, so that it may be killed at any moment.

identities/N.pem      the key of the machine's N-th worker; N.lock is held while that worker runs

and for each block:

state.safetensors     optimizer moments and compression residual after the last accepted task
pending.safetensors   the same after a task that is trained and not yet answered
pending.payload       the update itself
pending.json          the task and the submission. Written last and removed first: while it is
                      there, the other two are complete
paused.safetensors    checkpoint in the middle of a task, when the worker was stopped there
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from blocktrain.errors import IdentityError, RunError
from blocktrain.files import make_private, sync_folder, write_atomic
from blocktrain.learning.train import read_state, write_state
from blocktrain.protocol.identity import Identity, open_identity
from blocktrain.protocol.messages import (
    Count,
    Held,
    Message,
    Number,
    Order,
    Sha256,
    Submission,
    Task,
    write,
)
from blocktrain.protocol.tensors import Tensors

MAX_WORKERS = 1024  # of one machine
_RESIDUAL = "residual."
_WEIGHT = "weight."


@contextmanager
def own_identity(cache: Path) -> Iterator[Identity]:
    """The first key under cache/identities that no other process uses; created if needed.

    So each worker of a machine has its own key, and finds it again at its next start.
    """
    folder = cache / "identities"
    try:
        make_private(folder)
    except OSError as error:
        raise IdentityError(
            f"cannot write {folder}: {error.strerror or error}; name another folder with --cache"
        ) from None
    for number in range(MAX_WORKERS):
        with (folder / f"{number}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield open_identity(folder / f"{number}.pem")
            return
    raise IdentityError(
        f"{MAX_WORKERS} workers use {folder} already; name another folder with --cache"
    )


class Provenance(Message):
    """Which tasks left a training state, and which order continues it."""

    optimizer: Number | None = None
    """The task that left the moments."""
    residual: Number | None = None
    """The task that left the residual."""
    lineage: Sha256 | None = None
    version: Count = 0
    """The version that the task makes if no other update is merged with it."""
    step: Count = 0
    """Where the schedule continues."""

    def fits(self, order: Order) -> bool:
        """Whether an order continues this state: by name, or because it begins where this ends."""
        if self.optimizer is None:
            return False
        return self.optimizer == order.continues.optimizer or (self.version, self.step) == (
            order.base,
            order.start_step,
        )


@dataclass
class TrainingState:
    """Optimizer moments and compression residual. Empty: a fresh start."""

    origin: Provenance = field(default_factory=Provenance)
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    residual: Tensors = field(default_factory=dict)


class PendingUpdate(Message):
    """A trained task and its submission. Signature, nonce and time are renewed at each attempt."""

    task: Task
    submission: Submission

    def answers(self, order: Order) -> bool:
        """Whether an order asks for this. What it really continued is in the submission."""
        mine = self.task.order.model_copy(update={"continues": order.continues})
        return mine == order


class CheckpointInfo(Message):
    """Where in a task a worker was stopped, and which state the task had started from."""

    order: Order
    began: Provenance
    step: Count
    first_loss: float
    last_loss: float
    seconds: float
    """That the steps so far took."""

    def fits(self, order: Order, began: Provenance) -> bool:
        """Whether it is on the way to an order, from the same optimizer state.

        The residual may differ: in a run where it has a part in training, it is the optimizer's.
        """
        same_order = self.order.model_copy(update={"continues": order.continues}) == order
        return same_order and (self.began.optimizer, self.began.lineage) == (
            began.optimizer,
            began.lineage,
        )


@dataclass
class TaskCheckpoint:
    info: CheckpointInfo
    weights: Tensors
    moments: Mapping[str, Tensor]


class BlockFolder:
    """The files of one block. Used by one worker at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state, self._next = path / "state.safetensors", path / "pending.safetensors"
        self._payload, self._note = path / "pending.payload", path / "pending.json"
        self._checkpoint = path / "paused.safetensors"

    def load(self) -> TrainingState:
        """The state after the last accepted task. An unreadable one counts as none."""
        if not self._state.exists():
            return TrainingState()
        try:
            tensors, note = read_state(self._state)
            origin = Provenance.model_validate_json(note)
        except (RunError, ValidationError):
            return TrainingState()
        return TrainingState(origin, *_split(tensors, _RESIDUAL))

    def save(self, after: TrainingState, pending: PendingUpdate, payload: bytes) -> None:
        """Keep a trained task until it is answered. It is durable when this returns."""
        make_private(self.path)
        self._note.unlink(missing_ok=True)
        self._checkpoint.unlink(missing_ok=True)
        write_atomic(self._payload, payload, private=True)
        tensors = _join(after.moments, _RESIDUAL, after.residual)
        write_state(self._next, tensors, after.origin.model_dump_json())
        write_atomic(self._note, write(pending), private=True)

    def save_checkpoint(self, checkpoint: TaskCheckpoint) -> None:
        make_private(self.path)
        tensors = _join(checkpoint.moments, _WEIGHT, checkpoint.weights)
        write_state(self._checkpoint, tensors, checkpoint.info.model_dump_json())

    def load_checkpoint(self, order: Order, began: Provenance) -> TaskCheckpoint | None:
        """The checkpoint of this very task, from the same state. Any other one is deleted."""
        if not self._checkpoint.exists():
            return None
        try:
            tensors, note = read_state(self._checkpoint)
            info = CheckpointInfo.model_validate_json(note)
            if info.fits(order, began):
                moments, weights = _split(tensors, _WEIGHT)
                return TaskCheckpoint(info, weights, moments)
        except (RunError, ValidationError):
            pass
        self._checkpoint.unlink(missing_ok=True)
        return None

    def rewrite(self, pending: PendingUpdate) -> None:
        """The same update under another lease."""
        write_atomic(self._note, write(pending), private=True)

    def pending(self) -> PendingUpdate | None:
        """The trained task that has no answer yet."""
        try:
            pending = PendingUpdate.model_validate_json(self._note.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            self.refuse()
            return None
        if not self._next.exists():  # killed in the middle of `accept`
            self._forget()
            return None
        return pending

    def payload(self) -> bytes:
        """The bytes of the pending update."""
        return self._payload.read_bytes()

    def accept(self) -> None:
        """The pending update counts: the next task continues its state."""
        self._next.replace(self._state)
        sync_folder(self.path)
        self._forget()

    def refuse(self) -> None:
        """The pending update does not count: nothing may continue its state."""
        self._forget()
        self._next.unlink(missing_ok=True)

    def _forget(self) -> None:
        self._note.unlink(missing_ok=True)
        self._payload.unlink(missing_ok=True)


class WorkerCache:
    """The folders of one worker.

    `shared` is for workers that never train the same block at once: they share the blocks' states.
    """

    def __init__(self, cache: Path, worker: str, *, shared: bool) -> None:
        self.cache, self.worker, self.shared = cache, worker, shared
        self._last = cache / "workers" / f"{worker}.json"

    def weights(self, run: str) -> Path:
        """Where the weights are that this worker has fetched."""
        return self.cache / "runs" / run / "weights" / self.worker

    def block(self, run: str, index: int) -> BlockFolder:
        return BlockFolder(self._states(run) / f"block-{index}")

    def blocks(self, run: str) -> list[BlockFolder]:
        """All blocks of a run that have a folder."""
        return [BlockFolder(path) for path in sorted(self._states(run).glob("block-*"))]

    def _states(self, run: str) -> Path:
        folder = self.cache / "runs" / run
        return folder if self.shared else folder / self.worker

    def trust(self, run: str, key: str) -> None:
        """Remember the key of a run's coordinator. A different key later is an error."""
        path = self.cache / "runs" / run / "coordinator.key"
        if not path.exists():
            make_private(path.parent)
            write_atomic(path, key.encode())
        elif path.read_text(encoding="ascii") != key:
            raise RunError(
                "this is not the coordinator that the run began with: its key is not the one in "
                f"{path}; ask its operator, and delete that file if the change is intended"
            )

    def remember(self, run: str, block: int) -> None:
        """Which block is being trained, for the next start."""
        make_private(self._last.parent)
        write_atomic(self._last, json.dumps({"run": run, "block": block}).encode())

    def held_state(self) -> Held | None:
        """The state of the block that was trained last. A pending update counts as accepted."""
        try:
            last = json.loads(self._last.read_bytes())
            folder = self.block(last["run"], last["block"])
            origin, pending = folder.load().origin, folder.pending()
            return Held(
                block=last["block"],
                optimizer=pending.task.task if pending else origin.optimizer,
                residual=origin.residual,
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def _join(moments: Mapping[str, Tensor], prefix: str, arrays: Tensors) -> dict[str, Tensor]:
    """Moments, and arrays under a prefix, as the tensors of one file."""
    return {**moments, **{prefix + name: torch.from_numpy(a) for name, a in arrays.items()}}


def _split(tensors: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, Tensor], Tensors]:
    """The inverse of `_join`."""
    moments = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
    arrays = {
        name.removeprefix(prefix): t.numpy()
        for name, t in tensors.items()
        if name.startswith(prefix)
    }
    return moments, arrays
