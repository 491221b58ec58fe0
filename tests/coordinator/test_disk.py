"""What stays on a coordinator's disk, and what is removed."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import open_folder
from blocktrain.coordinator.limits.retention import BlockRetention
from blocktrain.protocol import messages as m
from blocktrain.protocol.ledger import VersionBody, read_body
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import pack
from blocktrain.protocol.transfer import sha256
from blocktrain.runs.pull import _fetch_weights
from blocktrain.watch.server import WatchedCoordinator, open_coordinator
from blocktrain.web.client import LocalClient
from support.fake_worker import FakeWorker, as_task, beginning, whole_ledger

FULL = 1000  # bytes of whole weights in the tests of the rule


def version(name: str, delta: int | None, *, momentum: str = "") -> dict[str, Any]:
    """What the ledger says of a version."""
    return {
        "weights": {"sha256": name, "length": FULL},
        "delta": None if delta is None else {"sha256": f"d{name}", "length": delta},
        "momentum": {"sha256": momentum, "length": FULL} if momentum else None,
        "residual": {"sha256": f"r{name}", "length": FULL} if delta else None,
    }


def whole(retention: BlockRetention, names: str, delta: int, needed: str = "") -> str:
    """The weights that stay of these versions, of which two may be new."""
    gone: set[str] = set()
    for number, name in enumerate(names):
        retention.add(version(name, delta if number else None))
        gone |= retention.retire(2, set(needed))
    return "".join(name for name in names if name not in gone)


def test_weights_stay_whole_as_often_as_their_deltas_weigh_as_much() -> None:
    assert whole(BlockRetention(), "abcdefghijklmnopqrstuvwxyz", 100) == "akuyz"
    assert whole(BlockRetention(), "abcdefghijklmnopqrstuvwxyz", 1) == "ayz"
    assert whole(BlockRetention(), "abcdefgh", 1000) == "abcdefgh"


def test_what_somebody_needs_stays_until_nobody_does() -> None:
    retention = BlockRetention()
    assert whole(retention, "abcdefgh", 1, needed="d") == "adgh"
    retention.add(version("i", 1))
    assert retention.retire(2, set()) == {"d", "g", "rg"}


def test_versions_that_are_published_whole_stay() -> None:
    retention = BlockRetention()
    for name in "abcdef":
        retention.add(version(name, None, momentum=f"m{name}"))
    assert retention.retire(2, set()) == {"ma", "mb", "mc", "md"}


def test_the_weights_of_a_version_that_changes_nothing_stay() -> None:
    retention = BlockRetention()
    gone: set[str] = set()
    for name in ("a", "b", "c", "b", "c", "c"):
        retention.add(version(name, 1 if retention.versions else None))
        gone |= retention.retire(2, set())
    assert not gone & {"a", "c"}


def published(coordinator: WatchedCoordinator) -> dict[int, list[VersionBody]]:
    """By block."""
    found: dict[int, list[VersionBody]] = {}
    for entry in whole_ledger(LocalClient(coordinator)):
        if entry.kind == "version":
            body = read_body(VersionBody, entry)
            found.setdefault(body.block, []).append(body)
    return found


def test_old_weights_are_removed_and_everything_still_follows(tmp_path: Path) -> None:
    with beginning(tmp_path, keep_versions=4) as coordinator:
        client = LocalClient(coordinator)
        slow, *quick = [FakeWorker(client, seed) for seed in (1, 2, 3)]
        late = slow.joined()
        for worker in quick:
            worker.join()
        for _ in range(14):
            for worker in quick:
                worker.send(as_task(worker.ask()))
        chains, blobs = published(coordinator), coordinator.run.store.blobs
        here = {b: [v.version for v in c if blobs.has(v.weights.sha256)] for b, c in chains.items()}
        block, chain = max(chains.items(), key=lambda item: len(item[1]))
        newest = chain[-1].version
        assert {0, late.base, *range(newest - 3, newest + 1)} <= set(here[late.block]) | {late.base}
        assert len(here[block]) < 8 < len(chain), "one in about nine stays whole"
        assert slow.weights(late), "what a task starts from is there"

        gone = next(v for v in chain if not blobs.has(v.weights.sha256))
        with pytest.raises(Refused) as refused:
            coordinator.blob_size(gone.weights.sha256)
        assert refused.value.code is Code.NOT_FOUND
        pin = m.BlockVersion(block=block, version=gone.version, weights=gone.weights)
        deltas = [step for v in chain if (step := v.step)]
        (tmp_path / "state").mkdir()
        tensors = _fetch_weights(client, pin, deltas, tmp_path / "state")
        assert sha256(pack(tensors)) == gone.weights.sha256, "`pull` makes it of deltas"
        assert audit(open_folder(tmp_path)).ok
        kept = set(blobs.names())
        blobs.put(pack(tensors))
    with closing(open_coordinator(tmp_path)) as again:
        assert set(again.run.store.blobs.names()) == kept, "a start removes what a crash has left"
        worker = FakeWorker(LocalClient(again), 4)
        worker.send(worker.joined())


def test_a_block_without_workers_is_audited_after_all_others_went_on(tmp_path: Path) -> None:
    """The coordinator has removed momentum and residual of the slow block's versions."""
    with beginning(tmp_path, keep_versions=2, outer="nesterov") as coordinator:
        slow, quick = [FakeWorker(LocalClient(coordinator), seed) for seed in (1, 2)]
        tasks = {worker.id: worker.joined() for worker in (slow, quick)}
        assert tasks[slow.id].block != tasks[quick.id].block
        for worker, count in ((slow, 2), (quick, 12), (slow, 4), (quick, 2)):
            for _ in range(count):
                tasks[worker.id] = as_task(worker.send(tasks[worker.id]).next)
        chains, blobs = published(coordinator), coordinator.run.store.blobs
        last = chains[tasks[slow.id].block][2]
        for gone in (last.momentum, last.residual):
            assert gone is not None and not blobs.has(gone.sha256)
    assert audit(open_folder(tmp_path)).findings == ()


def test_an_audit_misses_the_newest_weights_though_they_follow(tmp_path: Path) -> None:
    with beginning(tmp_path) as coordinator:
        worker = FakeWorker(LocalClient(coordinator))
        worker.send(worker.joined())
        (block,) = (b for b, chain in published(coordinator).items() if len(chain) > 1)
        coordinator.run.store.blobs.delete(coordinator.run.newest(block).weights.sha256)
        (finding,) = audit(open_folder(tmp_path)).findings
        assert finding.name == "blob" and "newest version" in finding.sentence


def test_a_run_of_an_earlier_release_keeps_all(tmp_path: Path) -> None:
    with beginning(tmp_path, keep_versions=0) as coordinator:
        worker = FakeWorker(LocalClient(coordinator))
        task = worker.joined()
        for _ in range(8):
            task = as_task(worker.send(task).next)
        blobs = coordinator.run.store.blobs
        names = Counter(
            blobs.has(v.weights.sha256) for c in published(coordinator).values() for v in c
        )
        assert not names[False]
