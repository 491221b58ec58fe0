"""What `blocktrain train` does beside its blocks: the end-to-end reference, then composing and judging the result."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocktrain.config import Config
from blocktrain.errors import Interrupted, RunError
from blocktrain.learning.compose import Model
from blocktrain.learning.data import Corpus, Source
from blocktrain.learning.evaluate import Progress, evaluate, evaluate_alone
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.noise import noise_levels
from blocktrain.learning.pool import fit_pool_weights
from blocktrain.learning.threads import THREADS, limited_threads, use_threads
from blocktrain.learning.tokenizer import Ids, tokenizer_of
from blocktrain.learning.train import REFERENCE, Trainer, pick_device
from blocktrain.processes import Channel
from blocktrain.protocol.events import read_events
from blocktrain.runs.folder import (
    RunFolder,
    block_name,
    load_block,
    load_independent,
    load_model,
    load_reference,
    publish,
    read_manifest,
    seal,
    write_json,
    write_model_card,
)

CHECKPOINT_SECONDS = 20.0
REPORT_SECONDS = 0.2
SAMPLE_BYTES = 400


@dataclass(frozen=True)
class Plan:
    """One run to be trained here: its folder, settings, corpus, and whether the reference is wanted too."""

    run: RunFolder
    config: Config
    source: Source
    reference: bool = False
    slots: int = 1
    threads: int = THREADS  # of each process, and of the evaluation at the end

    def corpus(self) -> Corpus:
        """The tokens that the model reads."""
        return self.source.open().encode(tokenizer_of(self.config))


def train_reference(channel: Channel, plan: Plan) -> None:
    """The work of one process: the end-to-end model from its saved state (or its start) to its published weights."""
    use_threads(plan.threads)
    trainer = Trainer(plan.config, REFERENCE)
    state = plan.run.state(REFERENCE)
    if state.exists():
        try:
            trainer.load(state)
        except RunError:
            channel.send(kind="state_lost")
    said = saved = time.monotonic()
    losses: list[float] = []
    for step, loss in trainer.run(plan.corpus().train, plan.config.steps):
        losses.append(loss)
        now = time.monotonic()
        if now - said > REPORT_SECONDS or step == plan.config.steps:
            channel.send(kind="step", step=step, loss=sum(losses) / len(losses))
            said, losses = now, []
        if channel.stopped:
            trainer.save(state)
            raise Interrupted("told to stop; what it had is saved: continue with --resume")
        if now - saved > CHECKPOINT_SECONDS:
            trainer.save(state)
            saved = now
    channel.send(
        kind="trained", step=trainer.step, seconds=round(trainer.seconds, 3), peak_mb=peak_mb()
    )
    publish(plan.run, REFERENCE, trainer.block)
    state.unlink(missing_ok=True)


def peak_mb() -> float:
    """Most resident memory this process ever had, in MB, interpreter and libraries included."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start from what the parent had
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return round(int(line.split()[1]) * 1024 / 1e6, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def complete(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Fit the pool, seal the model, evaluate everything, write result.json, and return it."""
    corpus = plan.corpus()
    device = pick_device(plan.config.device)
    with limited_threads(plan.threads):
        fit_and_seal(plan.run, plan.config, plan.source.spec, corpus.calibration, device)
    model = load_model(plan.run.folder, device)
    result = _judge(plan, corpus, model, progress)
    write_model_card(plan.run, plan.config, result)
    write_json(plan.run.folder / "result.json", result)
    return result


def fit_and_seal(
    run: RunFolder, config: Config, data: str, calibration: Ids, device: torch.device | None = None
) -> None:
    """Fit the pool where blocks predict without noise, and declare the model of a run folder complete."""
    weights = None
    if config.predicts_without_noise:
        blocks = [
            load_independent(run, config, n, device or torch.device("cpu"))
            for n in range(1, config.independent + 1)
        ]
        weights = fit_pool_weights(Model(config, blocks), calibration)
    seal(run, config, data, weights)


def evaluate_run(
    folder: Path,
    model: Model,
    corpus: Corpus,
    *,
    draws: int,
    progress: Progress,
    threads: int = THREADS,
) -> dict[str, float]:
    """Nats per byte of a run's model on the valid part, and of the reference if it has one.

    Losses are per token; a figure per byte compares models of different tokenizers.
    """
    split, config = corpus.valid, model.config
    reference = load_reference(read_manifest(folder), model.device)
    with limited_threads(threads):
        ce = evaluate(model, split, seed=config.seed, draws=draws, progress=progress)
        if reference is not None:
            ce["reference"] = evaluate_alone(reference, split, config.context)
    return {name: value / corpus.bytes_per_token for name, value in ce.items()}


def _judge(plan: Plan, corpus: Corpus, model: Model, progress: Progress) -> dict[str, Any]:
    config = plan.config
    ce = evaluate_run(
        plan.run.folder, model, corpus, draws=1, progress=progress, threads=plan.threads
    )
    work = _work_done(plan.run)
    tokenizer = tokenizer_of(config)
    prompt = corpus.valid[: config.context // 2].tolist()
    sampler = Sampler(config.seed, temperature=0.8)
    with limited_threads():
        written = list(write(model, prompt, SAMPLE_BYTES, sampler))
    return {
        "valid_ce": {name: round(value, 5) for name, value in ce.items()},
        "gap": round(ce["composed"] - ce["reference"], 5) if "reference" in ce else None,
        "corpus": {
            "name": corpus.name,
            "train_bytes": len(corpus.text.train),
            "valid_bytes": len(corpus.text.valid),
        },
        "parameters": {
            block_name(n): _parameters(plan, n)
            for n in range(config.blocks + 1)
            if plan.run.weights(n).exists()
        },
        "pool_weights": None
        if model.pool_weights is None
        else [round(float(w), 4) for w in model.pool_weights],
        "ranges": [list(r) for r in noise_levels(config).ranges(config.blocks, config.gamma)]
        if config.objective == "denoise"
        else None,
        "seconds": {
            block_name(n): round(sum(seconds for seconds, _ in done), 1)
            for n, done in sorted(work.items())
        },
        "peak_mb": {
            block_name(n): max(peak for _, peak in done) for n, done in sorted(work.items())
        },
        "sample": {
            "prompt": tokenizer.decode(prompt).decode("utf-8", "replace"),
            "text": tokenizer.decode(written).decode("utf-8", "replace"),
            "temperature": 0.8,
        },
    }


def _work_done(run: RunFolder) -> dict[int, list[tuple[float, float]]]:
    """By block, the seconds and the peak memory of all that was trained of it, however often the run was stopped."""
    found: dict[int, list[tuple[float, float]]] = {}
    for event in read_events(run.events):
        match event:
            case {
                "kind": "trained",
                "block": int(block),
                "seconds": int() | float() as seconds,
                "peak_mb": int() | float() as peak,
            }:
                before = (
                    [] if block == REFERENCE else found.get(block, [])
                )  # the reference tells of all its steps at once
                found[block] = [*before, (seconds, peak)]
    return found


def _parameters(plan: Plan, index: int) -> int:
    return sum(
        p.numel()
        for p in load_block(plan.run, plan.config, index, torch.device("cpu")).parameters()
    )
