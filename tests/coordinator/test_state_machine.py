"""A real coordinator under any order of events. Nothing is lost or counted twice.

Workers join, lease, send once and again, and come late; the coordinator crashes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.recovery import recover_state
from blocktrain.coordinator.state import KEPT_TIMES
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import verify as verify_signature
from blocktrain.protocol.ledger import LedgerEntry, require_chain
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.watch.server import WatchedCoordinator, open_coordinator
from blocktrain.web.client import LocalClient
from support.fake_worker import FakeWorker, begin, crash

WORKERS = st.integers(0, 2)
FAIR = {
    Code.STALE_FENCE,
    Code.TOO_STALE,
    Code.TASK_ANSWERED,
    Code.BLOCK_FINISHED,
    Code.UNKNOWN_TASK,
    Code.LEASE_EXPIRED,
}


@dataclass
class Work:
    """A task that a worker has, or had: it never forgets what it could still send."""

    worker: FakeWorker
    task: m.Task
    payload: bytes
    receipt: m.Receipt | None = None


class Machine(RuleBasedStateMachine):
    """ServingRules are what happens; invariants are what the protocol promises."""

    coordinator: WatchedCoordinator

    @initialize(replicas=st.sampled_from([None, 1, 2]), staleness=st.sampled_from([0, 1, 4]))
    def begin(self, replicas: int | None, staleness: int) -> None:
        memory = Path("/dev/shm")  # nobody pulls the plug here
        self.folder = Path(
            tempfile.mkdtemp(prefix="blocktrain-machine-", dir=memory if memory.is_dir() else None)
        )
        self.clock = SimulatedClock(1000.0)
        self.coordinator = begin(
            self.folder / "run",
            self.clock,
            replicas=replicas,
            max_staleness=staleness,
            chunk_bytes=1 << 16,
        )
        run = self.coordinator.run.facts
        self.people = [
            FakeWorker(
                LocalClient(self.coordinator), seed, run.run, run.coordinator, run.fingerprint
            )
            for seed in (1, 2, 3)
        ]
        self.open: dict[int, Work] = {}  # by worker: what it is at
        self.works: list[Work] = []
        self.fences: dict[int, int] = defaultdict(int)
        self.head: LedgerEntry | None = None
        self.seen: list[dict[str, Any]] = []  # bodies of all entries, with their kind
        for who in range(3):
            self.join(who)

    def teardown(self) -> None:
        if hasattr(self, "coordinator"):
            self._memory_is_what_a_restart_would_read()
            self.coordinator.close()
            shutil.rmtree(self.folder)

    # What happens

    def _take(self, who: int, found: m.Task | m.Wait) -> None:
        if isinstance(found, m.Wait):
            self.open.pop(who, None)
            return
        assert found.fence >= self.fences[found.task], "a fence never goes down"
        self.fences[found.task] = found.fence
        mine = self.open.get(who)
        if mine is None or (mine.task.task, mine.task.fence) != (found.task, found.fence):
            self.open[who] = Work(self.people[who], found, self.people[who].payload(found))
            self.works.append(self.open[who])

    @rule(who=WORKERS)
    def join(self, who: int) -> None:
        self._take(who, self.people[who].join().next)

    @rule(who=WORKERS)
    def ask(self, who: int) -> None:
        try:
            self._take(who, self.people[who].ask())
        except Refused as error:
            assert error.code == Code.UNKNOWN_WORKER, error
            self.join(who)

    @rule(who=WORKERS)
    def leave(self, who: int) -> None:
        try:
            self.people[who].ask(leaving=True)
            self.open.pop(who, None)
        except Refused as error:
            assert error.code == Code.UNKNOWN_WORKER, error

    def _send(self, work: Work) -> m.SubmitReply | None:
        """Send an update, perhaps not for the first time; None: refused for a fair reason."""
        before = self.coordinator.run.store.head()
        try:
            if work.receipt is None:
                with suppress(Refused):  # whatever it is, the submission must not be better off
                    work.worker.upload(work.task, work.payload)
            reply = work.worker.client.submit(work.worker.submission(work.task, work.payload))
        except Refused as error:
            if error.code == Code.UNKNOWN_WORKER:  # it has left
                return None
            assert work.receipt is None, f"what was acknowledged is refused: {error}"
            assert error.code in FAIR, error
            assert self.coordinator.run.store.head() == before, "a refusal changes nothing"
            return None
        verify_signature(reply.receipt, work.worker.coordinator)
        assert work.receipt in (None, reply.receipt), "the same update has another receipt"
        work.receipt = reply.receipt
        return reply

    @rule(who=WORKERS)
    def send(self, who: int) -> None:
        work = self.open.pop(who, None)
        reply = self._send(work) if work else None
        if reply is None:
            self.ask(who)
        else:
            self._take(who, reply.next)

    @rule(who=WORKERS, others=st.lists(WORKERS, min_size=2, max_size=6))
    def others_are_faster(self, who: int, others: list[int]) -> None:
        """One trains on while the others send; then it comes, late or too late."""
        for other in others:
            if other != who:
                self.send(other)
        self.send(who)

    @rule(who=WORKERS)
    def sleep_past_the_lease(self, who: int) -> None:
        """Another may get the task meanwhile; then the sleeper's update is refused without harm."""
        self.time_passes(400.0)
        for other in {0, 1, 2} - {who}:
            self.ask(other)
        self.send(who)

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def send_any_again(self, data: st.DataObject) -> None:
        """Repeated, late, by a stale fence, or out of order: whatever was once begun."""
        self._send(data.draw(st.sampled_from(self.works)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def send_and_crash_before_the_answer_arrives(self, data: st.DataObject) -> None:
        work = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        first = self._send(work)
        self.crash()
        again = self._send(work)
        if first is not None:
            assert again is not None and again.receipt == first.receipt

    @precondition(lambda self: self.open)
    @rule(data=st.data(), done=st.booleans())
    def beat(self, data: st.DataObject, done: bool) -> None:
        work = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        try:
            work.worker.beat(work.task, work.task.steps if done else 0)
        except Refused as error:
            assert error.code == Code.UNKNOWN_WORKER, error

    @rule(seconds=st.sampled_from([0.5, 7.0, 40.0, 61.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.coordinator.tick()

    @rule()
    def crash(self) -> None:
        """Killed and started again, on a machine whose clock begins anew."""
        self._memory_is_what_a_restart_would_read()
        crash(self.coordinator)
        self.clock.now = 5.0 if self.clock.now > 100 else 1000.0
        self.coordinator = open_coordinator(self.folder / "run", self.clock)
        self.coordinator.tick()  # starts the run again
        for worker in self.people:
            worker.client = LocalClient(self.coordinator)

    @rule()
    def close_in_order(self) -> None:
        self.coordinator.close()
        self.coordinator = open_coordinator(self.folder / "run", self.clock)
        self.coordinator.tick()  # starts the run again
        for worker in self.people:
            worker.client = LocalClient(self.coordinator)

    # What is promised

    @invariant()
    def all_is_well(self) -> None:
        self._ledger_is_a_chain()
        self._every_acknowledged_update_counts_exactly_once()
        self._versions_are_consecutive()
        self._fences_only_grow()

    def _ledger_is_a_chain(self) -> None:
        new = self.coordinator.run.store.ledger(after=self.head.seq if self.head else 0)
        self.head = require_chain(new, self.head)
        self.seen += [{**json.loads(e.body), "kind": e.kind, "entry": e.hash} for e in new]

    def _every_acknowledged_update_counts_exactly_once(self) -> None:
        store = self.coordinator.run.store
        told = {body["id"]: body for body in self.seen if body["kind"] == "update"}
        assert len(told) == sum(body["kind"] == "update" for body in self.seen)
        assert len({body["task"] for body in told.values()}) == len(told), "a task counts once"
        versions = [body for body in self.seen if body["kind"] == "version"]
        merged = [name for body in versions for name in (*body["applied"], *body["dropped"])]
        dropped = [
            name
            for body in self.seen
            if body["kind"] == "round"
            for name in body.get("dropped", ())
        ]
        pending = [u.id for block in (1, 2) for u in store.pending(block)]
        assert sorted([*merged, *dropped, *pending]) == sorted(told)
        for work in self.works:
            if work.receipt is not None:
                assert told[work.receipt.update]["entry"] == work.receipt.entry
        self._contributions_add_up(told, [name for body in versions for name in body["applied"]])

    def _contributions_add_up(self, told: dict[str, Any], applied: list[str]) -> None:
        counted: dict[str, tuple[int, int]] = {}
        for name in applied:
            updates, tokens = counted.get(told[name]["worker"], (0, 0))
            counted[told[name]["worker"]] = (updates + 1, tokens + told[name]["tokens"])
        store = self.coordinator.run.store
        assert store.contributions() == counted
        newest = [store.version(block) for block in (1, 2)]
        assert sum(v.tokens for v in newest if v) == sum(tokens for _, tokens in counted.values())

    def _versions_are_consecutive(self) -> None:
        for block in (1, 2):
            made = [
                body for body in self.seen if body["kind"] == "version" and body["block"] == block
            ]
            assert [body["version"] for body in made] == list(range(len(made)))
            for parent, child in pairwise(made):
                assert child["parent"] == parent["weights"]["sha256"]
            live = self.coordinator.run
            assert live.newest(block).version == len(made) - 1 == live.state.blocks[block].version
            assert live.newest(block).weights.sha256 == made[-1]["weights"]["sha256"]

    def _fences_only_grow(self) -> None:
        given: dict[int, int] = defaultdict(int)
        for body in self.seen:
            if body["kind"] == "lease":
                task = body["order"]["task"]
                assert body["fence"] > given[task]
                given[task] = body["fence"]
        for lease in self.coordinator.run.state.leases.values():
            assert lease.fence == given[lease.task]

    def _memory_is_what_a_restart_would_read(self) -> None:
        live = self.coordinator.run
        stored = recover_state(live.store.recover(KEPT_TIMES), self.clock.now, None)
        assert set(stored.leases) == set(live.state.leases)
        for task, lease in stored.leases.items():
            mine = live.state.leases[task]
            names = ("fence", "worker", "base", "batches", "expired", "trained")
            assert [getattr(lease, name) for name in names] == [
                getattr(mine, name) for name in names
            ]
        for index, block in stored.blocks.items():
            assert {u.id for u in block.round.updates} == {
                u.id for u in live.state.blocks[index].round.updates
            }
            kept = ("version", "steps", "tokens", "read")
            assert [getattr(block, name) for name in kept] == [
                getattr(live.state.blocks[index], name) for name in kept
            ]
        manifest, head = self.coordinator.manifest(), live.store.head()
        assert head is not None and manifest.number == head.seq


Machine.TestCase.settings = settings(
    max_examples=10,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestEveryOrderOfEvents = Machine.TestCase
