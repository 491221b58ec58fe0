"""The end of `blocktrain train`: compose the model, evaluate it, and write result.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blocktrain.config import Config
from blocktrain.learning.compose import Model, composition_of
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import Progress, evaluate, evaluate_alone
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.noise import noise_levels
from blocktrain.learning.pool import CompositionChoice, choose_composition, fit_pool_weights
from blocktrain.learning.threads import THREADS, limited_threads
from blocktrain.learning.tokenizer import Ids, tokenizer_of
from blocktrain.learning.train import REFERENCE, pick_device
from blocktrain.protocol.ledger import ParentRun
from blocktrain.runs.folder import (
    RunFolder,
    block_name,
    load_block,
    load_model,
    load_reference,
    parent_of,
    read_manifest,
    seal,
    write_json,
    write_model_card,
)
from blocktrain.runs.reference import TrainingPlan
from blocktrain.watch.feed import read_events

SAMPLE_TOKENS = 400


def complete(plan: TrainingPlan, progress: Progress) -> dict[str, Any]:
    """Fit the pool, seal the model, evaluate everything, write result.json, and return it."""
    corpus = plan.eval_corpus()
    device = pick_device(plan.config.device)
    with limited_threads(plan.threads):
        fit_and_seal(plan.run, plan.config, plan.source.spec, corpus.calibration, device)
    model = load_model(plan.run.folder, device)
    result = _measure(plan, corpus, model, progress)
    write_model_card(plan.run, plan.config, result)
    write_json(plan.run.folder / "result.json", result)
    return result


def fit_and_seal(
    run: RunFolder, config: Config, data: str, calibration: Ids, device: torch.device | None = None
) -> None:
    """Fit the pool, if blocks predict without noise, choose the composition, and write both down.

    The manifest of the model is written last.
    """
    weights, choice = None, CompositionChoice(config.compose, {}, 0)
    if config.predicts_without_noise:
        numbers = range(1, config.blocks + 1)
        where = device or torch.device("cpu")
        blocks = {number: load_block(run, config, number, where) for number in numbers}
        model = composition_of(config).assemble(config, blocks)
        weights = fit_pool_weights(model, calibration)
        choice = choose_composition(model, calibration)
    seal(run, config, data, weights, choice)


class EvaluatedRun(NamedTuple):
    """Nats per byte by model. Losses are per token; a figure per byte compares tokenizers."""

    ce: dict[str, float]
    sources: dict[str, dict[str, float]]
    """The same for each source of a mixture; empty for a corpus of one text."""

    def bits_by_source(self) -> dict[str, dict[str, float]]:
        """Bits per byte by source and model."""
        return {
            name: {model: round(nats / math.log(2), 5) for model, nats in ce.items()}
            for name, ce in self.sources.items()
        }


def evaluate_run(
    folder: Path,
    model: Model,
    corpus: TokenCorpus,
    *,
    draws: int,
    progress: Progress,
    threads: int = THREADS,
) -> EvaluatedRun:
    """A run's model on the valid part, and the reference if the run has one."""
    reference = load_reference(read_manifest(folder), model.device)
    parts = corpus.by_source()

    def per_byte(part: TokenCorpus, progress: Progress) -> dict[str, float]:
        first = progress if reference is None else _part(progress, 0, 2)
        ce = evaluate(model, part.valid, seed=model.config.seed, draws=draws, progress=first)
        if reference is not None:
            second = _part(progress, 1, 2)
            ce["reference"] = evaluate_alone(
                reference, part.valid, model.config.context, progress=second
            )
        return {name: value / part.bytes_per_token for name, value in ce.items()}

    with limited_threads(threads):
        if not parts:
            return EvaluatedRun(per_byte(corpus, progress), {})
        sources = {
            name: per_byte(part, _part(progress, number, len(parts)))
            for number, (name, part) in enumerate(parts.items())
        }
    size = sum(part.valid_bytes for part in parts.values())
    shares = {name: part.valid_bytes / size for name, part in parts.items()}
    models = next(iter(sources.values()))
    ce = {m: sum(sources[name][m] * share for name, share in shares.items()) for m in models}
    return EvaluatedRun(ce, sources)


def _part(progress: Progress, number: int, count: int) -> Progress:
    """The progress of one of several equal parts."""
    return lambda share: progress((number + share) / count)


def _measure(
    plan: TrainingPlan, corpus: TokenCorpus, model: Model, progress: Progress
) -> dict[str, Any]:
    config, parent = plan.config, parent_of(plan.run.folder)
    evaluated = evaluate_run(
        plan.run.folder, model, corpus, draws=1, progress=progress, threads=plan.threads
    )
    ce = evaluated.ce
    work = _training_costs(plan.run)
    valid_bytes, eval_bytes = plan.corpus().valid_bytes, corpus.valid_bytes
    tokenizer = tokenizer_of(config)
    prompt = corpus.valid[: config.context // 2].tolist()
    sampler = Sampler(config.seed, temperature=0.8)
    with limited_threads():
        sample = list(write(model, prompt, SAMPLE_TOKENS, sampler))
    return {
        "valid_ce": {name: round(value, 5) for name, value in ce.items()},
        "nats_per_token": {n: round(v * corpus.bytes_per_token, 5) for n, v in ce.items()},
        "bits_per_byte": {n: round(v / math.log(2), 5) for n, v in ce.items()},
        **({"sources": evaluated.bits_by_source()} if evaluated.sources else {}),
        "gap": round(ce["composed"] - ce["reference"], 5) if "reference" in ce else None,
        "corpus": {
            "name": corpus.name,
            "train_bytes": corpus.train_bytes,
            "valid_bytes": valid_bytes,
            "bytes_per_token": round(corpus.bytes_per_token, 5),
            # Only if --eval-bytes made it less.
            **({"evaluated_bytes": eval_bytes} if eval_bytes < valid_bytes else {}),
        },
        "parameters": {
            block_name(n): _parameters(plan, n)
            for n in range(config.blocks + 1)
            if plan.run.weights(n).exists()
        },
        **({} if parent is None else {"parent": _parent_record(parent)}),
        "composition": read_manifest(plan.run.folder).composition,
        "pool_weights": None
        if model.pool_weights is None
        else [round(float(w), 4) for w in model.pool_weights],
        "ranges": [list(r) for r in noise_levels(config).ranges(config.blocks, config.gamma)]
        if config.objective == "denoise"
        else None,
        "seconds": {
            block_name(n): round(sum(seconds for seconds, _ in sessions), 1)
            for n, sessions in sorted(work.items())
        },
        "peak_mb": {
            block_name(n): max(peak for _, peak in sessions) for n, sessions in sorted(work.items())
        },
        "sample": {
            "prompt": tokenizer.decode(prompt).decode("utf-8", "replace"),
            "text": tokenizer.decode(sample).decode("utf-8", "replace"),
            "temperature": 0.8,
        },
    }


def _parent_record(parent: ParentRun) -> dict[str, Any]:
    return {**parent.model_dump(mode="json"), "sentence": parent.sentence}


def _training_costs(run: RunFolder) -> dict[int, list[tuple[float, float]]]:
    """By block, seconds and peak memory of each time it was trained: a run may be resumed."""
    work: dict[int, list[tuple[float, float]]] = {}
    for event in read_events(run.events):
        match event:
            case {
                "kind": "trained",
                "block": int(block),
                "seconds": int() | float() as seconds,
                "peak_mb": int() | float() as peak,
            }:
                # The reference reports the seconds of all its steps at once.
                before = [] if block == REFERENCE else work.get(block, [])
                work[block] = [*before, (seconds, peak)]
    return work


def _parameters(plan: TrainingPlan, index: int) -> int:
    return sum(
        p.numel()
        for p in load_block(plan.run, plan.config, index, torch.device("cpu")).parameters()
    )
