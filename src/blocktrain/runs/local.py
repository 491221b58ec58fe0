"""`blocktrain train`: a coordinator in this process and workers in others, over loopback.

The protocol is the same as between machines. One worker per block, no compression and nothing that
depends on time: the weights are those of a plain training loop, bit for bit.
"""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from blocktrain.coordinator.policy import Policy
from blocktrain.errors import FolderInUse, RunError
from blocktrain.files import make_private
from blocktrain.learning.train import REFERENCE
from blocktrain.processes import Job, run_jobs
from blocktrain.protocol.tensors import unpack
from blocktrain.runs.folder import block_name, file_sha256, load_block, read_manifest
from blocktrain.runs.local_worker import LocalWorker, work
from blocktrain.runs.prepare import prepare
from blocktrain.runs.pull import compose_run
from blocktrain.runs.reference import TrainingPlan, train_reference
from blocktrain.watch.feed import EventLog, Listener
from blocktrain.watch.scoring import ScoringThread
from blocktrain.watch.server import Listen, WatchedCoordinator, open_coordinator, serve_coordinator

TASK_STEPS = 50  # of a task: what is trained again after a crash
SCORE_SHARE = 0.03  # of the time of a run, at most, for scores of the valid part


def train_blocks(
    plan: TrainingPlan,
    on_event: Callable[[dict[str, Any]], None],
    warn: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Train what is not yet trained, and publish all blocks. May be stopped and continued anywhere.

    `on_event` gets what is written to events.jsonl, `stopped` is Ctrl-C for those who train in a
    thread.
    """
    corpus = plan.corpus()
    corpus.require(plan.config.context)
    nats = (
        math.log(2) * corpus.train_bytes / corpus.index.train_tokens
    )  # per token, of a bit a byte
    scores = Listener(kinds=("score",))

    def pass_scores() -> None:
        for event in scores.take():
            fields = {k: v for k, v in event.value.items() if k not in ("seq", "time", "kind")}
            on_event(log.write("score", **fields))

    def on_message(name: str, message: dict[str, Any]) -> None:
        pass_scores()
        block, kind = message.pop("block", REFERENCE), message.pop("kind")
        if kind == "step":
            message["bits_per_byte"] = round(message["loss"] / nats, 5)
        on_event(log.write(kind, block=block, **message))
        if kind == "state_lost" and block == REFERENCE:
            warn("the checkpoint of the reference is damaged: it is trained again from the start")
        elif kind == "state_lost":
            warn(
                f"the saved optimizer of block {block} is lost or damaged: it starts again, so "
                "the weights will differ from those of an undisturbed run"
            )

    with _coordinator(plan) as coordinator:  # it locks the folder, so the log is ours, too
        log = EventLog(plan.run.events)
        try:
            start = log.write(
                "start",
                fingerprint=plan.config.fingerprint,
                blocks=plan.config.blocks,
                steps=plan.config.steps,
            )
            on_event(start)
            with _scoring(plan, coordinator, scores, warn):
                _run_jobs(plan, coordinator, on_message, warn, stopped)
            pass_scores()
            if not coordinator.finished:
                raise RunError(
                    "the workers ended before the run was finished; continue with --resume"
                )
            _publish_all(plan, coordinator)
        finally:
            log.close()


@contextmanager
def _scoring(
    plan: TrainingPlan,
    coordinator: WatchedCoordinator,
    listener: Listener,
    warn: Callable[[str], None],
) -> Iterator[None]:
    """Score the valid part now and then, while the blocks are trained."""
    if not plan.score_bytes or coordinator.finished:
        yield
        return
    coordinator.feed.listen(listener)
    scoring = ScoringThread(
        coordinator,
        plan.score_bytes,
        warn,
        plan.score_seconds,
        share=SCORE_SHARE,
        whole_run=False,
    )
    scoring.start()
    try:
        yield
    finally:
        scoring.close()


def _run_jobs(
    plan: TrainingPlan,
    coordinator: WatchedCoordinator,
    on_message: Callable[[str, dict[str, Any]], None],
    warn: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    """One process per block, and one for the reference."""
    jobs = []
    if plan.reference and not _has_reference(plan, warn):
        jobs.append(Job(block_name(REFERENCE), train_reference, (plan,)))
    if coordinator.finished:
        run_jobs(jobs, plan.slots, on_message, stopped=stopped)
        return
    token, config = secrets.token_urlsafe(24), plan.config
    with serve_coordinator(coordinator, Listen(token=token)) as url:
        cache = plan.run.folder / "state"
        text = plan.corpus().folder
        options = LocalWorker(url, token, cache, plan.threads, config, text)
        frozen = coordinator.run.options.frozen
        for number in range(1, config.blocks + 1 - len(frozen)):
            jobs.append(Job(f"worker-{number}", work, (options,)))
        run_jobs(jobs, plan.slots, on_message, stopped=stopped)


def _has_reference(plan: TrainingPlan, warn: Callable[[str], None]) -> bool:
    """Whether the end-to-end model is trained and intact; else it is trained again."""
    path, known = plan.run.weights(REFERENCE), None
    if not path.exists():
        return False
    with suppress(RunError):  # there is no manifest before the end
        known = read_manifest(plan.run.folder).reference
    with suppress(RunError):
        load_block(plan.run, plan.config, REFERENCE, torch.device("cpu"))
        if known in (None, file_sha256(path)):
            return True
    warn(f"{path} is damaged or foreign: the reference is trained again")
    return False


@contextmanager
def _coordinator(plan: TrainingPlan) -> Iterator[WatchedCoordinator]:
    """The run's coordinator. The first start makes its run from the settings and the corpus."""
    try:
        coordinator = open_coordinator(plan.run.folder / "coordinator", corpus=plan.corpus().folder)
    except FolderInUse as error:
        raise RunError(
            f"`blocktrain train` is already running in {plan.run.folder} (process "
            f"{error.process}): wait for it, or stop it with Ctrl-C and run this again"
        ) from None
    state = plan.run.folder / "state"
    try:
        if not coordinator.ready:
            prepare(plan.config, plan.source, state / "prepared", plan.origin)
            coordinator.begin(
                plan.config, Policy.exact(TASK_STEPS), plan.source.spec, state / "prepared"
            )
        shutil.rmtree(state / "prepared", ignore_errors=True)
        corpus = coordinator.manifest().corpus
        if plan.corpus().index.hash != corpus.index.sha256:
            raise RunError(
                f"{plan.source.spec} is not the text that this run began with: restore that text, "
                "or start a new run"
            )
        yield coordinator
    finally:
        coordinator.close()


def _publish_all(plan: TrainingPlan, coordinator: WatchedCoordinator) -> None:
    """The newest versions as the run's model. Here they are those that a fusion block has read."""
    compose_run(
        plan.run,
        plan.config,
        coordinator.manifest().blocks,
        lambda pin: unpack(b"".join(coordinator.blob(pin.weights.sha256))),
    )
    shutil.rmtree(plan.run.folder / "state", ignore_errors=True)
    make_private(plan.run.folder / "state")
