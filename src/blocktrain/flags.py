"""Settings as flags of commands: what is not given comes from a file, a preset or the defaults."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, Optional

from cyclopts import CycloptsError, Group, Parameter
from pydantic import BaseModel, Field, ValidationError, create_model

from blocktrain.config import Config, sentence
from blocktrain.coordination.policy import Policy


def _optional(name: str, model: type[BaseModel], without: Collection[str]) -> Any:
    """A model with the same fields but some, each optional."""
    fields = {
        key: (Optional[field.annotation], Field(default=None, description=f"{field.description} (default {field.default})"))  # noqa: UP045
        for key, field in model.model_fields.items()
        if key not in without
    }
    return create_model(name, **fields)  # type: ignore[call-overload]


def flags_of(name: str, title: str, model: type[BaseModel], without: Collection[str] = ()) -> Any:
    """The annotation of a command's parameter that takes the fields of a model as flags."""
    return Annotated[Optional[_optional(name, model, without)], Parameter(name="*", group=Group(title), negative=())]  # noqa: UP045


Settings = flags_of("Flags", "Settings (also as keys of --config FILE.toml)", Config)
VARIES = ("seed", "objective", "skip", "compose", "data_order", "tail", "tail_share", "tail_sigma_min")
Varied = flags_of("VariedFlags", "Settings of all variants (by default those of --scale; others as in train)", Config, without=VARIES)
Coordination = flags_of("PolicyFlags", "Coordination (also in the table coordination of --config FILE.toml)", Policy)
Token = Annotated[str, Parameter(env_var="BLOCKTRAIN_TOKEN", help="The join token (or the environment's BLOCKTRAIN_TOKEN).")]
Json = Annotated[bool, Parameter(name="--json", help="Print the result as JSON on stdout.", negative=())]


def given(settings: Any) -> dict[str, Any]:
    """Only the settings that were named on the command line."""
    return {} if settings is None else settings.model_dump(exclude_none=True)


def at_least(least: float, most: float = math.inf) -> Parameter:
    """A number that must not be smaller than the one, nor larger than the other."""

    def check(_: object, value: float) -> None:
        if not value >= least:  # also where it is no number
            raise ValueError(f"must be at least {least}")
        if value > most:
            raise ValueError(f"must be at most {most}")

    return Parameter(validator=check)


def refused(error: CycloptsError) -> str:
    """What is wrong with a command line, as one sentence."""
    cause = error.__cause__
    return sentence(cause) if isinstance(cause, ValidationError) else " ".join(str(error).split())
