"""One sentence when somebody tries to get more than its share, and no flood of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from blocktrain.cli.status import StatusView
from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.limits.quotas import DiskLimits
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.transfer import sha256
from blocktrain.watch.narrator import Narrator
from blocktrain.watch.notices import MOST_KNOWN, PAUSE_SECONDS, Notices
from blocktrain.watch.server import WatchedCoordinator
from blocktrain.web.client import LocalClient
from support.fake_worker import FakeWorker, beginning


def told(coordinator: WatchedCoordinator, clock: SimulatedClock) -> list[str]:
    """The notices of a status, after what is due."""
    narrator = coordinator.run.observer
    assert isinstance(narrator, Narrator)
    narrator.flush(0.0, clock.now)
    clock.now += 2.0
    coordinator.tick()
    return [f"{n.attempt}: {n.sentence}" for n in coordinator.status().notices]


def test_who_tries_is_told_of_in_one_sentence_each(tmp_path: Path) -> None:
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock, undefended=False) as coordinator:
        client, quotas = LocalClient(coordinator), coordinator.run.quotas
        worker = FakeWorker(client)
        task = worker.joined()
        quotas.limits = DiskLimits(worker=task.chunk_bytes)
        for _ in range(3):
            for index in range(9):
                content = bytes([index]) * task.chunk_bytes
                with suppress(Refused):
                    client.put_chunk(task.task, index, task.ticket, content, sha256(content))
                    continue
                refused = Refused(Code.OVER_QUOTA, f"worker {worker.id[:8]} holds too much")
                coordinator.count_refusal(refused, worker.id, task.block)
                coordinator.count_refusal(Refused(Code.WRONG_STAGE_KEY))
            notices = told(coordinator, clock)
        assert sorted(n.partition(":")[0] for n in notices) == ["share", "stage"], notices
        quotas.limits = DiskLimits(total=1)
        notices = told(coordinator, clock)
        assert "disk: no updates are taken: the run holds" in notices[-1]
        lines = list(StatusView(coordinator.status())._summary())
        assert any("holds too much" in line for line in lines)


def test_tasks_that_are_only_taken_are_told_of(tmp_path: Path) -> None:
    clock = SimulatedClock(1000.0)
    with beginning(tmp_path, clock=clock, undefended=False) as coordinator:
        worker = FakeWorker(LocalClient(coordinator))
        worker.join()
        for _ in range(4):
            leases = coordinator.run.state.leases.values()
            clock.now = max(lease.expires for lease in leases) + 1
            coordinator.tick()
            worker.ask()
        notices = [n for n in told(coordinator, clock) if n.startswith("hold")]
        assert notices and "tasks in a row and answered none" in notices[0]


def test_notices_are_limited_by_member_and_kind_and_in_all() -> None:
    notices = Notices()
    due = [notices.is_due(now, "share", "w") for now in (0.0, 1.0, 59.0, PAUSE_SECONDS, 61.0)]
    assert due == [True, False, False, True, False]
    assert notices.is_due(61.0, "hold", "w")
    many = sum(notices.is_due(62.0, "share", f"w{n}") for n in range(3 * MOST_KNOWN))
    assert many == MOST_KNOWN - 2
