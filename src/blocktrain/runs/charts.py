"""The charts of a report as inline SVG, and the facts of a run that they and its tables show."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from blocktrain.config import Config
from blocktrain.learning.train import REFERENCE
from blocktrain.runs.folder import block_name, valid_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = list[tuple[int, float]]  # steps made, loss

MOST_POINTS = 160  # of a curve, so that the page of a long run stays small
TALL = 3.8  # inches of the two charts that matter most
MOST_SCORES = 24  # of a block, as circles in the chart of the losses
MOST_ROWS = 24  # of one kind in a chart; the tables have them all
NUMBERED = re.compile(r"(block|euler)_(\d+)")

# Placeholders that become CSS variables, so that one drawing serves light and dark.
INK, MUTED, RULE, ACCENT = "#010101", "#020202", "#030303", "#040404"
BLOCKS = ("#050501", "#050502", "#050503", "#050504", "#050505", "#050506")
CSS = {INK: "currentColor", MUTED: "var(--muted)", RULE: "var(--rule)", ACCENT: "var(--accent)"} | {
    colour: f"var(--block-{n})" for n, colour in enumerate(BLOCKS, 1)
}
INKS = {
    "text.color": INK,
    "ytick.color": INK,
    "xtick.color": MUTED,
    "axes.labelcolor": MUTED,
    "grid.color": RULE,
}
# Text stays text: it takes the page's type, and can be searched and read aloud.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "blocktrain",
    "font.size": 12,
    "axes.axisbelow": True,
    **INKS,
}


@dataclass(frozen=True)
class ReportFacts:
    """What the run folder says, without values that are not usable numbers."""

    config: Config
    data: str
    result: Mapping[str, Any]
    ce: Mapping[str, float]
    curves: Mapping[int, Curve]
    scores: Mapping[int, Curve]
    """Of the valid split, while training."""
    ranges: Mapping[int, tuple[float, float]]

    @property
    def compose(self) -> str:
        """The composition that the model is used with."""
        return str(as_object(self.result.get("composition")).get("name", self.config.compose))

    def per_token(self, nats: float) -> float:
        """Nats per token, of a cross entropy in nats per byte."""
        ratio = as_object(self.result.get("corpus")).get("bytes_per_token")
        return nats * ratio if is_number(ratio) else nats

    def by_block(self, key: str) -> dict[int, float]:
        """A table of the result, by block."""
        table = as_object(self.result.get(key))
        numbers = range(self.config.blocks + 1)
        return {
            n: float(v)
            for n in numbers
            if is_number(v := table.get(block_name(n))) and math.isfinite(v)
        }

    @property
    def block_numbers(self) -> list[int]:
        """All blocks, then the reference if there is one."""
        reference = "reference" in self.ce or REFERENCE in self.curves
        return [*range(1, self.config.blocks + 1), *([REFERENCE] if reference else [])]

    def colour(self, index: int) -> str:
        """A block's colour in every chart; the fusion block has that of the composed model."""
        if index == REFERENCE:
            return INK
        return ACCENT if index > self.config.independent else BLOCKS[(index - 1) % len(BLOCKS)]

    def title(self, index: int) -> str:
        """A block's name in words."""
        return block_name(index).replace("-", " ") + (
            " (fusion)" if index > self.config.independent else ""
        )


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def predictor_label(name: str, compose: str) -> str:
    """A predictor's name in words."""
    if match := NUMBERED.fullmatch(name):
        return f"block {match[2]} alone" if match[1] == "block" else f"path after block {match[2]}"
    names = {
        "fuse": "fusion block",
        "euler": "Euler path",
        "marginal": "mean of several paths",
        "reference": "end-to-end reference",
    }
    return (
        f"composed ({names.get(compose, compose)})"
        if name == "composed"
        else names.get(name, name.replace("_", " "))
    )


def predictor_order(facts: ReportFacts) -> list[str]:
    """Predictors from single blocks to the whole; `composed` stands for its own composition."""
    ranks = {"pool": 2, "fuse": 3, "euler": 3, "marginal": 4, "composed": 5, "reference": 6}

    def rank(name: str) -> tuple[int, int]:
        match = NUMBERED.fullmatch(name)
        return (int(match[1] == "euler"), int(match[2])) if match else (ranks.get(name, 4), 0)

    return sorted((name for name in facts.ce if name != facts.compose), key=rank)


def short_number(number: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def valid_part(facts: ReportFacts) -> str:
    corpus = as_object(facts.result.get("corpus"))
    whole, part = corpus.get("valid_bytes"), corpus.get("evaluated_bytes")
    if isinstance(whole, int) and isinstance(part, int) and part < whole:
        return valid_size(whole, part)
    return "the valid split"


def draw_charts(facts: ReportFacts) -> list[str]:
    """All charts of a report as inline SVG; those without content are left out."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        drawn = [draw(facts) for draw in (_loss_chart, _ce_chart, _range_chart, _cost_chart)]
    return [chart for chart in drawn if chart]


def _panels(rows: int, columns: int = 1, *, least: float = 0) -> list[Axes]:
    """Empty panels, at least `least` inches high, without frames and tick marks.

    `rows` is the number of bars in a panel; 0 is for curves.
    """
    from matplotlib.figure import Figure

    # The width is one column of the page at 72 points an inch, so that type keeps its size there.
    figure = Figure(figsize=(5.6, max(0.8 + 0.34 * rows, least)), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, columns, squeeze=False, sharey=True)[0])
    for axes in panels:
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, pad=6, which="both")
        axes.grid(axis="x" if rows else "y")
        if rows:
            axes.set_ylim(rows - 0.4, -0.6)
    return panels


def _chart(axes: Axes, name: str, title: str, note: str) -> str:
    """The figure as inline SVG, with title and note. The same content gives the same bytes."""
    buffer, figure = io.StringIO(), cast("Figure", axes.figure)
    figure.savefig(
        buffer,
        format="svg",
        transparent=True,
        metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
    )
    svg = re.sub(
        r'(id="|url\(#|href="#)', rf"\g<1>{name}-", buffer.getvalue()
    )  # two charts may hold the same shapes
    for colour, variable in CSS.items():
        svg = svg.replace(colour, variable)
    svg = svg[svg.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{html.escape(f"Chart: {title}. {note}")}"', 1
    )
    words = f"<figcaption><h3>{html.escape(title)}</h3>{html.escape(note)}</figcaption>"
    return f'<figure id="{name}">{words}{svg}</figure>'


def _loss_chart(facts: ReportFacts) -> str:
    if not facts.curves:
        return ""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    (axes,) = _panels(0, least=TALL)
    axes.set_yscale("log")
    legend = _pick_evenly(list(facts.curves), 8)
    for index, curve in facts.curves.items():
        steps, losses = _smooth(curve)
        dashes = (
            "--"
            if index == REFERENCE
            else "-."
            if len(BLOCKS) < index <= facts.config.independent
            else "-"
        )
        label = facts.title(index) if index in legend else None
        axes.plot(
            steps,
            losses,
            dashes,
            color=facts.colour(index),
            linewidth=1.6,
            label=label,
            marker="o" if len(curve) == 1 else "",
        )
    for index, curve in facts.scores.items():
        points = np.array(_pick_evenly(curve, MOST_SCORES)).T.clip(1e-4)
        axes.plot(*points, "o", markersize=5, markerfacecolor="none", color=facts.colour(index))
    low, high = axes.get_ylim()
    subs = (1, 2, 5) if high > 15 * low else (1, 1.5, 2, 3, 5, 7)
    axes.yaxis.set_major_locator(
        LogLocator(subs=subs) if high > 3 * low else MaxNLocator(5, steps=[1, 2, 5, 10])
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.set(xlabel="steps", xlim=(0, None))
    axes.legend(frameon=False)
    note = "Training cross entropy in nats per token, smoothed; log axis."
    if facts.scores:
        note += " Circles: on the valid split."
    if facts.config.objective == "denoise":
        note += (
            " Each block is measured at its own noise levels, "
            "so a lower curve is not a better block."
        )
    return _chart(axes, "loss", "Loss while training", note)


def _smooth(curve: Curve) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Means over sections, then over neighbours; a loss of 0 stays on the log axis."""
    means = np.stack(
        [part.mean(0) for part in np.array_split(np.array(curve), min(MOST_POINTS, len(curve)))]
    )
    reach = len(means) // 40
    losses = np.pad(means[:, 1], reach, mode="edge")
    return means[:, 0], np.convolve(
        losses, np.full(2 * reach + 1, 1 / (2 * reach + 1)), "valid"
    ).clip(1e-4)


def _ce_chart(facts: ReportFacts) -> str:
    finite = [name for name in predictor_order(facts) if math.isfinite(facts.ce[name])]
    names = [
        n
        for kind in ("block_", "euler_")
        for n in _pick_evenly([f for f in finite if f.startswith(kind)], MOST_ROWS)
    ]
    names += [name for name in finite if not NUMBERED.fullmatch(name)]
    if not names:
        return ""
    (axes,) = _panels(len(names), least=TALL)
    for row, name in enumerate(names):
        match = NUMBERED.fullmatch(name)
        colour = (
            facts.colour(int(match[2]))
            if match
            else {"composed": ACCENT, "reference": INK}.get(name, MUTED)
        )
        bits = facts.ce[name] / math.log(2)
        axes.plot(bits, row, "o", color=colour, markersize=9 if name == "composed" else 7)
        axes.annotate(
            f"{bits:.3f}",
            (bits, row),
            (9, 0),
            textcoords="offset points",
            va="center",
        )
    axes.axvline(facts.ce["composed"] / math.log(2), color=ACCENT, linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(names)), [predictor_label(name, facts.compose) for name in names])
    axes.margins(x=0.2)
    axes.locator_params(axis="x", nbins=5)
    return _chart(
        axes,
        "ce",
        "Cross entropy on text never seen",
        f"Bits per byte on {valid_part(facts)}; further left is better.",
    )


def _range_chart(facts: ReportFacts) -> str:
    from matplotlib.ticker import LogLocator, NullLocator

    blocks = _pick_evenly(list(facts.ranges), MOST_ROWS)
    if not blocks:
        return ""
    (axes,) = _panels(len(blocks))
    for row, n in enumerate(blocks):
        low, high = facts.ranges[n]
        axes.barh(row, high - low, left=low, height=0.42, color=facts.colour(n))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(blocks)), [facts.title(n) for n in blocks])
    return _chart(
        axes,
        "ranges",
        "Noise levels of the blocks",
        "Range of sigma that each block learns to denoise; log axis.",
    )


def _cost_chart(facts: ReportFacts) -> str:
    memory, parameters = facts.by_block("peak_mb"), facts.by_block("parameters")
    note = "interpreter and libraries included"
    if facts.ranges:  # an even number of charts fills the page
        return _bars(
            facts,
            "cost",
            "What each process took",
            f"Peak resident memory, {note}.",
            {"MB": memory, "parameters": parameters},
        )
    peak = _bars(
        facts, "memory", "Memory of each process", f"Peak resident MB, {note}.", {"": memory}
    )
    return peak + _bars(
        facts,
        "parameters",
        "Parameters of each block",
        "Numbers that are learned.",
        {"": parameters},
    )


def _bars(
    facts: ReportFacts, name: str, title: str, note: str, tables: Mapping[str, Mapping[int, float]]
) -> str:
    """Bars from zero, a row per block, a panel per table."""
    blocks = _pick_evenly(
        [n for n in facts.block_numbers if any(n in values for values in tables.values())],
        MOST_ROWS,
    )
    if not blocks:
        return ""
    panels = _panels(len(blocks), len(tables))
    for axes, (unit, values) in zip(panels, tables.items(), strict=True):
        for row, n in enumerate(blocks):
            if n in values:
                axes.barh(row, values[n], height=0.42, color=facts.colour(n))
                axes.annotate(
                    short_number(values[n]),
                    (values[n], row),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                )
        axes.set(
            xlabel=unit,
            xticks=[],
            xlim=(0, (1 + 0.2 * len(tables)) * max([*values.values(), 1e-9])),
        )
    panels[0].set_yticks(range(len(blocks)), [facts.title(n) for n in blocks])
    return _chart(panels[0], name, title, note)


def _pick_evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items: the first, the last, and some evenly between them."""
    return [
        items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    ]
