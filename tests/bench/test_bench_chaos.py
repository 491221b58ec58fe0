"""Chaos at tiny scale: real kills, a full disk and lies; what is counted; and Ctrl-C."""

from __future__ import annotations

import fcntl
import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from blocktrain.audit.evidence import open_folder
from blocktrain.bench.attacks.member import AttackingWorker
from blocktrain.bench.chaos.chaos import problems
from blocktrain.bench.chaos.figures import LedgerRecord, LossMeter, is_harmful, read_record
from blocktrain.bench.chaos.forgery import FORGERIES, ForgeryMaterial
from blocktrain.bench.chaos.play import DEEDS
from blocktrain.bench.chaos.schedule import FAULTS, draw_schedule
from blocktrain.bench.chaos.table import is_safe
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import BlockTrainError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import identity_from_seed
from blocktrain.protocol.ledger import LeaseFacts, UpdateBody, read_body
from blocktrain.protocol.transfer import sha256
from blocktrain.watch.server import WatchedCoordinator
from blocktrain.web.client import LocalClient
from conftest import write_text
from support.command import blocktrain, start
from support.fake_worker import FakeWorker, beginning, snapshot, whole_ledger
from support.waiting import until
from support.worker_run import worker_runs

pytestmark = pytest.mark.timeout(1800)
KILLED_EARLY = "7"  # a seed that kills the coordinator, and then fills its disk, within 2 s


def options(folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text(write_text(2000, seed=1))
    return ["chaos", "--scale", "tiny", "--seed", KILLED_EARLY, "--data", str(text), "--json"]


def test_a_run_survives_kills_a_full_disk_and_lies(tmp_path: Path) -> None:
    words = [*options(tmp_path), "--minutes", "0.1", "--steps", "24", "--out", "out"]
    done = blocktrain(*words, cwd=tmp_path, timeout=1700)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result)[:3] == ["command", "seed", "machine"]
    assert result == json.loads((tmp_path / "out" / "chaos.json").read_text())
    assert (tmp_path / "out" / "chaos.png").stat().st_size > 1000
    planned = json.loads((tmp_path / "out" / "schedule.json").read_text())
    again = draw_schedule(int(KILLED_EARLY), 0.1, 5)
    assert planned == json.loads(json.dumps(again.as_dict()))
    chaos, calm = result["runs"]["chaos"], result["runs"]["fault_free"]
    assert result["safe"] and chaos["finished"] and calm["finished"]
    assert chaos["faults"]["kill-coordinator"] == chaos["faults"]["full-disk"] == 1
    assert chaos["stopped_by_itself"] >= 1 and len(chaos["recoveries"]) >= 2
    assert chaos["versions"] == chaos["recomputed"] >= 6 and chaos["receipts"] >= 6
    assert sum(chaos["forged"].values()) == again.forgeries and not chaos["forgeries_accepted"]
    assert calm["faults"] == {} and calm["honest_steps"] <= calm["honest_trained"]
    rows = {row["figure"]: row for row in result["rows"]}
    assert rows["acknowledged updates lost"]["met"] == "yes"
    assert rows["final CE above fault-free, nats"]["met"] == "too short"
    (entry, *_) = open_folder(tmp_path / "out" / "runs" / "chaos" / "coordinator").record().entries
    assert json.loads(entry.body)["policy"]["keep_versions"] == 0, "all bases are needed afterwards"


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    words = [*options(tmp_path), "--minutes", "5", "--undefended", "--out", "out"]
    process = start(*words, cwd=tmp_path)
    caches = tmp_path / "out" / "runs" / "control" / "caches"
    until(lambda: len(list(caches.glob("*/identities/*.pem"))) == 5 or process.poll() is not None)
    assert any(map(in_use, caches.glob("*/identities/*.lock")))
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert "all processes of the run have ended" in (tmp_path / "chaos.err").read_text()
    assert not any(map(in_use, caches.glob("*/identities/*.lock")))
    assert not in_use(tmp_path / "out" / "runs" / "control" / "coordinator" / "lock")


def in_use(path: Path) -> bool:
    """Whether a process holds the lock."""
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_the_same_seed_plays_the_same_faults() -> None:
    first, again, other = (draw_schedule(seed, 2.0, 10) for seed in (1, 1, 2))
    assert first == again != other
    assert first.counts == {
        "kill-worker": 60,
        "pause-worker": 8,
        "kill-coordinator": 7,
        "full-disk": 1,
        "partition": 2,
        "reset": 4,
    }
    assert set(DEEDS) == set(FAULTS)
    assert all(0 <= fault.at < 120 and 0 <= fault.member < 10 for fault in first.faults)
    longer = draw_schedule(1, 20.0, 10)
    assert (longer.counts["kill-worker"], longer.forgeries) == (600, 10_000)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[WatchedCoordinator]:
    with beginning(tmp_path / "run", replicas=100, chunk_bytes=4096) as found:
        yield found


def test_no_forgery_counts(coordinator: WatchedCoordinator) -> None:
    client = LocalClient(coordinator)
    honest, other, forger = (FakeWorker(client, seed) for seed in (1, 2, 3))
    honest.send(honest.joined())
    other.joined()
    own, draw = forger.joined(), Random(5)
    entries = whole_ledger(client)
    material = ForgeryMaterial(
        run=forger.run,
        member=forger.identity,
        stranger=identity_from_seed(bytes(32)),
        recorded=[read_body(UpdateBody, e).submission for e in entries if e.kind == "update"],
        leased=[
            body
            for body in (read_body(LeaseFacts, e) for e in entries if e.kind == "lease")
            if body.worker != forger.id
        ],
        own=(own.order, own.fence),
        draw=draw,
    )
    updates = [e for e in entries if e.kind == "update"]
    refused: Counter[str] = Counter()
    for name, forge in FORGERIES.items():
        for _ in range(10):
            forged, before = forge(material), snapshot(coordinator)
            if forged.payload:
                client.put_chunk(own.task, 0, own.ticket, forged.payload, sha256(forged.payload))
            try:
                reply = coordinator.submit(m.read(m.Submission, forged.body))
                assert name == "replay" and reply.receipt.entry == updates[0].hash
            except BlockTrainError:
                refused[name] += 1
                assert snapshot(coordinator).blobs == before.blobs
    assert refused == dict.fromkeys(set(FORGERIES) - {"replay"}, 10)
    assert [e for e in whole_ledger(client) if e.kind == "update"] == updates


@pytest.mark.parametrize("attack", ["sign-flip", "turncoat"])
def test_harm_is_told_from_honest_work(attack: str, tmp_path: Path, corpus_folder: Path) -> None:
    """A turncoat is honest at first."""
    with worker_runs(tmp_path, corpus_folder) as make:
        run = make(Policy(task_steps=5, replicas=1, undefended=True), blocks=1, compose="pool")
        client, cache = LocalClient(run.coordinator), tmp_path / "cache"
        silent = lambda *_, **__: None  # noqa: E731
        AttackingWorker(client, cache, run.identity, silent, attack=attack).run()
        folder = run.folder / "coordinator"
        record = read_record(folder)
        text = Source(str(corpus_folder), None, tmp_path).open(tokenizer_of(run.config))
        meter = LossMeter(folder, run.config, text.valid)
        found = [is_harmful(meter, update, record) for update in record.updates.values()]
    assert found == [attack == "sign-flip"] * 2


def test_lost_and_doubled_updates_are_seen(coordinator: WatchedCoordinator, tmp_path: Path) -> None:
    worker = FakeWorker(LocalClient(coordinator))
    receipt = worker.send(worker.joined()).receipt
    record = read_record(tmp_path / "run")
    assert record.lost({receipt.update: receipt.entry}) == [] == record.doubled()
    assert record.lost({receipt.update: "0" * 64}) == [receipt.update]
    for twice in ("entries", "tasks", "merged"):
        changed = read_record(tmp_path / "run")
        getattr(changed, twice)[receipt.update] += 2
        assert len(changed.doubled()) == 1
    good = {"lost": [], "doubled": [], "findings": [], "forgeries_accepted": {}, "finished": True}
    good |= {"versions": 3, "recomputed": 3}
    assert is_safe(good) and not problems({"runs": {"chaos": good}})
    for wrong in ("lost", "doubled", "findings", "forgeries_accepted"):
        bad = good | {wrong: ["x"]}
        assert not is_safe(bad) and wrong.split("_")[0] in problems({"runs": {"chaos": bad}})[0]
    assert not is_safe(good | {"recomputed": 2})
    stuck = {"runs": {"chaos": good | {"finished": False}}}
    assert problems(stuck) == ["chaos: the run did not finish"]
    assert LedgerRecord().doubled() == []
