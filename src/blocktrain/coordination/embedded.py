"""`blocktrain train`: a coordinator in this process, workers in processes of their own, the same protocol as between machines.

One worker a block at a time, no compression, nothing that depends on time: the weights are those of the plain loop, bit for bit.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from blocktrain.coordination.coordinator import Coordinator, open_coordinator
from blocktrain.coordination.embedded_worker import Seat, work
from blocktrain.coordination.policy import Policy
from blocktrain.coordination.prepare import prepare
from blocktrain.coordination.server import Listen, Server
from blocktrain.coordination.worker_desk import corpus_folder, read_blocks
from blocktrain.errors import BlockTrainError, RunError
from blocktrain.events import EventLog
from blocktrain.learning.local import Plan, Told, train_one
from blocktrain.learning.runs import block_name, publish
from blocktrain.learning.train import REFERENCE
from blocktrain.processes import Job, run_jobs
from blocktrain.protocol.codec import Tensors, unpack
from blocktrain.protocol.messages import Blob

TASK_STEPS = 50  # of a task: what is trained again after a crash


def train_blocks(plan: Plan, told: Told) -> None:
    """Train what is not yet published; stops and continues anywhere."""
    plan.source.open().require(plan.config.context)
    log = EventLog(plan.run.events)

    def on_message(name: str, message: dict[str, Any]) -> None:
        block = message.pop("block", REFERENCE)
        log.write(message.pop("kind"), block=block, **message)
        if "loss" in message:
            told(block, message["step"], message["loss"])

    log.write("start", fingerprint=plan.config.fingerprint, blocks=plan.config.blocks, steps=plan.config.steps)
    jobs = []
    if plan.reference and not plan.run.weights(REFERENCE).exists():  # first, as it takes longest
        jobs.append(Job(block_name(REFERENCE), train_one, (plan, REFERENCE)))
    try:
        if all(plan.run.weights(index).exists() for index in range(1, plan.config.blocks + 1)):
            run_jobs(jobs, plan.slots, on_message)
            return
        with _coordinator(plan) as coordinator:
            token = secrets.token_urlsafe(24)
            with _serving(coordinator, token) as url:
                seat = Seat(url, token, plan.run.folder / "state", plan.config.device, plan.threads, plan.config.steps)
                count = max(1, min(plan.slots, plan.config.blocks))
                run_jobs([*jobs, *(Job(f"worker-{n}", work, (seat,)) for n in range(1, count + 1))], plan.slots, on_message)
            if not coordinator.finished:
                raise RunError("the workers ended before the run was finished; continue with --resume")
            _publish_all(plan, coordinator)
    finally:
        log.close()


@contextmanager
def _coordinator(plan: Plan) -> Iterator[Coordinator]:
    """The run's coordinator; at the first start its run is made from the settings and the corpus."""
    coordinator = open_coordinator(plan.run.folder / "coordinator")
    state = plan.run.folder / "state"
    try:
        if not coordinator.ready:
            prepare(plan.config, plan.source, state / "prepared")
            coordinator.begin(plan.config, Policy.exact(TASK_STEPS), plan.source.spec, state / "prepared")
        shutil.rmtree(state / "prepared", ignore_errors=True)
        corpus = coordinator.manifest().corpus
        folder = corpus_folder(state, corpus)
        folder.mkdir(parents=True, exist_ok=True)
        for blob, name in ((corpus.train, "train.txt"), (corpus.valid, "valid.txt")):
            with suppress(OSError):  # a link instead of a copy, where the disk has links
                os.link(coordinator.blob_path(blob.sha256)[0], folder / name)
        yield coordinator
    finally:
        coordinator.close()


@contextmanager
def _serving(coordinator: Coordinator, token: str) -> Iterator[str]:
    """The coordinator on a free port of this machine; if it fails, that is the error to tell, not those of its workers."""
    server = Server(coordinator, Listen(token=token))

    def serve() -> None:
        with suppress(BlockTrainError):  # kept in `failure`
            server.run()

    thread = threading.Thread(target=serve, name="coordinator", daemon=True)
    thread.start()
    try:
        yield server.url
    except RunError:
        if server.failure is not None:
            raise server.failure from None
        raise
    finally:
        server.stop()
        thread.join(timeout=10)


def _publish_all(plan: Plan, coordinator: Coordinator) -> None:
    """The newest versions as the run's model; the fusion block reads those it was trained on, which are the last ones here."""

    def tensors(blob: Blob) -> Tensors:
        return unpack(b"".join(coordinator.blob(blob.sha256)))

    config = plan.config.replace(device="cpu")
    blocks = read_blocks(config, coordinator.manifest().blocks, tensors)
    if config.compose == "fuse":
        blocks[-1].readout.copy_from(blocks[:-1])
    for index, block in enumerate(blocks, start=1):
        publish(plan.run, index, block)
    shutil.rmtree(plan.run.folder / "state", ignore_errors=True)
    (plan.run.folder / "state").mkdir(exist_ok=True)
