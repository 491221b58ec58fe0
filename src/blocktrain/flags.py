"""Settings as flags of commands: what is not given comes from a file, a preset or the defaults."""

from __future__ import annotations

from typing import Annotated, Any, Optional

from cyclopts import Group, Parameter
from pydantic import BaseModel, Field, create_model

from blocktrain.config import Config
from blocktrain.coordination.policy import Policy


def _optional(name: str, model: type[BaseModel]) -> Any:
    """A model with the same fields, each optional."""
    fields = {
        key: (Optional[field.annotation], Field(default=None, description=f"{field.description} (default {field.default})"))  # noqa: UP045
        for key, field in model.model_fields.items()
    }
    return create_model(name, **fields)  # type: ignore[call-overload]


def flags_of(name: str, title: str, model: type[BaseModel]) -> Any:
    """The annotation of a command's parameter that takes all fields of a model as flags."""
    return Annotated[Optional[_optional(name, model)], Parameter(name="*", group=Group(title), negative=())]  # noqa: UP045


Settings = flags_of("Flags", "Settings (also as keys of --config FILE.toml)", Config)
Coordination = flags_of("PolicyFlags", "Coordination (also in the table coordination of --config FILE.toml)", Policy)
Token = Annotated[str, Parameter(env_var="BLOCKTRAIN_TOKEN", help="The join token (or the environment's BLOCKTRAIN_TOKEN).")]
Json = Annotated[bool, Parameter(name="--json", help="Print the result as JSON on stdout.", negative=())]


def given(settings: Any) -> dict[str, Any]:
    """Only the settings that were named on the command line."""
    return {} if settings is None else settings.model_dump(exclude_none=True)


def at_least(least: float) -> Parameter:
    """A number that must not be smaller."""

    def check(_: object, value: float) -> None:
        if value < least:
            raise ValueError(f"must be at least {least}")

    return Parameter(validator=check)
