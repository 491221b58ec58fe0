"""The settings of a run: one frozen, validated model for flags, TOML files and the wire.

Their fingerprint is the sha256 of their canonical JSON. A setting that was added after the first
release is left out of that JSON, of TOML files and of messages while it has its default value, so
runs of earlier releases keep their fingerprint: see `ADDED`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from blocktrain.errors import ConfigError

LARGEST_FILE = 1 << 20  # bytes of a settings file
LONGEST_VALUE = 200  # characters of a wrong value that are shown
# Keys of a run's config.toml that do not describe the model.
RUN_ONLY = ("data", "reference", "from", "freeze", "new_fusion")
# Settings that are not written while they have their default value.
ADDED = (
    "tokenizer",
    "tokenizer_hash",
    "vocabulary",
    "embedding",
    "micro_batch",
    "checkpoint_activations",
    "compile",
    "start",
    "noise_scale",
    "noise_edges",
    "training_z",
    "fusion_share",
)
DERIVED = ("tokenizer_hash", "vocabulary")  # found out when a run is made; they are no flags
BPE_SIZES = (300, 1_000_000)
LARGEST_VOCABULARY = 1 << 20
LARGEST_SHARD = 1 << 28  # tokens; the order of its sequences is drawn at once
MOST_TABLES = 1024  # tokens of a vocabulary that is small enough for several tables
WORDS = {
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be a text",
    "string_pattern_mismatch": "must match {pattern}",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
}
Schedule = Literal["cosine", "linear", "constant"]
Objective = Literal["next", "denoise"]
Topology = Literal["fan", "ring"]


@dataclass(frozen=True)
class Traits:
    """What settings and the control plane need to know of a composition, without torch.

    What a composition computes is its row in `learning.compose`.
    """

    name: str
    summary: str
    topology: Topology
    """fan: all stages read the same tokens at once. ring: a state passes from stage to stage."""
    fusion: bool = False
    """Whether the last block reads the features of all others."""
    objective: Objective | None = None
    """The only objective whose blocks it composes; None: any."""
    edm: bool = False
    """Whether it composes blocks of skip=edm."""


TRAITS = {
    traits.name: traits
    for traits in (
        Traits("fuse", "fusion block", "fan", fusion=True, objective="next"),
        Traits("pool", "weighted pool", "fan"),
        Traits("euler", "the paper's Euler steps", "ring", objective="denoise", edm=True),
    )
}
"""The compositions by name. `learning.compose.register` adds to them."""

TOKENIZERS = {"bytes": 256}
"""Vocabularies of the tokenizers that need no file. `learning.tokenizer.register` adds to them."""


def require_composition(name: str) -> str:
    if name not in TRAITS:
        raise ValueError(f"must be {_alternatives(map(repr, TRAITS))}")
    return name


def require_tokenizer(name: str) -> str:
    if name in TOKENIZERS:
        return name
    if name.startswith("bpe"):
        size, (least, most) = bpe_size(name), BPE_SIZES
        if size is None or not least <= size <= most:
            raise ValueError(f"must be bpe:N with N from {least} to {most:,}, as in bpe:4096")
        return name
    is_path = name.endswith(".json") or name.startswith(("/", "./", "../", "~"))
    is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", name, re.ASCII)
    if not is_path and not (is_hub_name and len(name) <= 200):
        raise ValueError(
            f"must be {', '.join(TOKENIZERS)}, bpe:N, the path of a tokenizer.json, "
            "or a name on the Hugging Face hub"
        )
    return name


def bpe_size(tokenizer: str) -> int | None:
    """The N of bpe:N."""
    match = re.fullmatch(r"bpe:([0-9]{1,9})", tokenizer)
    return int(match[1]) if match else None


def require_levels(text: str) -> str:
    """mass, or numbers with commas between them; whether they fit the range is checked later."""
    if text != "mass":
        parse_levels(text)
    return text


def parse_levels(text: str) -> tuple[float, ...]:
    """The numbers in 1.5,2.5,5."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,9})?", part, re.ASCII) for part in parts):
        raise ValueError("must be mass or rising noise levels, as in 1.5,2.5,5")
    return tuple(map(float, parts))


def require_device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps|auto", name):
        raise ValueError("must be cpu, cuda, cuda:N, mps or auto")
    return name


class Origin(NamedTuple):
    """The run that another one goes on from, and how."""

    folder: str
    freeze: bool = False
    """Leave the blocks that read only tokens as they are."""
    new_fusion: bool = False
    """Begin with a new fusion block."""


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"objective": "denoise", "skip": "edm", "compose": "euler", "start": "zero"},
}


class Config(BaseModel):
    """Everything that decides what is trained. Field docstrings are the help texts of the flags."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    blocks: int = Field(default=4, ge=1, le=256)
    """Blocks in the model; with compose=fuse the last one is the fusion block."""
    layers_per_block: int = Field(default=2, ge=1, le=256)
    """Transformer layers in a block."""
    width: int = Field(default=96, ge=8, le=16384)
    """Width of the residual stream."""
    heads: int = Field(default=4, ge=1, le=256)
    """Attention heads; must divide the width into even parts."""
    context: int = Field(default=128, ge=8, le=65536)
    """Tokens a block sees at once."""
    lookback: int = Field(default=4, ge=1, le=64)
    """Tokens a position is embedded with: its own and those just before it."""
    embedding: Literal["auto", "full", "shared"] = "auto"
    """full: a table of the vocabulary for each token of the lookback, and one for the head.
    shared: one table for all of them, and a matrix for the tokens before. auto: shared for more
    than 1,024 tokens."""
    z_width: int = Field(default=128, ge=2, le=16384)
    """Width of the target table (used by objective=denoise)."""
    tokenizer: Annotated[str, AfterValidator(require_tokenizer)] = "bytes"
    """How text becomes tokens. bytes: every byte is a token. bpe:N: N tokens learned from the
    training text. Or the path of a tokenizer.json, or the name of a model on the Hugging Face
    hub."""
    tokenizer_hash: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """sha256 of the run's tokenizer.json; empty for bytes. Found out when a run is made: no flag
    sets it."""
    vocabulary: int = Field(default=256, ge=2, le=LARGEST_VOCABULARY)
    """Tokens that there are. Found out when a run is made: no flag sets it."""

    objective: Objective = "next"
    """next: predict the next token. denoise: recover its noised embedding, as in the paper
    (needed by euler and by tail)."""
    skip: Literal["exact", "edm"] = "exact"
    """How the noised target enters the output: Bayes' rule in logit space, or EDM's skip, as in
    the paper."""
    compose: Annotated[str, AfterValidator(require_composition)] = Field(
        default="fuse",
        description="How blocks become one model. "
        + " ".join(f"{traits.name}: {traits.summary}." for traits in TRAITS.values()),
    )
    feature_dropout: float = Field(default=0.06, ge=0, lt=1)
    """Probability that the fusion block trains without one block's features, so that a missing
    block costs little."""

    sigma_min: float = Field(default=1.0, ge=1e-4)
    """Lowest noise level; below 1 the target leaks into the training loss."""
    sigma_max: float = Field(default=10.0, gt=0, le=1e4)
    """Highest noise level."""
    p_mean: float = Field(default=-1.2, ge=-100, le=100)
    """Mean of ln(sigma)."""
    p_std: float = Field(default=1.2, gt=0, le=100)
    """Standard deviation of ln(sigma)."""
    gamma: float = Field(default=0.1, ge=0, le=1)
    """Share of its log-width by which a block's noise range overlaps its neighbours."""
    sigma_data: float = Field(default=0.5, ge=1e-4, le=1e4)
    """EDM's assumed deviation of the targets."""
    noise_edges: Annotated[str, AfterValidator(require_levels)] = "mass"
    """Where one block's noise range ends and the next one's begins. mass: parts of equal
    probability. Or blocks - 1 rising levels, as in 1.5,2.5,5."""
    noise_scale: Literal["one", "random"] = "one"
    """How strong the noise is in training: as strong as its level says, or in each sequence scaled
    by a random number from 0 to 1 that no block is told."""
    training_z: Literal["target", "path"] = "target"
    """What a block of compose=euler trains on. target: the noised target, as in the paper. path: z
    as the path brings it, walked by the block itself in place of the blocks before it."""
    start: Literal["noise", "zero"] = "noise"
    """Where the path of compose=euler starts. noise: it passes on samples, as in the paper's text.
    zero: it passes on predictions, and has nothing random in it."""
    tail: int = Field(default=0, ge=0)
    """Unknown positions at the end of a training sequence, denoised jointly (0: off). For sweeps
    from pure noise."""
    tail_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the steps whose sequences have a tail, when tail > 0."""
    tail_sigma_min: float = Field(default=0.1, ge=1e-4)
    """Lowest noise level of the tail."""

    optimizer: Literal["adamw", "muon"] = "muon"
    """Of the independent blocks and the reference. muon: orthogonal steps for the matrices inside,
    AdamW for the rest."""
    fusion_optimizer: Literal["adamw", "muon"] = "muon"
    """Of the fusion block."""
    learning_rate: float = Field(default=6e-3, gt=0, le=1)
    """Peak learning rate of the independent blocks. For adamw about half."""
    fusion_learning_rate: float = Field(default=2e-3, gt=0, le=1)
    """Peak learning rate of the fusion block. For adamw about half."""
    reference_learning_rate: float = Field(default=6e-3, gt=0, le=1)
    """Peak learning rate of the end-to-end reference. For adamw about a third."""
    schedule: Schedule = "cosine"
    """Shape of the learning rate after the warm-up; cosine and linear end at zero."""
    fusion_schedule: Schedule = "linear"
    """The same for the fusion block."""
    warmup: int = Field(default=50, ge=0)
    """Steps over which the learning rate rises (at most a tenth of all steps)."""
    weight_decay: float = Field(default=0.1, ge=0, le=10)
    """Decoupled weight decay of the matrices."""
    batch: int = Field(default=16, ge=1, le=65536)
    """Sequences in a step."""
    micro_batch: int = Field(default=0, ge=0, le=65536)
    """Sequences that are computed at once; their gradients add up to those of the batch, to
    rounding. Fewer take less memory and more time. 0: the whole batch."""
    checkpoint_activations: bool = False
    """Keep only the input of each layer for the backward pass and compute the rest again: less
    memory, about a third more time, the same bits."""
    steps: int = Field(default=500, ge=1, le=2**31)
    """Training steps of each block that reads only tokens."""
    fusion_share: float = Field(default=0.4, gt=0, le=100)
    """Steps of the fusion block, as a share of the steps of the others."""
    data_order: Literal["own", "shared"] = "own"
    """own: every block reads the corpus in its own order. shared: all read the same batches."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of everything random."""
    device: Annotated[str, AfterValidator(require_device)] = "cpu"
    """cpu, cuda, cuda:N, mps, or auto (the best there is)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the layers in training (autocast). Weights, loss, optimizer and evaluation
    stay float32."""
    compile: bool = False
    """Compile the layers with torch.compile when training begins: faster steps after a minute of
    compiling, and other roundings. Every machine that trains or audits the run compiles."""

    @model_validator(mode="before")
    @classmethod
    def _fill_vocabulary(cls, settings: Any) -> Any:
        """The size that the tokenizer's name tells; that of others is known once they are read."""
        if not isinstance(settings, dict) or "vocabulary" in settings:
            return settings
        name = settings.get("tokenizer")
        size = TOKENIZERS.get(name) or bpe_size(name) if isinstance(name, str) else None
        return {**settings, "vocabulary": size} if size else settings

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"heads={self.heads} must divide width={self.width} into even parts; "
                f"try {_suggest_heads(self.width, self.heads)}"
            )
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"sigma_min={self.sigma_min} must be below sigma_max={self.sigma_max}")
        self._check_composition()
        self._check_tail()
        if self.embedding == "shared" and not self.predicts_without_noise:
            raise ValueError("skip=edm has a head of another width: use embedding=full")
        size = TOKENIZERS.get(self.tokenizer, self.vocabulary)
        if self.vocabulary != size or (self.tokenizer in TOKENIZERS and self.tokenizer_hash):
            raise ValueError(f"tokenizer={self.tokenizer} has {size} tokens and no tokenizer_hash")
        self._check_noise_edges()
        normal = NormalDist(self.p_mean, self.p_std)
        for lowest in ("sigma_min", *(["tail_sigma_min"] if self.tail else [])):
            if normal.cdf(log(self.sigma_max)) - normal.cdf(log(getattr(self, lowest))) < 1e-6:
                raise ValueError(
                    f"p_mean={self.p_mean} and p_std={self.p_std} leave no noise between {lowest} "
                    "and sigma_max"
                )
        return self

    def _check_composition(self) -> None:
        traits = self.traits
        if traits.objective not in (None, self.objective):
            others = [t.name for t in TRAITS.values() if t.objective in (None, self.objective)]
            raise ValueError(
                f"compose={traits.name} needs objective={traits.objective}; "
                f"with objective={self.objective} use compose={_alternatives(others)}"
            )
        if self.skip == "edm" and self.objective == "denoise" and not traits.edm:
            able = _alternatives(t.name for t in TRAITS.values() if t.edm)
            raise ValueError(f"skip=edm only composes by {able}; use compose={able} or skip=exact")
        if self.training_z == "path" and traits.topology != "ring":
            rings = _alternatives(t.name for t in TRAITS.values() if t.topology == "ring")
            raise ValueError(f"training_z=path needs compose={rings}: other models have no path")
        if traits.fusion and self.blocks < 2:
            raise ValueError(
                f"compose={traits.name} needs at least 2 blocks: one to read and the fusion block"
            )

    def _check_noise_edges(self) -> None:
        levels = [self.sigma_min, *self.inner_edges, self.sigma_max]
        if self.noise_edges == "mass":
            return
        if len(levels) != self.blocks + 1:
            raise ValueError(
                f"noise_edges={self.noise_edges} must be {self.blocks - 1} levels, "
                f"one between any two of {self.blocks} blocks"
            )
        if any(low >= high for low, high in pairwise(levels)):
            raise ValueError(
                f"noise_edges={self.noise_edges} must rise from sigma_min={self.sigma_min} "
                f"to sigma_max={self.sigma_max}"
            )

    def _check_tail(self) -> None:
        if not self.tail:
            return
        if self.objective != "denoise":
            raise ValueError("tail needs objective=denoise")
        if self.tail >= self.context:
            raise ValueError(f"tail={self.tail} must be shorter than context={self.context}")
        if self.training_z == "path":
            raise ValueError("tail needs training_z=target: a path never knows what a tail hides")
        if self.tail_sigma_min >= self.sigma_max:
            raise ValueError(
                f"tail_sigma_min={self.tail_sigma_min} must be below sigma_max={self.sigma_max}"
            )

    @model_serializer(mode="wrap")
    def _without_added_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            name: value
            for name, value in serialize(self).items()
            if name not in ADDED or value != fields[name].default
        }

    @property
    def shares_table(self) -> bool:
        """Whether one table of the vocabulary serves the head and all tokens of the lookback."""
        large = self.vocabulary > MOST_TABLES and self.predicts_without_noise
        return self.embedding == "shared" or (self.embedding == "auto" and large)

    @property
    def traits(self) -> Traits:
        """Of its composition."""
        return TRAITS[self.compose]

    @property
    def fusion(self) -> int | None:
        """The number of the fusion block, if the composition has one."""
        return self.blocks if self.traits.fusion else None

    @property
    def independent(self) -> int:
        """How many blocks read only tokens; they are numbered 1 to this."""
        return self.blocks - 1 if self.traits.fusion else self.blocks

    @property
    def predicts_without_noise(self) -> bool:
        """Whether a block alone is a language model; a block of skip=edm needs a noised target."""
        return self.objective == "next" or self.skip == "exact"

    @property
    def inner_edges(self) -> tuple[float, ...]:
        """The noise levels between blocks, if they are named."""
        return () if self.noise_edges == "mass" else parse_levels(self.noise_edges)

    @property
    def rows(self) -> int:
        """How many sequences are computed at once."""
        return min(self.micro_batch or self.batch, self.batch)

    def steps_of(self, index: int) -> int:
        """Training steps of a block; 0 is the end-to-end reference."""
        if index != self.fusion:
            return self.steps
        return max(1, round(self.steps * self.fusion_share))

    @property
    def length(self) -> str:
        """How long blocks train, for people."""
        own = self.steps_of(self.fusion or 0)
        fusion = f", the fusion block {own:,}" if own != self.steps else ""
        return f"{self.steps:,} steps each{fusion}"

    def reads(self, index: int) -> int:
        """How many blocks this one reads the features of: all others if it is the fusion block."""
        return self.independent if index == self.fusion else 0

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON: equal if and only if all settings are equal."""
        canonical = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def replace(self, **changes: Any) -> Config:
        """A copy with some settings changed, validated again.

        Another tokenizer takes its hash and its vocabulary along.
        """
        without = DERIVED if changes.get("tokenizer", self.tokenizer) != self.tokenizer else ()
        kept = {name: value for name, value in self.model_dump().items() if name not in without}
        return make_config({**kept, **changes})


def make_config(settings: dict[str, Any], preset: str | None = None) -> Config:
    """Validated settings. Given ones override the preset, the preset overrides the defaults."""
    try:
        return Config(**{**preset_settings(preset), **settings})
    except ValidationError as error:
        known = [*RUN_ONLY, "size", *Config.model_fields]
        raise ConfigError(sentence(error, known)) from None


def preset_settings(preset: str | None) -> dict[str, Any]:
    """The settings of a named preset."""
    if preset is None:
        return {}
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[preset]


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file, not yet validated."""
    try:
        with path.open("rb") as file:  # it may be endless, like /dev/zero
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ConfigError(
                f"{path} has more than {LARGEST_FILE} bytes: it is not a settings file"
            )
        return tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(
            f"cannot read the settings file {path}: {error.strerror or error}"
        ) from None
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def read_settings(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in a TOML file, not yet validated, and the other keys of a run's config.toml.

    Both are empty without a file.
    """
    settings = read_toml(path) if path else {}
    return settings, {
        name: settings.pop(name) for name in (*RUN_ONLY, "fingerprint") if name in settings
    }


def read_new_settings(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """`read_settings` for a new run, also from the config.toml of another one.

    What was found out for that run is found out again. A tokenizer.json lies beside the file.
    """
    settings, about = read_settings(path)
    settings = {name: value for name, value in settings.items() if name not in DERIVED}
    name = settings.get("tokenizer")
    if path and isinstance(name, str) and name.endswith(".json"):
        beside = path.parent / name
        settings["tokenizer"] = str(beside) if beside.is_file() else name
    return settings, about


def read_origin(about: Mapping[str, Any], path: Path | None) -> Origin | None:
    """What a settings file says about the run that it goes on from."""
    folder, freeze, new_fusion = (
        about.get("from"),
        about.get("freeze", False),
        about.get("new_fusion", False),
    )
    if folder is None and not freeze and not new_fusion:
        return None
    if (
        not isinstance(folder, str)
        or not isinstance(freeze, bool)
        or not isinstance(new_fusion, bool)
    ):
        raise ConfigError(
            f"{path}: from must be the folder of a run, and freeze and new_fusion true or false"
        )
    return Origin(folder, freeze, new_fusion)


def _alternatives(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _suggest_heads(width: int, heads: int) -> str:
    if width % 2:
        even = _suggest_heads(width + 1, heads)
        return f"width={width + 1} with {even}"
    return f"heads={next(h for h in range(min(heads, width // 2), 0, -1) if width % (2 * h) == 0)}"


def sentence(error: ValidationError, known: Iterable[str] = ()) -> str:
    """pydantic's report as one line a user can act on, with the names that are known."""
    unknown, parts = [], []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            unknown.append(repr(name))
        elif name:
            value = repr(item["input"])
            value = value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."
            parts.append(f"{name}: {words(item)} (got {value})")
        else:
            parts.append(words(item))
    if unknown:
        parts.append(f"unknown setting {', '.join(unknown)}")
        if names := ", ".join(known):
            parts.append(f"known settings: {names}")
    return "; ".join(parts)


def words(item: ErrorDetails) -> str:
    """What one field must be, from pydantic's report of it."""
    message = item["msg"].removeprefix("Value error, ")
    return WORDS[item["type"]].format(**item.get("ctx", {})) if item["type"] in WORDS else message
