"""Plays a schedule of faults on a real run: processes, sockets, signals and a full disk."""

from __future__ import annotations

import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from blocktrain.bench.chaos.crew import (
    CAN_FILL,
    ChaosMember,
    CoordinatorProcess,
    Crew,
    ProcessorMeter,
)
from blocktrain.bench.chaos.forger import ForgerJob
from blocktrain.bench.chaos.schedule import FaultSchedule, ScheduledFault
from blocktrain.bench.network.shaper import ShapedLink, shape_link
from blocktrain.config import Config
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import RunError
from blocktrain.processes import ignore_interrupts
from blocktrain.watch.server import open_coordinator

STEP_SECONDS = 0.05  # between two looks at the schedule
BEGIN_SECONDS = 300.0  # until the first update is there
LEAVE_SECONDS = 60.0  # until everybody knows that the run is over
WAIT_SECONDS = 5.0  # that a fault waits for a worker to be at work
PATIENCE = 600.0  # after twice the time of the faults


@dataclass(frozen=True)
class ChaosRun:
    """A run that is to be played; without faults, if `calm`."""

    folder: Path
    config: Config
    policy: Policy
    data: str
    prepared: Path
    schedule: FaultSchedule
    honest: int
    byzantine: int
    calm: bool = False

    @property
    def coordinator(self) -> Path:
        return self.folder / "coordinator"

    def members(self) -> list[ChaosMember]:
        """Byzantine ones last. With every new process such a one makes another attack."""
        attacks, count = self.schedule.attacks, 0 if self.calm else self.byzantine
        honest = [ChaosMember(f"honest-{n + 1}") for n in range(self.honest)]
        return honest + [
            ChaosMember(
                f"byzantine-{n + 1}", [attacks[(n + i * count) % len(attacks)] for i in range(64)]
            )
            for n in range(count)
        ]


@dataclass
class Played:
    """What was seen from outside. All else is in the ledger."""

    run: ChaosRun
    members: list[ChaosMember]
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    stopped_by_itself: int = 0
    """Ends of the coordinator that were no kills: on a full disk it must stop."""
    finished: bool = False
    recoveries: list[float] = field(default_factory=list)
    forged: Counter[str] = field(default_factory=Counter)
    forgeries_accepted: Counter[str] = field(default_factory=Counter)
    processor_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def fault_minutes(self) -> float:
        """How long faults were played."""
        return min(self.seconds / 60, self.run.schedule.minutes)


def play(run: ChaosRun, on_share: Callable[[float], None] = lambda _: None) -> Played:
    """From version 0 until the run is finished. No process is left, however it ends."""
    coordinator = open_coordinator(run.coordinator)
    with closing(coordinator):
        coordinator.begin(run.config, run.policy, run.data, run.prepared)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process, members = CoordinatorProcess(run.coordinator, port), run.members()
    crew, played = Crew(members, run.folder / "caches", run.schedule.seed), Played(run, members)
    link = replace(run.schedule.link, loss=0.0, reset=0.0) if run.calm else run.schedule.link
    with ExitStack() as stack:
        stack.callback(_uninterrupted, process.end)
        process.start()
        process.wait_for_answer(BEGIN_SECONDS)
        line = stack.enter_context(shape_link("127.0.0.1", port, link))
        meter = stack.enter_context(ProcessorMeter(process, crew))
        stack.callback(_uninterrupted, crew.end)
        crew.start(line.url)
        ChaosTargets(run, process, crew, line, played).play(on_share)
    played.recoveries, played.processor_seconds = process.recoveries, meter.spent
    played.forged, played.forgeries_accepted = crew.forged, crew.forgeries_accepted
    return played


def _uninterrupted(end: Callable[[], None]) -> None:
    with ignore_interrupts():
        end()


class ChaosTargets:
    """Everything that a fault can hit, while the run goes on."""

    def __init__(
        self,
        run: ChaosRun,
        coordinator: CoordinatorProcess,
        crew: Crew,
        line: ShapedLink,
        played: Played,
    ) -> None:
        self.coordinator, self.crew, self.line = coordinator, crew, line
        self._run, self._played = run, played
        self._due: list[ScheduledFault] = []
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._began = time.monotonic()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    @property
    def _over(self) -> bool:
        """Whether somebody was told that the run is finished."""
        return any(member.left for member in self.crew.members)

    def play(self, on_share: Callable[[float], None]) -> None:
        """Until everybody has left, or it takes too long."""
        self._await_first_update()
        schedule, whole = self._run.schedule, 60 * self._run.schedule.minutes
        self._began = time.monotonic()
        if not self._run.calm:
            self._due = [f for f in schedule.faults if CAN_FILL or f.kind != "full-disk"]
            job = ForgerJob(self.coordinator.url, schedule.forgeries, whole, schedule.seed)
            self.crew.start_forger(job)
        # Nobody waits for a control that was ruined.
        limit = whole if self._run.policy.undefended else 2 * whole + PATIENCE
        left_at = None
        while self._now < limit or (self.crew.forging and self._now < limit + PATIENCE):
            # What still waits for its victim when the time is over is played all the same.
            self._turn(quiet=self._over or (self._now >= whole and not self._due))
            on_share(min(0.99, self._now / whole))
            if self._over:
                left_at = left_at or self._now
                everybody = all(member.left for member in self.crew.members)
                if not self.crew.forging and (everybody or self._now > left_at + LEAVE_SECONDS):
                    break
        self._played.finished, self._played.seconds = self._over, left_at or self._now

    def _await_first_update(self) -> None:
        while not any(member.receipts for member in self.crew.members):
            self._turn(quiet=True)
            if self._now > BEGIN_SECONDS:
                problems = "; ".join(m.problem for m in self.crew.members if m.problem)
                raise RunError(f"no update came in {BEGIN_SECONDS:.0f} s; {problems}")

    def _turn(self, *, quiet: bool) -> None:
        """What is due now, and what has happened since the last time."""
        now = self._now
        for at, end in [pair for pair in self._ends if quiet or pair[0] <= now]:
            end()
            self._ends.remove((at, end))
        if quiet:
            self._due.clear()
        for fault in [fault for fault in self._due if fault.at <= now]:
            if DEEDS[fault.kind](self, fault):
                self._due.remove(fault)
                self._played.faults[fault.kind] += 1
        self.crew.collect(STEP_SECONDS)
        if self.coordinator.ended:
            self._played.stopped_by_itself += 1
            self.coordinator.start(again=True)

    def later(self, seconds: float, end: Callable[[], None]) -> None:
        self._ends.append((self._now + seconds, end))

    def is_ready(self, fault: ScheduledFault) -> bool:
        """Whether a coordinator is there to be hit: at work, unless the fault does not wait."""
        return (fault.early or self.coordinator.answers) and not self.coordinator.full

    def victim(self, fault: ScheduledFault) -> int | None:
        """The member that a fault hits: the named one, or the next one that is at work."""
        members, anybody = self.crew.members, fault.early or self._now > fault.at + WAIT_SECONDS
        for number in range(fault.member, fault.member + len(members)):
            member = members[number % len(members)]
            if member.running is not None and (anybody or member.joined):
                return number % len(members)
        return None


# What a fault does; False: not yet.


def _kill_worker(targets: ChaosTargets, fault: ScheduledFault) -> bool:
    if (victim := targets.victim(fault)) is not None:
        targets.crew.kill(victim)
    return victim is not None


def _pause_worker(targets: ChaosTargets, fault: ScheduledFault) -> bool:
    if (victim := targets.victim(fault)) is not None:
        targets.crew.signal(victim, signal.SIGSTOP)
        targets.later(fault.seconds, lambda: targets.crew.signal(victim, signal.SIGCONT))
    return victim is not None


def _kill_coordinator(targets: ChaosTargets, fault: ScheduledFault) -> bool:
    if ready := targets.is_ready(fault):
        targets.coordinator.kill()
    return ready


def _fill_disk(targets: ChaosTargets, fault: ScheduledFault) -> bool:
    if ready := targets.is_ready(fault):
        targets.coordinator.fill_disk()
    return ready


def _partition(targets: ChaosTargets, fault: ScheduledFault) -> bool:
    targets.line.block()
    targets.later(fault.seconds, targets.line.open)
    return True


def _reset(targets: ChaosTargets, fault: ScheduledFault) -> bool:
    targets.line.close()
    targets.later(fault.seconds, targets.line.open)
    return True


DEEDS: dict[str, Callable[[ChaosTargets, ScheduledFault], bool]] = {
    "kill-worker": _kill_worker,
    "pause-worker": _pause_worker,
    "kill-coordinator": _kill_coordinator,
    "full-disk": _fill_disk,
    "partition": _partition,
    "reset": _reset,
}
