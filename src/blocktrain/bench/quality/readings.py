"""The paper's text leaves choices open. Each reading of it is one set of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blocktrain.config import Config
from blocktrain.errors import ConfigError

TEXT: dict[str, Any] = {
    "objective": "denoise",
    "skip": "edm",
    "compose": "euler",
    "start": "noise",
}
"""What its text says, word for word."""
EXACT = {**TEXT, "skip": "exact"}
SIGMA_MIN_3 = {"sigma_min": 3.0}
CURVES = {"edges-paper": TEXT, "edges-exact": EXACT}
"""What a pilot trains, by the name of its job."""


@dataclass(frozen=True)
class Reading:
    """What differs from the defaults. All blocks but those of a chain are independent."""

    settings: Mapping[str, Any]
    deep: bool = False
    """A block less, and each twice as deep: 3 blocks of 4 layers at scale standard, where the other
    readings have 4 of 2. It is compared with an end-to-end model of as many layers."""
    unit_deviation: bool = False
    """sigma_data is what a coordinate of a unit row deviates by."""
    edges: str = ""
    """The pilot whose measured loss cuts the noise range; without one, it is cut by mass."""
    chain: bool = False
    """Blocks train one after another, each on the z that those before it produce."""

    @property
    def starts(self) -> tuple[Literal["noise", "zero"], ...]:
        """Where its path is started. A block that trained on a path knows only that one's start."""
        return ("zero",) if self.settings.get("training_z") == "path" else ("noise", "zero")

    def blocks(self, base: Config) -> int:
        """How many blocks it has."""
        return max(base.blocks - 1, 1) if self.deep else base.blocks

    def config(self, base: Config, edges: str = "mass") -> Config:
        """Its settings in full, with the levels that a pilot found."""
        changes: dict[str, Any] = {**self.settings, "noise_edges": edges}
        if self.deep:
            changes |= {"blocks": self.blocks(base), "layers_per_block": 2 * base.layers_per_block}
        if self.unit_deviation:
            changes["sigma_data"] = base.z_width**-0.5
        return base.replace(**changes)


ON_PATH = {**EXACT, "training_z": "path", "start": "zero"}
READINGS = {
    "paper": Reading(TEXT),
    "paper_sigma_min_3": Reading({**TEXT, **SIGMA_MIN_3}),
    "paper_sigma_data": Reading(TEXT, unit_deviation=True),
    "paper_edges": Reading(TEXT, edges="edges-paper"),
    "paper_deep": Reading(TEXT, deep=True),
    "paper_deep_both": Reading({**TEXT, **SIGMA_MIN_3}, deep=True, unit_deviation=True),
    "exact": Reading(EXACT),
    "exact_random": Reading({**EXACT, "noise_scale": "random"}),
    "exact_edges": Reading(EXACT, edges="edges-exact"),
    "exact_deep": Reading(EXACT, deep=True),
    "exact_path": Reading(ON_PATH),
    "exact_chain": Reading(ON_PATH, chain=True),
}
"""`paper` and `exact` are also variants of the bench without readings, which trains the same."""
DEEP = Reading({"compose": "pool"}, deep=True)
"""Plain blocks of the depth of deep readings, and the end-to-end model of as many layers."""


def require_readings(names: Sequence[str]) -> tuple[str, ...]:
    """The readings of these names; `all` stands for all."""
    chosen = tuple(READINGS) if "all" in names else tuple(dict.fromkeys(names))
    if unknown := [name for name in chosen if name not in READINGS]:
        raise ConfigError(
            f"--readings {unknown[0]}: there is no such reading; choose all, or some of "
            f"{', '.join(READINGS)}"
        )
    return chosen
