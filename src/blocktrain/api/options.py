"""The options of the API, by the names of the commands' flags, and how they become those flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from blocktrain.api.model import TrainedModel
from blocktrain.cli.flags import BeginFlags, Flags, read_flags
from blocktrain.config import Objective, Schedule
from blocktrain.errors import ConfigError

PathName = Path | str
TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class ModelOptions(TypedDict, total=False):
    """The settings of a run, as flags of `train` and keys of a settings file."""

    size: str
    blocks: int
    layers_per_block: int
    width: int
    heads: int
    context: int
    lookback: int
    embedding: Literal["auto", "full", "shared"]
    z_width: int
    tokenizer: str
    objective: Objective
    skip: Literal["exact", "edm"]
    compose: str
    feature_dropout: float
    sigma_min: float
    sigma_max: float
    p_mean: float
    p_std: float
    gamma: float
    sigma_data: float
    noise_edges: str
    noise_scale: Literal["one", "random"]
    training_z: Literal["target", "path"]
    start: Literal["noise", "zero"]
    tail: int
    tail_share: float
    tail_sigma_min: float
    optimizer: Literal["adamw", "muon"]
    fusion_optimizer: Literal["adamw", "muon"]
    learning_rate: float
    fusion_learning_rate: float
    reference_learning_rate: float
    schedule: Schedule
    fusion_schedule: Schedule
    fusion_share: float
    warmup: int
    weight_decay: float
    batch: int
    micro_batch: int
    checkpoint_activations: bool
    steps: int
    data_order: Literal["own", "shared"]
    seed: int
    device: str
    dtype: Literal["float32", "bfloat16"]
    compile: bool


class BeginOptions(ModelOptions, total=False):
    """What a run begins with."""

    config: PathName  # a settings file
    parent: TrainedModel | PathName  # a trained run to go on from
    freeze: bool
    new_fusion: bool
    score_bytes: int
    score_seconds: float


class TrainOptions(BeginOptions, total=False):
    """Of `Training` and `train`."""

    resume: bool
    preset: str
    reference: bool
    threads: int
    eval_bytes: int | None
    track: TrackerName | Sequence[TrackerName]


class CoordinateOptions(BeginOptions, total=False):
    """Of `coordinate`."""

    listen: str
    token: str
    open: bool
    allow_host: tuple[str, ...]
    tls: tuple[PathName, PathName]
    compression: str
    version_compression: str
    replicas: int | None
    min_replicas: int
    task_seconds: float
    task_steps: int | None
    rounds: int | None
    tokens: int | None
    max_staleness: int
    decay: float
    clip: float | None
    clip_by_steps: float | None
    clip_after: int
    undefended: bool
    retrain_share: float
    alike: float | None
    outer: Literal["average", "nesterov"]
    outer_learning_rate: float
    outer_momentum: float
    chunk_bytes: int
    first_deadline: float
    exclusive: bool
    keep_versions: int
    disk_limit: str
    worker_disk_limit: str


class ServeOptions(TypedDict, total=False):
    """Of `serve`."""

    reference: bool
    route: str
    token: str
    key: PathName
    plaintext: bool
    ca: PathName
    wire: Literal["fp32", "fp16"]
    check: float
    api_keys: PathName
    open: bool
    allow_host: tuple[str, ...]
    tls: tuple[PathName, PathName]
    max_requests: int
    queue: int
    mode: Literal["exact", "sweep", "autoregressive"] | None
    sweeps: int
    draft: Literal["first-block", "none"] | None
    no_degraded: bool
    deadline: float
    chat_template: PathName


def take_flags(kind: type[Flags], options: dict[str, Any]) -> Flags:
    """Those of the options that are flags of this kind, checked; the others stay."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return read_flags(kind, {name: options.pop(name) for name in names & options.keys()})


def take_begin(data: PathName | None, options: dict[str, Any]) -> tuple[BeginFlags, Path | None]:
    """What a run begins with, and its settings file."""
    parent, config = options.pop("parent", None), options.pop("config", None)
    options["from_"] = parent.folder if isinstance(parent, TrainedModel) else parent
    options["data"] = str(data) if isinstance(data, Path) else data
    return take_flags(BeginFlags, options), None if config is None else Path(config)


def refuse_unknown(options: dict[str, Any], known: type) -> None:
    """For options that were all taken."""
    if options:
        names = ", ".join(known.__annotations__)
        raise ConfigError(f"unknown option {min(options)!r}; known: {names}")
