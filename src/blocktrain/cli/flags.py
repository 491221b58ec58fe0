"""Flags that commands share, settings as flags, and sentences for a wrong command line."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

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
from pydantic import BaseModel, Field, ValidationError, create_model

from blocktrain.config import DERIVED, Config, sentence
from blocktrain.coordinator.policy import Policy


def _optional(name: str, model: type[BaseModel], without: Collection[str]) -> Any:
    """A model with the same fields, except `without`, each optional."""
    fields = {
        key: (
            Optional[field.annotation],  # noqa: UP045
            Field(default=None, description=f"{field.description} (default {field.default})"),
        )
        for key, field in model.model_fields.items()
        if key not in without
    }
    return create_model(name, **fields)  # type: ignore[call-overload]


def flags_of(name: str, title: str, model: type[BaseModel], without: Collection[str] = ()) -> Any:
    """The annotation of a command's parameter that takes the fields of a model as flags."""
    return Annotated[
        Optional[_optional(name, model, without)],  # noqa: UP045
        Parameter(name="*", group=Group(title), negative=()),
    ]


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


SettingsFlags = flags_of(
    "Flags", "Settings (also as keys of --config FILE.toml)", Config, without=DERIVED
)
VARIES = (
    *DERIVED,
    "seed",
    "objective",
    "skip",
    "compose",
    "data_order",
    "tail",
    "tail_share",
    "tail_sigma_min",
)
Varied = flags_of(
    "VariedFlags",
    "Settings of all variants (by default those of --scale; others as in train)",
    Config,
    without=VARIES,
)
Coordination = flags_of(
    "PolicyFlags", "Coordination (also in the table coordination of --config FILE.toml)", Policy
)
Token = Annotated[
    str,
    Parameter(
        env_var="BLOCKTRAIN_TOKEN", help="The join token (or the environment's BLOCKTRAIN_TOKEN)."
    ),
]
Ca = Annotated[
    Path | None,
    Parameter(
        help="Certificate (PEM) that signed the coordinator's own, if it is not a public one."
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
EvalBytes = Annotated[
    int | None,
    at_least(1),
    Parameter(
        help="Evaluate on the first N bytes of the valid split, to save time; by default on all. "
        "Figures on different lengths are not comparable."
    ),
]
Yes = Annotated[bool, Parameter(negative=())]
Json = Annotated[
    bool, Parameter(name="--json", help="Print the result as JSON on stdout.", negative=())
]


def named_settings(settings: Any) -> dict[str, Any]:
    """Only the settings that were named on the command line."""
    return {} if settings is None else settings.model_dump(exclude_none=True)


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
