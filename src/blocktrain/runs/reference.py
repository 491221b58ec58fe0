"""One run to be trained on this machine, and the process that trains its end-to-end reference."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blocktrain.config import Config, Origin
from blocktrain.errors import Interrupted, RunError
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.threads import THREADS, use_threads
from blocktrain.learning.tokenizer import tokenizer_of
from blocktrain.learning.train import REFERENCE, Trainer, block_weights
from blocktrain.processes import Channel, peak_mb
from blocktrain.runs.folder import RunFolder, load_reference, publish, read_manifest
from blocktrain.worker.speed import SpeedMeter

CHECKPOINT_SECONDS = 20.0
REPORT_SECONDS = 0.2
SCORE_SECONDS = 30.0


@dataclass(frozen=True)
class TrainingPlan:
    """What to train, with which text, and on how many processes and threads."""

    run: RunFolder
    config: Config
    source: Source
    reference: bool = False  # whether to train the end-to-end model, too
    slots: int = 1  # processes at a time
    threads: int = THREADS  # of each process, and of the evaluation at the end
    eval_bytes: int | None = None  # evaluate on the beginning of the valid part only
    origin: Origin | None = None  # the run that this one goes on from
    score_bytes: int = 0  # of the valid part, scored while training; 0: none
    score_seconds: float = SCORE_SECONDS  # between two scores, at least

    def corpus(self) -> TokenCorpus:
        """The tokens that the model reads."""
        return self.source.open(tokenizer_of(self.config))

    def eval_corpus(self) -> TokenCorpus:
        """The same, with the valid part that the result is measured on."""
        return self.corpus().limit_valid(self.eval_bytes, tokenizer_of(self.config))


def _go_on(trainer: Trainer, origin: Origin | None) -> None:
    """Begin with the reference of the parent, if it has one of this shape."""
    if origin is None:
        return
    with suppress(RunError):  # a coordinator's folder has none
        reference = load_reference(read_manifest(Path(origin.folder)), trainer.device)
        if reference is not None and len(reference.layers) == len(trainer.block.layers):
            trainer.load_weights(block_weights(reference))


def train_reference(channel: Channel, plan: TrainingPlan) -> None:
    """Train the end-to-end model from its saved state, if there is one, and publish its weights."""
    use_threads(plan.threads)
    trainer = Trainer(plan.config, REFERENCE)
    state = plan.run.state(REFERENCE)
    if state.exists():
        try:
            trainer.load(state)
        except RunError:
            channel.send(kind="state_lost")
    else:
        _go_on(trainer, plan.origin)
    last_report = last_save = time.monotonic()
    losses: list[float] = []
    meter = SpeedMeter(trainer)
    batches = plan.corpus().batches(plan.config, trainer.index)
    for step, loss in trainer.run(batches, plan.config.steps):
        losses.append(loss)
        now, speed = time.monotonic(), meter.after_step()
        if now - last_report > REPORT_SECONDS or step == plan.config.steps:
            channel.send(kind="step", step=step, loss=sum(losses) / len(losses), **speed)
            last_report, losses = now, []
        if channel.should_stop:
            trainer.save(state)
            raise Interrupted("stopped; its state is saved: continue with --resume")
        if now - last_save > CHECKPOINT_SECONDS:
            trainer.save(state)
            last_save = now
    channel.send(
        kind="trained",
        step=trainer.step,
        seconds=round(trainer.seconds, 3),
        peak_mb=peak_mb(),
        **meter.fields(trainer.step / max(trainer.seconds, 1e-9)),
    )
    publish(plan.run, REFERENCE, trainer.block)
    state.unlink(missing_ok=True)
