"""What a worker keeps on its disk of one block, so that it may be killed at any moment.

state.safetensors     optimizer moments and compression residual after the last accepted task
pending.safetensors   the same after a task that is trained and not yet answered
pending.payload       the update itself
pending.json          the task and the submission; written last and removed first, so that it vouches for the other two
paused.safetensors    weights and moments in the middle of a task, when the worker was told to stop there
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from blocktrain.errors import RunError
from blocktrain.files import sync_folder, write_atomic
from blocktrain.learning.train import read_state, write_state
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

_RESIDUAL = "residual."
_WEIGHT = "weight."


class Facts(Message):
    """Where a state comes from and what it continues to."""

    optimizer: Number | None = None
    """The task that left the moments."""
    residual: Number | None = None
    """The task that left the residual."""
    lineage: Sha256 | None = None
    version: Count = 0
    """The version that the task makes if nobody else has a part in it."""
    step: Count = 0
    """Where the schedule continues."""

    def fit(self, order: Order) -> bool:
        """Whether an order continues this state: it says so, or it begins exactly where this ends."""
        if self.optimizer is None:
            return False
        return self.optimizer == order.continues.optimizer or (self.version, self.step) == (
            order.base,
            order.start_step,
        )


@dataclass
class Kept:
    """Moments and residual with their origin; all empty: fresh."""

    facts: Facts = field(default_factory=Facts)
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    residual: Tensors = field(default_factory=dict)


class Pending(Message):
    """A trained task and what is said about it; the signature, nonce and time are made anew whenever it is sent."""

    task: Task
    submission: Submission

    def answers(self, order: Order) -> bool:
        """Whether this is what an order asks for; what it really continued is in the submission."""
        mine = self.task.order.model_copy(update={"continues": order.continues})
        return mine == order


class Pause(Message):
    """Where in a task a worker was told to stop, and what it had begun with."""

    order: Order
    began: Facts
    step: Count
    first_loss: float
    last_loss: float
    seconds: float
    """That the steps up to here took."""

    def fits(self, order: Order, began: Facts) -> bool:
        """Whether it is on the way to what an order asks for, from the same optimizer; the residual has no part in training."""
        same_order = self.order.model_copy(update={"continues": order.continues}) == order
        return same_order and (self.began.optimizer, self.began.lineage) == (
            began.optimizer,
            began.lineage,
        )


@dataclass
class Halfway:
    """A task that was begun: what is told about it, and the weights and moments that it has come to."""

    pause: Pause
    weights: Tensors
    moments: Mapping[str, Tensor]


class BlockFolder:
    """The files of one block. Used by one worker at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state, self._next = path / "state.safetensors", path / "pending.safetensors"
        self._payload, self._note = path / "pending.payload", path / "pending.json"
        self._halfway = path / "paused.safetensors"

    def load(self) -> Kept:
        """The state after the last accepted task; an unreadable one is as good as none."""
        if not self._state.exists():
            return Kept()
        try:
            tensors, note = read_state(self._state)
            facts = Facts.model_validate_json(note)
        except (RunError, ValidationError):
            return Kept()
        residual = {
            k.removeprefix(_RESIDUAL): t.numpy()
            for k, t in tensors.items()
            if k.startswith(_RESIDUAL)
        }
        return Kept(
            facts, {k: t for k, t in tensors.items() if not k.startswith(_RESIDUAL)}, residual
        )

    def save(self, after: Kept, pending: Pending, payload: bytes) -> None:
        """Keep a trained task until it is answered; durable when this returns."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._note.unlink(missing_ok=True)
        self._halfway.unlink(missing_ok=True)
        tensors = {
            **after.moments,
            **{_RESIDUAL + name: torch.from_numpy(t) for name, t in after.residual.items()},
        }
        write_atomic(self._payload, payload)
        write_state(self._next, tensors, after.facts.model_dump_json())
        write_atomic(self._note, write(pending))

    def halt(self, halfway: Halfway) -> None:
        """Keep a task that is to be continued where it is."""
        self.path.mkdir(parents=True, exist_ok=True)
        tensors = {
            **halfway.moments,
            **{_WEIGHT + name: torch.from_numpy(t) for name, t in halfway.weights.items()},
        }
        write_state(self._halfway, tensors, halfway.pause.model_dump_json())

    def halfway(self, order: Order, began: Facts) -> Halfway | None:
        """The same task, begun with the same state by whoever was told to stop; whatever else lies there is of no use any more."""
        if not self._halfway.exists():
            return None
        try:
            tensors, note = read_state(self._halfway)
            pause = Pause.model_validate_json(note)
            if pause.fits(order, began):
                weights = {
                    k.removeprefix(_WEIGHT): t.numpy()
                    for k, t in tensors.items()
                    if k.startswith(_WEIGHT)
                }
                return Halfway(
                    pause, weights, {k: t for k, t in tensors.items() if not k.startswith(_WEIGHT)}
                )
        except (RunError, ValidationError):
            pass
        self._halfway.unlink(missing_ok=True)
        return None

    def rewrite(self, pending: Pending) -> None:
        """The same update under another lease."""
        write_atomic(self._note, write(pending))

    def pending(self) -> Pending | None:
        """The trained task that has no answer yet."""
        try:
            found = Pending.model_validate_json(self._note.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            self.refuse()
            return None
        if not self._next.exists():  # killed while it was being accepted
            self._forget()
            return None
        return found

    def payload(self) -> bytes:
        """The update that is pending."""
        return self._payload.read_bytes()

    def accept(self) -> None:
        """The pending update counts: its state is the one to go on from."""
        self._next.replace(self._state)
        sync_folder(self.path)
        self._forget()

    def refuse(self) -> None:
        """The pending update does not count: nothing of it may be continued."""
        self._forget()
        self._next.unlink(missing_ok=True)

    def _forget(self) -> None:
        self._note.unlink(missing_ok=True)
        self._payload.unlink(missing_ok=True)


class Cabinet:
    """The folders of one worker. `shared` is for workers that never train the same block at once: they share the blocks' states."""

    def __init__(self, cache: Path, worker: str, *, shared: bool) -> None:
        self.cache, self.worker, self.shared = cache, worker, shared
        self._last = cache / "workers" / f"{worker}.json"

    def weights(self, run: str) -> Path:
        """For the weights that this worker has fetched."""
        return self.cache / "runs" / run / "weights" / self.worker

    def block(self, run: str, index: int) -> BlockFolder:
        """The files of a block."""
        return BlockFolder(self._states(run) / f"block-{index}")

    def blocks(self, run: str) -> list[BlockFolder]:
        """All blocks of a run that something is kept of."""
        return [BlockFolder(path) for path in sorted(self._states(run).glob("block-*"))]

    def _states(self, run: str) -> Path:
        folder = self.cache / "runs" / run
        return folder if self.shared else folder / self.worker

    def trust(self, run: str, key: str) -> None:
        """Remember the key of a run's coordinator; another one later is an error."""
        path = self.cache / "runs" / run / "coordinator.key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, key.encode())
        elif path.read_text(encoding="ascii") != key:
            raise RunError(
                f"this is not the coordinator that the run began with: its key is not the one in {path}"
            )

    def remember(self, run: str, block: int) -> None:
        """Which block is being trained, for the next start."""
        self._last.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._last, json.dumps({"run": run, "block": block}).encode())

    def held(self) -> Held | None:
        """The state of the block that was trained last; an update that waits for its answer is taken for accepted."""
        try:
            last = json.loads(self._last.read_bytes())
            folder = self.block(last["run"], last["block"])
            facts, pending = folder.load().facts, folder.pending()
            return Held(
                block=last["block"],
                optimizer=pending.task.task if pending else facts.optimizer,
                residual=facts.residual,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
