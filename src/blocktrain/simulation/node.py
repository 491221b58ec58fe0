"""The coordinator's machine: its process dies and comes back, its disk stays.

Every step of the disk and every commit is an effect, and has a number. At each of them the process
may die, or the step may fail. Blobs are on the simulated disk, under the real code of the store.
Records are in the real store in memory or in SQLite: their unit is the transaction, which is
durable or was never made.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from blocktrain.coordinator.calls import Coordinator
from blocktrain.coordinator.run import TrainingRun
from blocktrain.errors import StorageFailed
from blocktrain.protocol.calls import Call
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.messages import Message
from blocktrain.protocol.refusals import Refused
from blocktrain.simulation.disk import SimulatedFiles
from blocktrain.simulation.scheduler import Scheduler, SimulatedTime
from blocktrain.simulation.store import EffectStore
from blocktrain.simulation.tape import PlannedFault, Tape
from blocktrain.store.blobs import FolderBlobs
from blocktrain.store.contract import Store
from blocktrain.store.memory import MemoryDisk, MemoryStore
from blocktrain.store.sql import SqlStore
from blocktrain.web.client import LocalClient

R = TypeVar("R", bound=Message | None)
T = TypeVar("T")
TICK_SECONDS = 0.5
MAY_FAIL = ("commit", "create", "write", "sync", "sync folder", "rename", "make folder")
ROOT = Path("/")


class Died(BaseException):
    """The coordinator's process has ended in the middle of something."""


class Silent:
    """See `coordinator.run.Observer`."""

    def on_start(self, run: TrainingRun) -> None: ...

    def on_commit(self, run: TrainingRun, kind: str, body: dict[str, Any]) -> None: ...

    def on_leave(self, run: TrainingRun, worker: str) -> None: ...

    def on_refusal(self, error: Refused, worker: str, block: int) -> None: ...

    def look(self, run: TrainingRun, now: float) -> None: ...

    def close(self) -> None: ...


class SimulatedCoordinator(Coordinator):
    @property
    def is_merging(self) -> bool:
        """Whether a round is being closed. A submission to its block would wait for that."""
        return bool(self._closer._claimed)


class LocalDoor(LocalClient):
    """The calls of a coordinator, message by message through their bytes."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)  # type: ignore[arg-type]  # nobody asks for the status

    def answer(
        self, call: Call[R], arguments: tuple[int | str, ...], message: Message | None, body: bytes
    ) -> R:
        return self._call(call, *arguments, message=message, content=body)


class CoordinatorNode:
    """`coordinator` is None while its process is down."""

    def __init__(
        self,
        tape: Tape,
        scheduler: Scheduler,
        identity: Identity,
        folder: Path,
        on_effect: Callable[[str, str], None],
    ) -> None:
        self._tape, self._scheduler, self._identity = tape, scheduler, identity
        self._folder, self._on_effect = folder, on_effect
        self._faults: Mapping[int, PlannedFault] = {f.effect: f for f in tape.faults if f.effect}
        self._draw = random.Random(f"disk {tape.seed}")
        self.files = SimulatedFiles()
        self.records = MemoryDisk()
        self.effects = self.starts = 0
        self.crashes = 0  # ends that may leave something behind
        self.coordinator: SimulatedCoordinator | None = None
        self.door: LocalDoor | None = None
        self.store: EffectStore | None = None
        self.clock = SimulatedTime(scheduler, 1000.0)
        self._uptime, self._began = 0.0, 1000.0
        self.overlap: Callable[[bool], None] = lambda _: None
        self._dead = self._down = False
        self._cause: PlannedFault | None = None

    @property
    def uptime(self) -> float:
        """Seconds that all processes so far have run, by their own clocks."""
        return self._uptime + self.clock.monotonic() - self._began

    @property
    def store_now(self) -> EffectStore:
        if self.store is None:
            raise StorageFailed("the coordinator is down")
        return self.store

    # Effects

    def effect(self, step: str, path: str) -> bool:
        """Called before every step. Raises Died, or gives whether the step fails."""
        if self._dead:
            raise Died
        self.effects += 1
        self._on_effect(step, path)
        fault = self._faults.get(self.effects)
        if fault is None or self._scheduler.now >= self._tape.world.calm:
            return False
        if fault.kind == "overlap" and step != "commit" and self._is_unlocked():
            self.overlap(self.coordinator is not None and self.coordinator.is_merging)
        elif fault.kind == "crash":
            self._dead, self._cause = True, fault
            raise Died
        elif fault.kind == "fail" and step in MAY_FAIL:
            self._cause = fault
            return True
        return False

    def _is_unlocked(self) -> bool:
        """Whether other requests can be served now: only where the real code lets go of its lock.

        A lock knows its owner, so another thread must ask.
        """
        if self.coordinator is None or not self.coordinator.ready:
            return False
        lock, free = self.coordinator.run.lock, []

        def ask() -> None:
            if lock.acquire(blocking=False):
                lock.release()
                free.append(True)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return bool(free)

    # Life and death

    def start(self) -> None:
        """Start the process. If that dies or fails, it is started again later."""
        self._dead, self._down, self._cause = False, False, None
        self.starts += 1
        # A monotonic clock begins anywhere.
        self.clock = SimulatedTime(self._scheduler, self._draw.choice((5.0, 1000.0, 1e6)))
        self._began = self.clock.monotonic()
        try:
            self.files.effect = self.effect
            self.store = EffectStore(self._open_records(), self._open_blobs, self.effect)
            coordinator = SimulatedCoordinator(self.store, self._identity, self.clock, Silent())
            if not coordinator.ready:
                world, config = self._tape.world, self._tape.world.config(self._tape.seed)
                coordinator.begin(config, world.policy(), "noise", self._folder / "prepared")
            coordinator.tick()
            self.coordinator, self.door = coordinator, LocalDoor(coordinator)
            self._scheduler.after(TICK_SECONDS, self._tick(coordinator))
        except (Died, StorageFailed) as error:
            self.end(error)

    def _open_records(self) -> Store:
        run_id = f"{self._tape.seed % 2**64:032x}"
        if self._tape.world.store == "sql":
            return SqlStore(self._folder / "records", run_id)
        return MemoryStore(self.records, run_id)

    def _open_blobs(self, on_failure: Callable[[str], object]) -> FolderBlobs:
        return FolderBlobs(ROOT, on_failure, self.files)

    def _tick(self, coordinator: Coordinator) -> Callable[[], None]:
        def tick() -> None:
            if self.coordinator is coordinator:
                self.attempt(coordinator.tick)
                self._scheduler.after(TICK_SECONDS, tick)

        return tick

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do something in the process. None, if the process has ended."""
        try:
            return work()
        except (Died, StorageFailed) as error:
            self.end(error)
            return None

    def end(self, error: BaseException) -> None:
        """The process has died, or stops because its disk has failed."""
        cause = self._cause
        if self._down:  # it died in a request that was served while another one waited
            return
        if cause is None:  # its disk is fine: the real code has given up for another reason
            raise error
        self.die(power=cause.power, seconds=cause.seconds)

    def die(self, *, power: bool, seconds: float, orderly: bool = False) -> None:
        """End the process, and start it again after some seconds."""
        if orderly and self.coordinator is not None:
            try:
                self.coordinator.close()
            except Died:
                orderly = False
        self.crashes += power or not orderly
        self._uptime, self._began = self.uptime, self.clock.monotonic()
        self._dead = self._down = True
        self.coordinator = self.door = None
        if self.store is not None:
            with suppress(Died):
                self.store.close()
        self.store = None
        if power:
            self.files.lose_power(self._draw)
        self._scheduler.after(max(0.1, seconds), self.start)

    def close_and_reopen(self) -> None:
        """End the process in order, and open what it has stored."""
        if self.coordinator is not None:
            self.coordinator.close()
        self.coordinator = self.door = None
        self.store = EffectStore(self._open_records(), self._open_blobs, self.effect)
