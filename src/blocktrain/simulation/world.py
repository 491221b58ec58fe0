"""One simulation: a tape in, what happened out. The same tape gives the same hash."""

from __future__ import annotations

import hashlib
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import Unreachable
from blocktrain.protocol import calls
from blocktrain.protocol.identity import Identity, identity_from_seed
from blocktrain.protocol.messages import Kick, Message, Task, TaskRequest
from blocktrain.protocol.refusals import Refused
from blocktrain.simulation.begin import write_beginning
from blocktrain.simulation.byzantine import POLICIES
from blocktrain.simulation.invariants import Invariants, Violation
from blocktrain.simulation.network import Network, SentRequest, SimulatedClient
from blocktrain.simulation.node import CoordinatorNode
from blocktrain.simulation.scheduler import Scheduler, SimulatedTime
from blocktrain.simulation.tape import PlannedFault, Tape
from blocktrain.simulation.worker import HonestWorker, Outside, WorkerDisk

END_SECONDS = 4000.0  # after the last fault the run ends within this time
MOST_EVENTS = 400_000
MEMORY_EVERY = 20  # requests between two looks at what a restart would read


@dataclass(frozen=True)
class Outcome:
    """What became of a tape."""

    seed: int
    hash: str
    """Of everything that happened, in its order."""
    violation: str = ""
    """The name of the invariant that does not hold; empty: all hold."""
    sentence: str = ""
    requests: int = 0
    effects: int = 0
    starts: int = 0
    entries: int = 0
    seconds: float = 0.0
    """Simulated."""


class World:
    def __init__(self, tape: Tape, folder: Path) -> None:
        self._tape = tape
        self._digest = hashlib.sha256()
        self._scheduler = Scheduler()
        self._config = tape.world.config(tape.seed)
        write_beginning(tape, self._config, folder / "prepared")
        paces = (*tape.world.honest, *(1.0 for _ in tape.world.byzantine))
        identities = [_identity(tape.seed, number) for number in range(len(paces) + 1)]
        self._node = CoordinatorNode(tape, self._scheduler, identities[0], folder, self._on_effect)
        self._network = Network(tape, self._scheduler, self._serve)
        self._node.overlap = self._network.serve_early
        keys = {identity.worker: identity.public_key for identity in identities}
        self._invariants = Invariants(tape, self._node, keys)
        self._served = 0
        self._clocks: list[SimulatedTime] = []
        self._workers = [
            self._make_worker(number, pace, identities[number])
            for number, pace in enumerate(paces, start=1)
        ]
        for fault in tape.faults:
            if fault.at and fault.at < tape.world.calm:
                self._scheduler.at(fault.at, lambda fault=fault: self._happen(fault))  # type: ignore[misc]
        self._scheduler.at(tape.world.calm, self._network.heal)

    def _make_worker(self, number: int, pace: float, identity: Identity) -> HonestWorker:
        clock = SimulatedTime(self._scheduler, 77.0 * number)
        self._clocks.append(clock)
        outside = Outside(
            self._scheduler,
            clock,
            SimulatedClient(self._network, number, clock),
            identity,
            self._config,
            self._invariants,
            random.Random(f"worker {number} {self._tape.seed}"),
        )
        honest = len(self._tape.world.honest)
        if number <= honest:
            return HonestWorker(number, pace, outside)
        return POLICIES[self._tape.world.byzantine[number - honest - 1]](number, pace, outside)

    # What happens

    def run(self) -> None:
        """Until the run is finished and every honest worker knows it. Violation, if it is not."""
        end = self._tape.world.calm + END_SECONDS
        self._node.start()
        while not self._is_over():
            alive = self._scheduler.now < end and self._scheduler.events < MOST_EVENTS
            if not (alive and self._scheduler.step()):
                raise Violation("liveness", f"the run does not end ({self._standing()})")
        self._invariants.check_memory()
        self._node.close_and_reopen()
        self._invariants.finish()

    def _is_over(self) -> bool:
        coordinator = self._node.coordinator
        honest = (worker for worker in self._workers if worker.honest)
        return (
            self._scheduler.now >= self._tape.world.calm
            and coordinator is not None
            and coordinator.finished is not None
            and all(worker.ended for worker in honest)
        )

    def _standing(self) -> str:
        coordinator = self._node.coordinator
        reason = coordinator.run.reason if coordinator else "the coordinator is down"
        left = [w.number for w in self._workers if w.honest and not w.ended]
        return f"{reason}; honest workers at work: {left}"

    def _on_effect(self, step: str, path: str) -> None:
        self._note(f"{step} {path}")

    def _note(self, line: str) -> None:
        self._digest.update(f"{self._scheduler.now:.6f} {line}\n".encode())

    def _serve(self, request: SentRequest) -> Message | bytes | None:
        """A request reaches the coordinator. Refused is an answer; Unreachable is none."""
        node, name = self._node, request.call.name
        if node.door is None:
            raise Unreachable("no answer; is the coordinator running?")
        self._served += 1
        try:
            reply = node.attempt(lambda: self._answer(request))
            outcome = "answered" if node.door is not None else "died"
        except Refused as error:
            outcome = error.code
            self._after(f"{request.number} {request.worker} {name} {outcome}")
            raise
        self._after(f"{request.number} {request.worker} {name} {outcome}")
        if node.door is None:
            raise Unreachable("the connection was reset")
        return reply

    def _answer(self, request: SentRequest) -> Message | bytes | None:
        node, counts = self._node, self._invariants
        if node.coordinator is None or node.door is None:
            raise Unreachable("no answer; is the coordinator running?")
        if request.call is calls.BLOB:
            name, start, worker = map(str, request.arguments)
            content = b"".join(node.coordinator.blob(name, int(start), worker))
            counts.check()
            counts.read(name)
            counts.bytes_out += len(content)
            return content
        if request.call is calls.PUT_CHUNK:
            counts.most_in += len(request.body)
        elif request.call is calls.HEARTBEAT and request.message is not None:
            at_once = node.coordinator.heartbeat_at_once(request.message)  # type: ignore[arg-type]
            if at_once is not None:
                return at_once
        message = request.message
        reply = node.door.answer(request.call, request.arguments, message, request.body)
        counts.bytes_in += len(request.body)
        task = getattr(reply, "next", None)
        if isinstance(task, Task):
            counts.promised(task)
        if isinstance(message, TaskRequest) and message.leaving:
            counts.left(message.worker)
        return reply

    def _after(self, line: str) -> None:
        """An event is over: everything must hold."""
        self._invariants.check()
        if self._served % MEMORY_EVERY == 0:
            self._invariants.check_memory()
        head = self._invariants.head
        self._note(f"{line} {head.hash if head else ''}")

    def _happen(self, fault: PlannedFault) -> None:
        self._note(f"{fault.kind} {fault.worker}")
        node = self._node
        worker = self._workers[fault.worker - 1] if 0 < fault.worker <= len(self._workers) else None
        if fault.kind == "stop" and node.coordinator is not None:
            self._invariants.check_memory()
            node.die(power=fault.power, seconds=fault.seconds, orderly=fault.orderly)
        elif fault.kind == "leap":
            node.clock.leap(fault.seconds)
            if node.coordinator is not None:  # what is due comes before what arrives
                node.attempt(node.coordinator.tick)
        elif fault.kind == "wall":
            clock = self._clocks[fault.worker - 1] if worker else node.clock
            clock.ahead += fault.seconds
        elif worker is None:
            return
        elif fault.kind == "partition":
            self._network.cut_off(fault.worker, fault.seconds)
        elif fault.kind in ("kill", "wipe"):
            worker.kill()
            if fault.kind == "wipe":
                worker.disk = WorkerDisk()
            self._scheduler.after(fault.seconds, worker.restart)
        elif fault.kind == "freeze":
            self._clocks[fault.worker - 1].frozen = self._scheduler.now + fault.seconds
        elif fault.kind == "leave":
            worker.leaving = True
            self._scheduler.after(fault.seconds + 60.0, worker.restart)
        elif fault.kind == "kick" and node.coordinator is not None:
            self._kick(worker.id)
        self._after(fault.kind)

    def _kick(self, worker: str) -> None:
        coordinator = self._node.coordinator
        if coordinator is not None:
            try:
                self._node.attempt(lambda: coordinator.kick(Kick(worker=worker)))
            except Refused:
                return  # it has not joined yet

    def close(self) -> None:
        self._scheduler.close()
        if self._node.store is not None:
            self._node.store.close()

    def outcome(self, violation: Violation | None) -> Outcome:
        head = self._invariants.head
        if violation is not None:
            self._note(str(violation))
        return Outcome(
            self._tape.seed,
            self._digest.hexdigest(),
            violation.invariant if violation else "",
            violation.sentence if violation else "",
            self._network.sent,
            self._node.effects,
            self._node.starts,
            head.seq if head else 0,
            round(self._scheduler.now, 3),
        )


def _identity(seed: int, number: int) -> Identity:
    return identity_from_seed(hashlib.sha256(f"simulated {seed} {number}".encode()).digest())


def simulate(tape: Tape) -> Outcome:
    """Run a tape to its end, or to the first invariant that does not hold."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="blocktrain-simulate-", dir=place) as folder:
        world = World(tape, Path(folder))
        try:
            world.run()
            return world.outcome(None)
        except Violation as violation:
            return world.outcome(violation)
        except Exception as error:  # the real code has failed in a way that it should not
            return world.outcome(Violation("error", f"{type(error).__name__}: {error}"))
        finally:
            world.close()
