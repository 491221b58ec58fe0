"""Compares compositions: the paper's, ours, single blocks and the end-to-end reference.

Every training and every evaluation is a job in its own process, which leaves its result in the
output folder, so that an interrupted bench continues. Variants share what would come out the same:
the blocks of `fuse` are those of `pool`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from blocktrain.bench.quality.readings import DEEP, EXACT, READINGS, TEXT
from blocktrain.bench.quality.replicas import Replicas
from blocktrain.bench.serving.samples import judge_samples
from blocktrain.config import Config
from blocktrain.errors import Interrupted
from blocktrain.learning.compose import MARGINAL_DRAWS, Model, composition_of, independent
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import cross_entropies, evaluate_alone
from blocktrain.learning.model import Block, IndependentBlock, build_independent
from blocktrain.learning.pool import fit_pool_weights
from blocktrain.learning.threads import use_threads
from blocktrain.learning.tokenizer import Ids, tokenizer_of
from blocktrain.learning.train import REFERENCE, Trainer, load_weights, read_tensors
from blocktrain.processes import Channel, Job
from blocktrain.runs.folder import (
    RunFolder,
    block_name,
    load_block,
    load_independent,
    publish,
    read_json,
    read_tokenizer,
    write_json,
)

SCALES: dict[str, dict[str, Any]] = {
    "standard": {
        "width": 128,
        "layers_per_block": 2,
        "blocks": 4,
        "context": 128,
        "batch": 16,
        "steps": 1200,
    },
    "tiny": {
        "width": 32,
        "heads": 2,
        "layers_per_block": 1,
        "blocks": 4,
        "context": 32,
        "batch": 8,
        "steps": 60,
        "z_width": 32,
    },
    "large": {
        "width": 192,
        "heads": 6,
        "layers_per_block": 3,
        "blocks": 4,
        "context": 128,
        "batch": 16,
        "steps": 1600,
        "learning_rate": 4.9e-3,
        "fusion_learning_rate": 1.6e-3,
        "reference_learning_rate": 4.9e-3,
    },
    "small": {
        "tokenizer": "bpe:4096",
        "width": 256,
        "heads": 8,
        "layers_per_block": 2,
        "blocks": 4,
        "context": 256,
        "batch": 16,
        "steps": 400,
        "learning_rate": 4.2e-3,
        "fusion_learning_rate": 1.4e-3,
        "reference_learning_rate": 4.2e-3,
    },
}
VALID_LIMIT = {"standard": None, "tiny": 16_384, "small": 131_072, "large": None}  # tokens
COST_STEPS = 24  # of each kind, to compare their times
SAME_TIME = 0.05  # times that differ by less count as equal
LEAKAGE_SIGMAS = (0.05, 0.2, 1.0)
STOPPED = "stopped; what it had is saved: call the bench again to continue"
VERSIONS = 24  # `fuse_beside`: how many versions a block publishes over its budget

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": EXACT,  # what the skip alone changes; first, as its evaluation takes longest
    "fuse": {"compose": "fuse"},
    "pool": {"compose": "pool"},
    "long_fusion": {"compose": "fuse", "fusion_share": 1.0},
    "same": {"compose": "fuse", "data_order": "shared"},
    "beside": {"compose": "fuse"},
    "paper": TEXT,
}
OURS = ("fuse", "pool", "long_fusion")
EQUAL_TIME = ("fuse", "pool", "single_block", "end_to_end")
"""Trained again, each for as long as the end-to-end model takes; and that model for as long as all
blocks of `fuse` take together."""
AVERAGED = {"averaged_block": 1, "averaged_end_to_end": REFERENCE}
"""What else as many machines as there are blocks could do: train one model and average it."""
ROWS: dict[str, dict[str, Any]] = {
    "tiny": {"equal_time": EQUAL_TIME, "averaged": True},
    "standard": {
        "variants": (*OURS, "same", "beside", "paper"),
        "equal_time": ("fuse", "end_to_end"),
        "averaged": True,
    },
    "large": {"variants": OURS, "equal_time": ("fuse", "end_to_end")},
    "small": {"variants": OURS, "equal_time": ("fuse", "pool", "single_block")},
}
"""What is trained at each scale."""
OUR_ROWS: dict[str, Any] = {"variants": OURS, "averaged": False}
"""What the seeds after the first change in it: they train only what a mean is needed of."""
ALONE = {"equal_end_to_end": REFERENCE, "equal_single_block": 1, **AVERAGED}
"""Variants that are one model, and its index."""


@dataclass(frozen=True)
class Setup:
    """One seed at one scale."""

    folder: Path
    base: Config
    source: Source
    valid_limit: int | None
    leakage: bool
    variants: tuple[str, ...] = tuple(VARIANTS)
    equal_time: tuple[str, ...] = ()
    averaged: bool = False

    def config(self, variant: str) -> Config:
        """Settings of a variant; leakage variants are named by their lowest noise level."""
        if variant.startswith("equal_"):
            return self._equal_time(variant.removeprefix("equal_"))
        if variant in AVERAGED:
            fuse, config = self.base.replace(compose="fuse"), self.base.replace(compose="pool")
            share = self.wall_clock(fuse, self.indices("fuse"))
            share /= self.step_cost(config, AVERAGED[variant])
            return config.replace(steps=round(config.steps * share))
        if variant.startswith("leakage_"):
            return self.base.replace(
                **VARIANTS["exact"], sigma_min=float(variant.removeprefix("leakage_"))
            )
        if variant in VARIANTS:
            return self.base.replace(**VARIANTS[variant])
        reading = DEEP if variant == "deep" else READINGS[variant]
        pilot = read_json(self.result(reading.edges)) if reading.edges else {}
        return reading.config(self.base, pilot.get("edges", "mass"))

    def reads(self, variant: str, index: int) -> int:
        """How many blocks this one needs for its training: the first so many."""
        is_link = variant in READINGS and READINGS[variant].chain
        return max(index - 1, 0) if is_link else self.config(variant).reads(index)

    def run(self, variant: str) -> RunFolder:
        """Where a variant's weights are."""
        return RunFolder(self.folder / variant)

    def result(self, job: str) -> Path:
        """Where a job leaves its numbers."""
        return self.folder / "results" / f"{job}.json"

    def _equal_time(self, row: str) -> Config:
        config = self.base.replace(compose="fuse" if row == "fuse" else "pool")
        fuse = self.base.replace(compose="fuse")
        time = self.work(fuse, self.indices("fuse")) if row == "end_to_end" else 1.0
        share = time / self.work(config, self.indices(row))
        if abs(share - 1) < SAME_TIME:
            return config
        return config.replace(steps=max(1, round(config.steps * share)))

    def indices(self, row: str) -> list[int]:
        """What a row consists of: the reference, one block, or all blocks."""
        alone = {"end_to_end": [REFERENCE], "single_block": [1]}
        return alone.get(row, list(range(1, self.base.blocks + 1)))

    def step_cost(self, config: Config, index: int) -> float:
        """Time of a step of one block, in steps of the reference."""
        cost = read_json(self.result("costs"))
        kind = {REFERENCE: "reference", config.fusion: "fusion"}.get(index, "block")
        return float(cost[kind] / cost["reference"])

    def work(self, config: Config, indices: Iterable[int]) -> float:
        """Training time of these blocks together, in that of the end-to-end row."""
        return sum(self._time(config, index) for index in indices)

    def _time(self, config: Config, index: int) -> float:
        return self.step_cost(config, index) * config.steps_of(index) / self.base.steps

    def wall_clock(self, config: Config, indices: Iterable[int], *, beside: bool = False) -> float:
        """The same with a machine for each block.

        The fusion block begins when the others end; beside them, when they are half done.
        """
        times = {index: self._time(config, index) for index in indices}
        fusion = times.pop(config.fusion, 0.0) if config.fusion else 0.0
        block = max(times.values())
        return max(block, block / 2 + fusion) if beside else block + fusion

    def corpus(self) -> TokenCorpus:
        """The tokens that all variants read."""
        read_tokenizer(self.folder, self.base)  # a job is a process of its own
        return self.source.open(tokenizer_of(self.base))

    def valid(self) -> Ids:
        """What is evaluated."""
        return self.corpus().valid[: self.valid_limit]


def twin(config: Config, variant: str, index: int) -> str | None:
    """The variant whose training of this block is the same computation, if there is one."""
    if variant in ("pool", "beside", "long_fusion") and 1 <= index < config.blocks:
        return "fuse"
    return "fuse" if variant == "same" and index == 1 else None


def leakage_variant(setup: Setup, sigma: float) -> str:
    """The variant whose lowest noise level is this one."""
    return "exact" if sigma == setup.base.sigma_min else f"leakage_{sigma}"


def jobs(setup: Setup) -> list[Job]:
    """Everything one seed needs after its costs; what already has its result is left out."""
    plan = [Job("end_to_end", train_job, (setup, "fuse", REFERENCE))]
    for variant in _trained_variants(setup):
        config = setup.config(variant)
        for index in range(1, config.blocks + 1):
            if twin(config, variant, index):
                continue
            reads = (
                [_job_name(config, variant, n) for n in range(1, config.independent + 1)]
                if index > config.independent
                else []
            )
            plan.append(
                Job(
                    f"{variant}-{block_name(index)}",
                    train_job,
                    (setup, variant, index),
                    after=tuple(reads),
                )
            )
        needs = {_job_name(config, variant, n) for n in range(1, config.blocks + 1)}
        needs |= {"end_to_end"} if variant == "fuse" else set()
        plan.append(
            Job(f"evaluate-{variant}", evaluate_job, (setup, variant), after=tuple(sorted(needs)))
        )
    plan += _equal_time_jobs(setup) + _averaged_jobs(setup)
    plan.append(Job("samples", samples_job, (setup,), after=("evaluate-fuse",)))
    return without_finished(setup, plan)


def cost_jobs(setup: Setup) -> list[Job]:
    """What says how long the trainings at equal time are."""
    for variant in _trained_variants(setup):
        setup.config(variant)  # refuses settings that a variant cannot have
    return without_finished(setup, [Job("costs", measure_costs, (setup,))])


def _trained_variants(setup: Setup) -> list[str]:
    leakage = [leakage_variant(setup, sigma) for sigma in LEAKAGE_SIGMAS] if setup.leakage else []
    return list(dict.fromkeys([*setup.variants, *leakage]))


def without_finished(setup: Setup, plan: list[Job]) -> list[Job]:
    """The jobs that have no result yet; they wait for no other ones."""
    finished = {job.name for job in plan if setup.result(job.name).exists()}
    return [
        Job(j.name, j.work, j.arguments, tuple(a for a in j.after if a not in finished))
        for j in plan
        if j.name not in finished
    ]


def _equal_time_jobs(setup: Setup) -> list[Job]:
    """The trainings whose length is chosen by the time they take.

    One that is as long as that of the row with equal steps is not repeated.
    """
    plan = []
    for row in setup.equal_time:
        variant, fusion = f"equal_{row}", setup.base.blocks if row == "fuse" else None
        if setup.config(variant).steps == setup.base.steps:
            continue
        names = {n: f"{variant}-{block_name(n)}" for n in setup.indices(row)}
        blocks = tuple(name for n, name in names.items() if n != fusion)
        plan += [
            Job(
                name,
                train_job,
                (setup, variant, n),
                after=blocks if n == fusion else (),
            )
            for n, name in names.items()
        ]
        plan.append(
            Job(f"evaluate-{variant}", evaluate_job, (setup, variant), tuple(names.values()))
        )
    return plan


def _averaged_jobs(setup: Setup) -> list[Job]:
    """One model on as many machines as there are blocks, averaged."""
    if not setup.averaged:
        return []
    training = [Job(name, average_job, (setup, name)) for name in AVERAGED]
    judging = [
        Job(f"evaluate-{name}", evaluate_job, (setup, name), after=(name,)) for name in AVERAGED
    ]
    return [*training, *judging]


def measure_costs(channel: Channel, setup: Setup) -> None:
    """Seconds of a step of the reference, a block and the fusion block.

    Their steps take turns, so that other work on the machine slows all alike.
    """
    use_threads()
    config = setup.config("fuse")
    corpus = setup.corpus()
    sources = [build_independent(config, n) for n in range(1, config.blocks)]
    trainers = {
        "reference": Trainer(config, REFERENCE),
        "block": Trainer(config, 1),
        "fusion": Trainer(config, config.blocks, sources),
    }
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(COST_STEPS + 1):
        for name, trainer in trainers.items():
            before = trainer.seconds
            batches = corpus.batches(config, trainer.index)
            for _ in trainer.run(batches, trainer.step + 1):
                pass
            if turn:  # the first step allocates
                seconds[name].append(trainer.seconds - before)
        report_progress(channel, share=(turn + 1) / (COST_STEPS + 1))
    ratios = {
        name: median(s / r for s, r in zip(seconds[name], seconds["reference"], strict=True))
        for name in trainers
    }
    save_result(setup, "costs", ratios)


def _job_name(config: Config, variant: str, index: int) -> str:
    return f"{twin(config, variant, index) or variant}-{block_name(index)}"


def train_job(channel: Channel, setup: Setup, variant: str, index: int) -> None:
    """Train and publish one block; of `fuse`, also the versions that `beside` reads meanwhile."""
    use_threads()
    config, run = setup.config(variant), setup.run(variant)
    state = run.state(index)
    state.parent.mkdir(parents=True, exist_ok=True)
    reads = setup.reads(variant, index)
    trainer = Trainer(config, index, _finals(setup, variant, reads))
    if state.exists():
        trainer.load(state)
    if variant == "beside" and reads:
        begun = version_beside(trainer.step / config.steps_of(index), config.steps)
        trainer.read([_version(setup, config, n, begun) for n in range(1, reads + 1)])
    first = index == REFERENCE and variant == "fuse"
    name = "end_to_end" if first else f"{variant}-{block_name(index)}"
    losses: list[float] = []
    steps = config.steps_of(index)
    version = version_beside(trainer.step / steps, config.steps)
    batches = setup.corpus().batches(config, trainer.index)
    for step, loss in trainer.run(batches, steps):
        losses = [*losses[-99:], loss]
        if (
            variant == "fuse"
            and 0 < index <= config.independent
            and is_published(step, config.steps)
        ):
            publish(RunFolder(run.folder / f"version-{step}"), index, trainer.block)
        newest = version_beside(step / steps, config.steps)
        if variant == "beside" and reads and version != newest:
            version = newest
            trainer.read([_version(setup, config, n, version) for n in range(1, reads + 1)])
        if step % 10 == 0 or step == steps:
            channel.send(step=step, steps=steps, loss=sum(losses) / len(losses))
        if channel.should_stop and step < steps:
            trainer.save(state)
            raise Interrupted(STOPPED)
    publish(run, index, trainer.block)
    save_result(
        setup,
        name,
        {
            "seconds": round(trainer.seconds, 1),
            "train_ce": sum(losses) / len(losses),
        },
    )
    state.unlink(missing_ok=True)


def average_job(channel: Channel, setup: Setup, variant: str) -> None:
    """Train one model by as many workers as there are blocks, in rounds, and publish it."""
    use_threads()
    config, run, index = setup.config(variant), setup.run(variant), AVERAGED[variant]
    state = run.state(index)
    state.parent.mkdir(parents=True, exist_ok=True)
    replicas = Replicas(config, index, setup.base.blocks)
    if state.exists():
        replicas.load(state)
    batches = setup.corpus().batches(config, index)
    while replicas.step < config.steps:
        for loss in replicas.train_round(batches):
            channel.send(step=replicas.step, steps=config.steps, loss=loss)
            if channel.should_stop:  # what is lost is this round
                raise Interrupted(STOPPED)
        replicas.save(state)
    publish(run, index, replicas.block)
    save_result(setup, variant, {"seconds": round(replicas.seconds, 1)})
    state.unlink(missing_ok=True)


def is_published(step: int, steps: int) -> bool:
    """Whether a block publishes this step for the fusion block, which begins at half its budget."""
    every = max(steps // VERSIONS, 1)
    return step == steps or (step % every == 0 and step >= steps // 2 // every * every)


def version_beside(share: float, steps: int) -> int:
    """The version that the fusion block reads after this share of its steps.

    The others train in parallel. They are half done when it begins, and done when it is half done.
    """
    every = max(steps // VERSIONS, 1)
    reached = steps // 2 + int(share * steps)
    return steps if reached >= steps else max(every, reached // every * every)


def _version(setup: Setup, config: Config, index: int, step: int) -> IndependentBlock:
    path = RunFolder(setup.run("fuse").folder / f"version-{step}").weights(index)
    block = build_independent(config, index)
    load_weights(block, read_tensors(path)[0], path)
    return block


def _final(setup: Setup, variant: str, index: int) -> Block:
    config = setup.config(variant)
    return load_block(
        setup.run(twin(config, variant, index) or variant), config, index, torch.device("cpu")
    )


def _finals(setup: Setup, variant: str, count: int) -> list[IndependentBlock]:
    return independent({n: _final(setup, variant, n) for n in range(1, count + 1)})


def load_model(setup: Setup, variant: str) -> Model:
    """The model of a variant whose blocks are trained."""
    config = setup.config(variant)
    blocks = {n: _final(setup, variant, n) for n in range(1, config.blocks + 1)}
    return composition_of(config).assemble(config, blocks)


def evaluate_job(channel: Channel, setup: Setup, variant: str) -> None:
    """Cross entropies of one variant on the whole valid split."""
    use_threads()
    if variant in ALONE:
        return _evaluate_alone(channel, setup, variant)
    config, model = setup.config(variant), load_model(setup, variant)
    result: dict[str, Any] = {}
    valid = setup.valid()

    def progress(share: float) -> None:
        report_progress(channel, share=share)

    if config.predicts_without_noise:
        model.pool_weights = fit_pool_weights(model, setup.corpus().calibration)
        result["pool_weights"] = model.pool_weights.tolist()
    draws, leave_out = MARGINAL_DRAWS if variant == "exact" else 1, variant == "fuse"
    passes = model.composition.predictors(model, seed=config.seed, draws=draws, leave_out=leave_out)
    result["ce"] = {}
    for predict in passes:
        result["ce"] |= cross_entropies(predict, valid, config.context, progress=progress)
    if variant == "fuse":
        reference = load_independent(setup.run("fuse"), config, REFERENCE, model.device)
        result["reference"] = evaluate_alone(reference, valid, config.context)
    save_result(setup, f"evaluate-{variant}", result)


def _evaluate_alone(channel: Channel, setup: Setup, variant: str) -> None:
    """One model by itself: the reference, or a block."""
    config, index = setup.config(variant), ALONE[variant]
    block = load_independent(setup.run(variant), config, index, torch.device("cpu"))
    ce = evaluate_alone(
        block,
        setup.valid(),
        config.context,
        progress=lambda share: report_progress(channel, share=share),
    )
    save_result(setup, f"evaluate-{variant}", {"ce": ce})


def samples_job(channel: Channel, setup: Setup) -> None:
    """Quality of sampled text under the end-to-end model."""
    use_threads()
    config, model = setup.config("fuse"), load_model(setup, "fuse")
    reference = load_independent(setup.run("fuse"), config, REFERENCE, model.device)
    count = 32 if setup.valid_limit is None else 4
    rows = judge_samples(
        model,
        reference,
        setup.valid(),
        count=count,
        seed=config.seed,
        progress=lambda share: report_progress(channel, share=share),
    )
    save_result(setup, "samples", {"rows": rows})


def report_progress(channel: Channel, *, share: float) -> None:
    """Report how far a job is, and end it if it should stop, without waiting for minutes."""
    channel.send(share=share)
    if channel.should_stop and share < 1:
        raise Interrupted(STOPPED)


def save_result(setup: Setup, job: str, content: dict[str, Any]) -> None:
    """Leave the numbers of a job, which is finished by that."""
    setup.result(job).parent.mkdir(parents=True, exist_ok=True)
    write_json(setup.result(job), content)


def clear_versions(setup: Setup) -> None:
    """Drop the intermediate versions once nothing needs them."""
    for folder in setup.run("fuse").folder.glob("version-*"):
        shutil.rmtree(folder)


def results(setup: Setup) -> dict[str, dict[str, Any]]:
    """What all jobs left, by job."""
    return {
        path.stem: read_json(path) for path in sorted((setup.folder / "results").glob("*.json"))
    }
