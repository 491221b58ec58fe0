"""One dial: `--size 124M` chooses the settings of a model of about that many parameters.

Each choice is a rule, a function of the number of parameters P. A setting that is named wins, and
what follows from it is chosen to fit: with more blocks or a larger vocabulary the width shrinks,
so that the model still has about P parameters. A size is no setting of a run: only what it
chooses is. docs/guides/sizes.md explains the rules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import log2
from typing import Any

from blocktrain.config import PRESETS, Config, make_config
from blocktrain.errors import ConfigError
from blocktrain.shapes import model_parameters

SIZES = {
    "2M": 2e6,
    "10M": 10e6,
    "50M": 50e6,
    "124M": 124e6,
    "350M": 350e6,
    "1B": 1e9,
    "7B": 7e9,
}
"""Parameters of all blocks together."""
SMALLEST = SIZES["2M"]  # the shape at which the method was tuned
TUNED_WIDTH = 128
# The rates that measured best at that width.
RATES = {
    "muon": {"learning_rate": 6e-3, "fusion_learning_rate": 2e-3, "reference_learning_rate": 6e-3},
    "adamw": {
        "learning_rate": 3.5e-3,
        "fusion_learning_rate": 1e-3,
        "reference_learning_rate": 2e-3,
    },
}
# Tokens that a block reads for each of its parameters: it is a language model of its own. The
# smallest sizes are there to try things out, and need not wait for their optimum.
FEWEST_TOKENS, MOST_TOKENS = 4, 20
MICRO_TOKENS = 4096  # computed at once; more would take memory and save no time
FARTHEST = 0.25  # share of the size by which other named settings may miss it


def make_sized_config(settings: Mapping[str, Any], preset: str | None = None) -> Config:
    """Validated settings as people name them. The key `size` stands for what it chooses."""
    return make_config(expand_size(settings, preset), preset)


def expand_size(settings: Mapping[str, Any], preset: str | None = None) -> dict[str, Any]:
    """The settings with those that their `size` chooses; named ones and the preset's win."""
    named = {name: value for name, value in settings.items() if name != "size"}
    if settings.get("size") is None:
        return named
    winners = {**PRESETS.get(preset or "", {}), **named}
    chosen = size_settings(settings["size"], winners)
    return {name: value for name, value in chosen.items() if name not in winners} | named


def size_settings(size: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """What a size chooses, to fit the named settings."""
    P = parse_size(size)
    chosen: dict[str, Any] = {
        "tokenizer": f"bpe:{_power_of_two(P**0.5, 2048, 32768)}",
        "context": _power_of_two(128 * (P / SMALLEST) ** 0.5, 128, 2048),
        "blocks": 4 if P < 100e6 else 8 if P < 5e9 else 16,
    }
    blocks = _with_any_width(chosen, named).blocks
    chosen["layers_per_block"] = max(1, round(8 * (P / SMALLEST) ** (1 / 6) / blocks))
    chosen |= _choose_width(size, chosen, named)
    context = make_config({**chosen, **named}).context
    chosen["batch"] = _power_of_two(2048 * (P / SMALLEST) ** (2 / 3) / context, 1, 65536)
    batch = make_config({**chosen, **named}).batch
    if (rows := max(1, MICRO_TOKENS // context)) < batch:
        chosen["micro_batch"] = rows
    tokens = min(MOST_TOKENS, FEWEST_TOKENS * (P / SMALLEST) ** 0.4) * P
    chosen["steps"] = max(1, int(_round(tokens / blocks / (batch * context))))
    config = make_config({**chosen, **named})
    return {**chosen, "warmup": max(50, config.steps // 100), **_rates(config)}


def parse_size(size: str) -> float:
    """The number of parameters that a size stands for."""
    try:
        return SIZES[str(size).strip().upper()]
    except KeyError:
        *others, last = SIZES
        raise ConfigError(f"size: must be {', '.join(others)} or {last} (got {size!r})") from None


def is_near_size(config: Config, size: str) -> bool:
    """Whether the model could be of this size."""
    return abs(model_parameters(config) / parse_size(size) - 1) <= FARTHEST


def _with_any_width(chosen: Mapping[str, Any], named: Mapping[str, Any]) -> Config:
    """The settings, checked, before the width is known."""
    return make_config(
        {**chosen, **{k: v for k, v in named.items() if k not in ("width", "heads")}}
    )


def _choose_width(size: str, chosen: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The width that comes nearest to the size, and its heads."""

    def settings(width: int) -> dict[str, Any]:
        return {**chosen, "width": width, "heads": _heads(width), **named}

    def parameters(width: int) -> int:
        return model_parameters(make_config(settings(width)))

    if "width" in named:
        width = make_config({**chosen, "heads": 1, "width": named["width"]}).width
        return {"heads": _heads(width)}
    P = parse_size(size)
    heads = named.get("heads", 1)
    parts = 2 * heads if isinstance(heads, int) and heads > 0 else 2
    widths = [w for w in _widths() if w % parts == 0] or [parts]
    place = bisect_left(widths, P, key=parameters)
    width = min(widths[max(0, place - 1) : place + 1], key=lambda w: abs(parameters(w) - P))
    if not is_near_size(make_config(settings(width)), size):
        raise ConfigError(
            f"size={size} cannot be met with these settings: the nearest model has "
            f"{parameters(width):,} parameters; "
            "name a width, or change blocks, layers_per_block or tokenizer"
        )
    return {"width": width, "heads": _heads(width)}


def _widths() -> list[int]:
    """Widths in steps of about a thirtieth, multiples of a power of two, that heads divide."""
    return [
        width
        for low in (64, 128, 256, 512, 1024, 2048, 4096, 8192)
        for width in range(low, 2 * low, max(8, low // 16))
    ] + [16384]


def _heads(width: int) -> int:
    """Heads about 64 wide, 32 in narrow models, that divide the width into even parts."""
    wanted = width / (32 if width < 512 else 64 if width < 2048 else 128)
    fitting = [h for h in range(1, 257) if width % (2 * h) == 0]
    return min(fitting or [1], key=lambda h: abs(log2(h / wanted)))


def _rates(config: Config) -> dict[str, float]:
    """The tuned rates at another width; no narrower model gets more.

    AdamW moves every weight by about the rate, so the change of a sum over the width grows with
    the width. A step of Muon grows with its root only.
    """
    narrower = min(1.0, TUNED_WIDTH / config.width)
    factors = {"adamw": narrower, "muon": narrower**0.5}
    optimizers = dict.fromkeys(RATES["muon"], config.optimizer)
    optimizers["fusion_learning_rate"] = config.fusion_optimizer
    return {name: _round(RATES[kind][name] * factors[kind]) for name, kind in optimizers.items()}


def _power_of_two(value: float, least: int, most: int) -> int:
    """The nearest one by ratio."""
    return min(most, max(least, 2 ** round(log2(value))))


def _round(value: float) -> float:
    """To two digits."""
    return float(f"{value:.1e}")
