"""A small run with updates that are really trained, step by step in the order a test wants."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.policy import Policy
from blocktrain.learning.compose import independent
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.train import Trainer
from blocktrain.protocol import compression, ledger, tensors
from blocktrain.protocol.identity import Identity, identity_from_seed
from blocktrain.protocol.messages import (
    PROTOCOL,
    Blob,
    Join,
    Lineage,
    Submission,
    Task,
    TaskRequest,
    Wait,
)
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.transfer import sha256, split
from blocktrain.watch.server import WatchedCoordinator, open_coordinator
from blocktrain.web.client import LocalClient, upload
from blocktrain.worker.task import read_blocks
from conftest import tiny_config

CONFIG = tiny_config(blocks=2, steps=6, batch=2, width=8, heads=1)
IDENTITIES = {name: identity_from_seed(name.encode() * 32) for name in "abc"}
State = tuple[
    int, str, dict[str, torch.Tensor], tensors.Tensors
]  # task, lineage, moments, residual


@dataclass
class ManualWorker:
    """The least that a worker does, in the order that a test wants."""

    client: LocalClient
    me: Identity
    corpus: TokenCorpus
    run: str = ""
    next: Task | Wait | None = None
    state: dict[int, State] = field(default_factory=dict)  # by block
    after: State | None = None

    def join(self) -> None:
        # Its speed is unknown, so the coordinator never asks it to wait for others.
        asked = Join(
            protocol=PROTOCOL,
            public_key=self.me.public_key,
            device="cpu",
            memory=0,
            speed=0.0,
            nonce="0" * 32,
            time=0,
        )
        reply = self.client.join(self.me.sign(asked))
        self.run, self.next = reply.run, reply.next

    def tensors(self, blob: Blob) -> tensors.Tensors:
        return tensors.unpack(b"".join(self.client.blob(blob.sha256)))

    def train(self) -> tuple[Task, bytes, Submission]:
        task = self.next
        assert isinstance(task, Task), task
        sources = read_blocks(CONFIG, task.features, self.tensors)
        trainer = Trainer(CONFIG, task.block, independent(sources), task.start_step)
        trainer.shift = task.position - task.start_step
        base = self.tensors(task.weights)
        trainer.load_weights(base)
        before, parent, moments, residual = self.state.get(task.block, (None, None, {}, {}))
        trainer.restore(moments)
        batches = self.corpus.batches(CONFIG, task.block)
        losses = [loss for _, loss in trainer.run(batches, task.start_step + task.steps)]
        new = trainer.weights()
        payload, left = compression.compress_weights(new), dict[str, tensors.Array]()
        if task.compression != "none":
            payload, left = compression.compress(
                {name: new[name] - base[name] for name in new}, residual, task.compression
            )
        continued = Lineage(optimizer=before, residual=before)
        named = ledger.lineage(parent, task.order, continued)
        self.after = (
            task.task,
            named,
            {name: t.clone() for name, t in trainer.moments().items()},
            left,
        )
        said = Submission(
            run=self.run,
            worker=self.me.worker,
            task=task.task,
            fence=task.fence,
            block=task.block,
            base=task.base,
            payload_sha256=sha256(payload),
            payload_length=len(payload),
            chunks=len(split(payload, task.chunk_bytes)),
            steps=task.steps,
            tokens=task.steps * CONFIG.batch * CONFIG.context,
            loss_before=losses[0],
            loss_after=losses[-1],
            continued=continued,
            lineage=named,
            nonce=f"{task.task:032x}",
            time=0,
        )
        return task, payload, self.me.sign(said)

    def send(self, done: tuple[Task, bytes, Submission]) -> None:
        task, payload, said = done
        try:
            upload(self.client, task.task, task.ticket, split(payload, task.chunk_bytes))
            self.next = self.client.submit(said).next
            self.state |= {task.block: self.after} if self.after else {}
        except Refused:  # the block is done
            asked = TaskRequest(
                run=self.run,
                worker=self.me.worker,
                fingerprint=CONFIG.fingerprint,
                speed=0.0,
                nonce="0" * 32,
            )
            self.next = self.client.next_task(self.me.sign(asked)).next


def play(folder: Path, corpus: TokenCorpus, prepared: Path, **policy: Any) -> WatchedCoordinator:
    """Rounds of two, an update two versions late, the fusion block, and one pending update."""
    coordinator = open_coordinator(folder, SimulatedClock(100.0))
    # No update is checked: which ones are is random, and rounds wait for it.
    chosen = Policy(task_steps=1, replicas=2, rounds=3, retrain_share=0.0, **policy)
    coordinator.begin(CONFIG, chosen, "tiny", prepared)
    client = LocalClient(coordinator)
    a, b, c = (ManualWorker(client, me, corpus) for me in IDENTITIES.values())
    for hand in (a, b, c):
        hand.join()
    late = c.train()
    for _ in range(2):
        for hand in (a, b):
            hand.send(hand.train())
    c.send(late)
    for hand in (a, b, c, b, c, b):
        hand.send(hand.train())
    return coordinator
