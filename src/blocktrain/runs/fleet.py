"""The machines of a run as a TOML file describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from blocktrain.config import read_toml, words
from blocktrain.devices import DEVICES
from blocktrain.errors import ConfigError
from blocktrain.units import parse_bytes

MOST_MACHINES = 100_000


def _memory(value: Any) -> Any:
    """16e9, or "16 GB"."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _device(value: Any) -> Any:
    if isinstance(value, str) and value not in DEVICES:
        raise ValueError(
            f"must be one of {', '.join(DEVICES)}; for another one, name its peak as flops"
        )
    return value


Positive = Annotated[float, Field(gt=0)]


class FleetMachine(BaseModel):
    """One kind of machine. Its speed is measured (tokens_per_second), or follows from its peak."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    name: Annotated[str, Field(min_length=1, max_length=64)]
    count: Annotated[int, Field(ge=1, le=MOST_MACHINES)] = 1
    """How many there are."""
    memory: Annotated[int | None, BeforeValidator(_memory), Field(gt=0)] = None
    """Of the device that trains, as "16 GB"; by default that of the named device."""
    device: Annotated[str | None, BeforeValidator(_device)] = None
    """The device that trains."""
    flops: Positive | None = None
    """Its peak in operations a second, if it is not a known device."""
    tokens_per_second: Positive | None = None
    """Measured speed of training an independent block of this run; it wins over any peak."""
    up: Positive = 20.0
    """Mbit a second from the machine to the coordinator."""
    down: Positive = 100.0
    """Mbit a second from the coordinator to the machine."""
    hours: Annotated[float, Field(gt=0, le=24)] = 24.0
    """Hours a day that it takes part."""

    @property
    def has_gpu(self) -> bool:
        """Whether it trains in the memory of a GPU, apart from its own."""
        return bool(self.device and DEVICES[self.device].memory)

    def peak(self, dtype: str) -> float | None:
        """Operations a second; None if only its measured speed is known."""
        if self.flops is not None:
            return self.flops
        device = DEVICES.get(self.device or "")
        return None if device is None else device.peak(dtype)


class FleetFile(BaseModel):
    """All machines, and the coordinator's line."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    machine: Annotated[list[FleetMachine], Field(min_length=1, max_length=1000)]


def read_fleet(path: Path) -> list[FleetMachine]:
    """The machines in a fleet file; ConfigError says what is wrong with it, in one sentence."""
    content = read_toml(path)
    if not content.get("machine"):
        raise ConfigError(f"{path} names no machine; describe each kind in a table [[machine]]")
    try:
        machines = FleetFile.model_validate(content).machine
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error, content)}") from None
    for machine in machines:
        _require_known(path, machine)
    return [_with_memory(machine) for machine in machines]


def _require_known(path: Path, machine: FleetMachine) -> None:
    device = DEVICES.get(machine.device or "")
    if machine.memory is None and not (device and device.memory):
        raise ConfigError(
            f'{path}: machine {machine.name!r} needs its memory, as in memory = "16 GB"'
        )
    if machine.tokens_per_second is None and machine.peak("float32") is None:
        raise ConfigError(
            f"{path}: machine {machine.name!r} needs a device, its peak as flops, or a measured "
            "tokens_per_second"
        )


def _with_memory(machine: FleetMachine) -> FleetMachine:
    if machine.memory is not None or machine.device is None:
        return machine
    return machine.model_copy(update={"memory": DEVICES[machine.device].memory})


def _explain(error: ValidationError, content: dict[str, Any]) -> str:
    """The first problem, with the machine that it is about."""
    problem = error.errors(include_url=False)[0]
    place = problem["loc"]
    if place[:1] != ("machine",):
        return f"unknown key {place[0]!r}; a fleet has tables [[machine]] only"
    if len(place) < 2 or not isinstance(content["machine"], list):
        return "machines are tables: write [[machine]] above each one"
    table = content["machine"][int(place[1])]
    name = table.get("name") if isinstance(table, dict) else None
    machine = f"machine {name!r}" if name else f"machine {int(place[1]) + 1}"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(FleetMachine.model_fields)
        return f"{machine}: unknown key {place[-1]!r}; known: {known}"
    if problem["type"] == "missing":
        return f"{machine} needs a {place[-1]}"
    field = f" {place[2]}" if len(place) > 2 else ""
    return f"{machine}:{field} {words(problem)} (got {problem['input']!r})"
