"""A prepared tiny run, and a worker that makes every call and trains nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.clock import SimulatedClock
from blocktrain.config import Config, make_config
from blocktrain.coordinator.policy import Policy
from blocktrain.protocol import compression, tensors
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.identity import Identity, identity_from_seed, new_nonce
from blocktrain.protocol.ledger import LedgerEntry, require_chain
from blocktrain.protocol.transfer import Plan, sha256, split
from blocktrain.watch.server import WatchedCoordinator, open_coordinator
from blocktrain.web.client import upload
from conftest import write_text

CONFIG = make_config(
    {
        "blocks": 2,
        "layers_per_block": 1,
        "width": 16,
        "heads": 2,
        "context": 16,
        "z_width": 8,
        "batch": 2,
        "steps": 40,
        "warmup": 2,
        "compose": "pool",  # two blocks that do not wait for each other
    }
)
STEPS = 2  # of every task
TOKEN, OPERATOR = "join-me", "obey-me"
_KEPT = tempfile.TemporaryDirectory(prefix="blocktrain-world-")


@cache
def prepared() -> Path:
    """Version 0 of both blocks and a small corpus, made once for all tests of a process."""
    from blocktrain.learning.corpus.source import Source
    from blocktrain.runs.prepare import prepare

    text, folder = Path(_KEPT.name) / "text", Path(_KEPT.name) / "prepared"
    text.mkdir()
    (text / "train.txt").write_text(write_text(1200, seed=1))
    (text / "valid.txt").write_text(write_text(60, seed=2))
    prepare(CONFIG, Source(str(text), None, text), folder)
    return folder


def begin(
    folder: Path, clock: SimulatedClock | None = None, *, config: Config = CONFIG, **policy: Any
) -> WatchedCoordinator:
    """A new run: tasks of two steps and rounds of one update, unless the policy differs."""
    coordinator = open_coordinator(folder, clock) if clock else open_coordinator(folder)
    usual = {"task_steps": STEPS, "replicas": 1, "compression": "int4", "chunk_bytes": 1024}
    # Its changes are random: judged, they would be left out.
    chosen = Policy(**{**usual, "undefended": True, **policy})
    coordinator.begin(config, chosen, "words", prepared())
    return coordinator


@contextmanager
def beginning(folder: Path, **policy: Any) -> Iterator[WatchedCoordinator]:
    """`begin`, and close it at the end."""
    coordinator = begin(folder, **policy)
    try:
        yield coordinator
    finally:
        coordinator.close()


def crash(coordinator: WatchedCoordinator) -> None:
    """Like a kill: nothing is flushed, and the lock on the folder is gone."""
    coordinator.run.store.close()


@dataclass
class FakeWorker:
    """Makes every call of the protocol, with small random changes instead of training."""

    client: Calls
    seed: int = 1
    run: str = ""
    coordinator: str = ""
    fingerprint: str = ""
    receipts: list[m.Receipt] = field(default_factory=list)
    identity: Identity = field(init=False)

    def __post_init__(self) -> None:
        self.identity = identity_from_seed(self.seed.to_bytes(32, "big"))

    @property
    def id(self) -> str:
        return self.identity.worker

    def join_message(self, **changes: Any) -> m.Join:
        fields = {
            "protocol": m.PROTOCOL,
            "public_key": self.identity.public_key,
            "name": f"fake {self.seed}",
            "device": "cpu",
        }
        return self.identity.sign(
            m.Join(
                **{
                    **fields,
                    "memory": 1 << 30,
                    "speed": 10.0,
                    "nonce": new_nonce(),
                    "time": 0,
                    **changes,
                }
            )
        )

    def join(self, **changes: Any) -> m.JoinReply:
        reply = self.client.join(self.join_message(**changes))
        self.run, self.coordinator, self.fingerprint = (
            reply.run,
            reply.coordinator,
            reply.fingerprint,
        )
        return reply

    def joined(self) -> m.Task:
        """Join and take the first task."""
        return as_task(self.join().next)

    def request(self, **changes: Any) -> m.TaskRequest:
        fields = {
            "run": self.run,
            "worker": self.id,
            "fingerprint": self.fingerprint,
            "speed": 10.0,
            "nonce": new_nonce(),
        }
        return self.identity.sign(m.TaskRequest(**{**fields, **changes}))

    def ask(self, **changes: Any) -> m.Task | m.Wait:
        return self.client.next_task(self.request(**changes)).next

    def beat(self, task: m.Task, step: int = 1, /, **changes: Any) -> m.HeartbeatReply:
        fields = {
            "run": self.run,
            "worker": self.id,
            "task": task.task,
            "fence": task.fence,
            "step": step,
            "loss": 2.0,
            "bytes": 0,
        }
        return self.client.heartbeat(
            self.identity.sign(m.Heartbeat(**{**fields, "nonce": new_nonce(), **changes}))
        )

    def weights(self, task: m.Task) -> tensors.Tensors:
        return tensors.unpack(b"".join(self.client.blob(task.weights.sha256, worker=self.id)))

    def payload(self, task: m.Task, seed: int = 0) -> bytes:
        """Small changes, always the same for the same worker, task, fence and seed."""
        draw = np.random.default_rng([self.seed, task.task, task.fence, seed])
        delta = {
            name: (1e-3 * draw.standard_normal(t.shape)).astype(np.float32)
            for name, t in self.weights(task).items()
        }
        return compression.compress(delta, None, task.compression)[0]

    def submission(self, task: m.Task, payload: bytes, /, **changes: Any) -> m.Submission:
        """Honest and signed, but for the changes (which are signed too)."""
        fields = {
            "run": self.run,
            "worker": self.id,
            "task": task.task,
            "fence": task.fence,
            "block": task.block,
            "base": task.base,
            "payload_sha256": sha256(payload),
            "payload_length": len(payload),
            "chunks": Plan(len(payload), task.chunk_bytes).chunks,
            "steps": task.steps,
            "tokens": task.steps * CONFIG.batch * CONFIG.context,
            "loss_before": 3.0,
            "loss_after": 2.5,
            "continued": m.Lineage(),
            "lineage": "6a" * 32,
            "nonce": new_nonce(),
            "time": 0,
        }
        return self.identity.sign(m.Submission(**{**fields, **changes}))

    def upload(self, task: m.Task, payload: bytes) -> None:
        upload(self.client, task.task, task.ticket, split(payload, task.chunk_bytes))

    def send(self, task: m.Task, payload: bytes | None = None, /, **changes: Any) -> m.SubmitReply:
        """Upload and submit."""
        content = self.payload(task) if payload is None else payload
        self.upload(task, content)
        reply = self.client.submit(self.submission(task, content, **changes))
        self.receipts.append(reply.receipt)
        return reply


def as_task(found: m.Task | m.Wait) -> m.Task:
    assert isinstance(found, m.Task), found
    return found


def whole_ledger(client: Calls) -> list[LedgerEntry]:
    """All pages; the chain is checked."""
    found: list[LedgerEntry] = []
    while page := client.ledger(found[-1].seq if found else 0).entries:
        require_chain(page, found[-1] if found else None)
        found.extend(page)
    return found


@dataclass(frozen=True)
class Snapshot:
    """What a refusal must not change: the head of the ledger, blobs, versions and leases."""

    head: str
    blobs: frozenset[str]
    versions: tuple[tuple[int, int, str], ...]
    leases: frozenset[tuple[int, int, str, bool]]
    pending: tuple[str, ...]


def snapshot(coordinator: WatchedCoordinator) -> Snapshot:
    """Read from the store, not from memory, where both have it."""
    live = coordinator.run
    with live.lock:
        head = live.store.head()
        assert head is not None
        versions = [live.store.version(index) for index in sorted(live.state.blocks)]
        return Snapshot(
            head.hash,
            frozenset(live.store.blobs.names()),
            tuple((v.block, v.version, v.weights) for v in versions if v),
            frozenset((x.task, x.fence, x.worker, x.expired) for x in live.state.leases.values()),
            tuple(u.id for index in sorted(live.state.blocks) for u in live.store.pending(index)),
        )
