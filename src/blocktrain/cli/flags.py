"""Flags that commands share, settings as flags, and sentences for a wrong command line."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar, get_type_hints

from cyclopts import (
    Argument,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnusedCliTokensError,
)
from cyclopts import Token as Word
from cyclopts import ValidationError as WrongValue
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from blocktrain.config import DERIVED, Config, Origin, sentence, words
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import ConfigError
from blocktrain.sizes import SIZES

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

HELP_ALL = "--help-all"
Flags = TypeVar("Flags")


class RarePanel:
    """Formats a panel of settings that few people change: one line, unless --help-all is given."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        from cyclopts.help.formatters import DefaultFormatter

        if HELP_ALL in sys.argv:
            DefaultFormatter()(console, options, panel)
        else:
            console.print(f"{panel.title}: {len(panel.entries)} more with {HELP_ALL}\n")


def rare(title: str) -> Group:
    """A group of flags that --help leaves to --help-all."""
    return Group(title, help_formatter=RarePanel(), sort_key=2)


RARE_FLAGS = rare("Flags that few people need")


def flags_of(
    name: str,
    model: type[BaseModel],
    groups: Mapping[str, Group],
    *,
    default: Group,
    without: Collection[str] = (),
    first: Mapping[str, Any] | None = None,
) -> Any:
    """The annotation of a command's parameter that takes the fields of a model as flags.

    Each is optional. They stand in their groups, the others in the group `default`; `first` are
    fields that the model does not have.
    """
    fields = {
        key: (
            Annotated[Optional[field.annotation], Parameter(group=groups.get(key, default))],  # noqa: UP045
            Field(default=None, description=f"{field.description} (default {field.default})"),
        )
        for key, field in model.model_fields.items()
        if key not in without
    }
    optional: Any = create_model(name, **(first or {}), **fields)  # type: ignore[call-overload]
    return Annotated[Optional[optional], Parameter(name="*", negative=())]  # noqa: UP045


def at_least(least: float, most: float = math.inf) -> Parameter:
    """A number from `least` to `most`."""

    def check(_: object, value: float | None) -> None:
        if value is None:
            return
        if not value >= least:  # NaN is refused, too
            raise ValueError(f"must be at least {least}")
        if value > most:
            raise ValueError(f"must be at most {most}")

    return Parameter(validator=check, converter=_number)


def _number(kind: type, tokens: Sequence[Word]) -> float:
    """The number as it is written: 3.9 is not rounded to a whole number."""
    try:
        return float(tokens[0].value) if kind is float else int(tokens[0].value)
    except ValueError:
        raise ValueError(
            "must be a number" if kind is float else "must be a whole number"
        ) from None


COMMON = (
    "tokenizer",
    "blocks",
    "context",
    "batch",
    "steps",
    "learning_rate",
    "seed",
    "device",
)
"""The settings that people change; --size chooses the rest."""
_SETTINGS = Group("Settings (also as keys of --config FILE.toml)", sort_key=0)
_RARE_SETTINGS = rare("Settings that --size chooses or few people change")
_SIZE = (
    Annotated[Optional[str], Parameter(group=_SETTINGS)],  # noqa: UP045
    Field(
        default=None,
        description="Parameters of the whole model: "
        f"{', '.join(SIZES)}. It chooses width, layers, heads, blocks, context, tokenizer, batch, "
        "steps and rates by rules; a setting that is named wins.",
    ),
)
SettingsFlags = flags_of(
    "Flags",
    Config,
    dict.fromkeys(COMMON, _SETTINGS),
    default=_RARE_SETTINGS,
    without=DERIVED,
    first={"size": _SIZE},
)
VARIES = (
    *DERIVED,
    "seed",
    "objective",
    "skip",
    "compose",
    "data_order",
    "noise_edges",
    "noise_scale",
    "start",
    "training_z",
    "tail",
    "tail_share",
    "tail_sigma_min",
)
Varied = flags_of(
    "VariedFlags",
    Config,
    {},
    default=Group("Settings of all variants (by default those of --scale; others as in train)"),
    without=VARIES,
)
_COORDINATION = Group(
    "Coordination (also in the table coordination of --config FILE.toml)", sort_key=1
)
Coordination = flags_of(
    "PolicyFlags",
    Policy,
    dict.fromkeys(
        ("compression", "version_compression", "replicas", "task_seconds", "tokens"), _COORDINATION
    ),
    default=rare("Coordination that few people change"),
)
Token = Annotated[
    str,
    Parameter(
        env_var="BLOCKTRAIN_TOKEN",
        help="The join token (or the environment's BLOCKTRAIN_TOKEN).",
        allow_leading_hyphen=True,  # a random one may begin with it
    ),
]
Ca = Annotated[
    Path | None,
    Parameter(
        help="Certificate (PEM) that signed the coordinator's own, if it is not a public one."
    ),
]
DeviceName = Annotated[
    str,
    Parameter(
        help="cpu, cuda, cuda:N, mps or auto (the best there is). The same seed gives the same "
        "text on devices of one kind."
    ),
]
Threads = Annotated[
    int,
    at_least(1),
    Parameter(
        help="Threads that compute. One is the fastest on a busy machine; more help large models "
        "on idle cores, and may change the last bits of a result."
    ),
]
EVAL_ADVICE = "use a longer text, a larger --eval-bytes or a smaller --context"
EvalBytes = Annotated[
    int | None,
    at_least(1),
    Parameter(
        help="Evaluate on the first N bytes of the valid split, to save time; by default on all. "
        "Figures on different lengths are not comparable."
    ),
]
AllowHost = Annotated[
    tuple[str, ...],
    Parameter(
        help="A DNS name under which others reach this server (may be repeated). Without a secret "
        "it answers to addresses, localhost and its own name only; with one to every name, until "
        "names are allowed.",
        negative=(),
        group=RARE_FLAGS,
    ),
]
Track = Annotated[
    tuple[Literal["tensorboard", "wandb", "mlflow"], ...],
    Parameter(
        help="Also send losses and scores to tensorboard, wandb or mlflow (may be repeated). "
        "Each needs the extra of its name: pip install 'blocktrain[wandb]'.",
        negative=(),
        group=RARE_FLAGS,
    ),
]
ScoreBytes = Annotated[
    int,
    at_least(0),
    Parameter(
        help="Bytes of the valid part on which a second process scores new versions while the run "
        "goes on; 0 switches that off."
    ),
]
ScoreSeconds = Annotated[
    float,
    at_least(0),
    Parameter(help="Least seconds from one such score to the next."),
]
Yes = Annotated[bool, Parameter(negative=())]
Json = Annotated[
    bool, Parameter(name="--json", help="Print the result as JSON on stdout.", negative=())
]


@dataclass(frozen=True)
class BeginFlags:
    """What a run begins with: its text, and the run that it goes on from."""

    data: Annotated[
        str | None,
        Parameter(
            help="Text to train on: stdlib (the default), wikitext2, wikitext103; the path of a "
            "text file, .jsonl or .parquet, also with .gz or .zst, or of a folder of them "
            "(PATH:COLUMN names the column); hf:NAME[:CONFIG[:SPLIT[:COLUMN]]] on the Hugging Face "
            "hub; mix.toml, a weighted mixture; or a folder that `blocktrain data` has prepared. "
            "With --from, by default the text of that run."
        ),
    ] = None
    from_: Annotated[
        Path | None,
        Parameter(
            name="--from",
            help="Begin with the weights of a trained run: the folder of a finished `train`, of a "
            "`pull`, or of a coordinator whose run is finished. Its settings are the defaults; "
            "larger --blocks adds new blocks.",
        ),
    ] = None
    freeze: Annotated[
        bool,
        Parameter(
            help="With --from: leave its blocks as they are, and train only added blocks and the "
            "fusion block.",
            negative=(),
        ),
    ] = False
    new_fusion: Annotated[
        bool,
        Parameter(help="With --from: begin with a new fusion block.", negative=()),
    ] = False

    def origin(self, of_file: Origin | None, out: Path | None) -> Origin | None:
        """The run to go on from, by the flags or by a settings file."""
        folder = of_file.folder if of_file and self.from_ is None else self.from_
        freeze = self.freeze or (of_file is not None and of_file.freeze)
        new_fusion = self.new_fusion or (of_file is not None and of_file.new_fusion)
        if folder is None:
            if freeze or new_fusion:
                raise ConfigError("--freeze and --new-fusion need --from RUN")
            return None
        scheme, separator, rest = str(folder).partition(":/")
        if separator and scheme in ("http", "https"):
            raise ConfigError(
                "--from takes a run folder: fetch that model first with `blocktrain pull "
                f"{scheme}://{rest.lstrip('/')} --out RUN`, then use --from RUN"
            )
        folder = Path(folder).resolve()
        if out is not None and out.resolve() in (folder, folder / "coordinator"):
            raise ConfigError(
                f"a run cannot go on from its own folder: name another one than {out} with --out"
            )
        return Origin(str(folder), freeze, new_fusion)


def read_flags(kind: type[Flags], values: Mapping[str, Any]) -> Flags:
    """Flags that a script names, with the checks of the command line."""
    hints, checked = get_type_hints(kind, include_extras=True), {}
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(f"unknown option {name!r}; known: {', '.join(hints)}")
        hint = hints[name]
        try:
            checked[name] = TypeAdapter(hint).validate_python(value)
            for check in _validators(hint):
                check(hint, checked[name])
        except ValidationError as error:
            raise ConfigError(f"{name}: {words(error.errors()[0])} (got {value!r})") from None
        except ValueError as error:
            raise ConfigError(f"{name}: {error} (got {value!r})") from None
    return kind(**checked)


def _validators(hint: Any) -> list[Callable[[object, Any], None]]:
    found: list[Any] = [part.validator for part in hint.__metadata__ if type(part) is Parameter]
    return [check for validators in found for check in validators]


def named_settings(settings: Any) -> dict[str, Any]:
    """Only the settings that were named on the command line."""
    return {} if settings is None else settings.model_dump(exclude_none=True)


def named_text(flag: str | None, of_file: Mapping[str, Any], default: str | None) -> str:
    """The text to train on, by the flag, by a settings file, or as before."""
    text = of_file.get("data", default) if flag is None else flag
    if not isinstance(text, str):
        raise ConfigError("name the text to train on with --data")
    return text


def explain(error: CycloptsError) -> str:
    """What is wrong with a command line, in one sentence."""
    cause = error.__cause__
    if isinstance(cause, ValidationError):
        return sentence(cause)
    match error:
        case UnusedCliTokensError(unused_tokens=[*extra]):
            return f"unexpected argument: {shlex.join(extra)}; see --help"
        case MissingArgumentError(keyword=str(name)):
            return f"{name} needs a value; see --help"
        case MissingArgumentError(argument=Argument() as missing):
            name = missing.name
            label = name if missing.index is None else name.removeprefix("--").upper()
            return f"{label} is missing; see --help"
        case WrongValue(
            argument=Argument(tokens=[Word() as token, *_]), exception_message=str(problem)
        ):
            return f"{token.keyword or token.value}: {problem} (got {token.value})"
        case CoercionError(token=Word() as token) if isinstance(cause, ValueError):
            return f"{token.keyword or token.value}: {cause} (got {token.value})"
    return " ".join(str(error).split())
