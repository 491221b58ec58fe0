"""A finished run as one page: report.html, with its charts inside. It opens without a network."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.files import write_atomic
from blocktrain.runs.charts import (
    Curve,
    ReportFacts,
    as_object,
    draw_charts,
    is_number,
    predictor_label,
    predictor_order,
    short_number,
    valid_part,
)
from blocktrain.runs.folder import open_run, read_json
from blocktrain.terminal import perplexity
from blocktrain.watch.feed import read_events

if TYPE_CHECKING:
    pass


def write_report(folder: Path) -> Path:
    """Write report.html of a finished run, and return its path."""
    facts = _gather(folder)
    name = folder.resolve().name
    where = (
        name if folder.is_absolute() or folder == Path() else str(folder)
    )  # a page that is passed on must not show a home folder
    sample = as_object(facts.result.get("sample"))
    words = {
        "name": name,
        "kicker": _kicker(facts),
        "prompt": _visible(str(sample.get("prompt", ""))),
        "text": _visible(str(sample.get("text", "(this run has no sample)"))),
        "temperature": str(sample.get("temperature", "unknown")),
        "run": shlex.quote(where),
        "data": ""
        if Path(facts.data).is_absolute()
        else f" --data {shlex.quote(facts.data)}",  # an absolute path is of no use elsewhere
        "fingerprint": facts.config.fingerprint,
        "composition": str(as_object(facts.result.get("composition")).get("reason", "")),
        "origin": str(as_object(facts.result.get("parent")).get("sentence", "")),
    }
    page = Template(
        resources.files("blocktrain.runs").joinpath("report.html").read_text(encoding="utf-8")
    ).substitute(
        {key: html.escape(value) for key, value in words.items()},
        verdict=_verdict(facts),
        charts="\n".join(draw_charts(facts)),
        ce_table=_ce_table(facts),
        block_table=_block_table(facts),
        settings=_settings_table(facts.config),
    )
    path = folder / "report.html"
    write_atomic(path, page.encode("utf-8", "replace"))  # a sample may hold a lone surrogate
    return path


def _gather(folder: Path) -> ReportFacts:
    run, config, data, *_ = open_run(folder)
    path = folder / "result.json"
    if not path.exists():
        raise RunError(
            f"{folder} has no result yet: its training is not finished; continue with --resume"
        )
    result = read_json(path)
    ce = {
        name: float(value)
        for name, value in as_object(result.get("valid_ce")).items()
        if is_number(value)
    }
    if "composed" not in ce:
        raise RunError(
            f"{path} is damaged: it holds no cross entropy of the composed model; "
            "delete it and continue with --resume"
        )
    ranges = {
        n: (float(pair[0]), float(pair[1]))
        for n, pair in enumerate(_array(result.get("ranges")), 1)
        if len(_array(pair)) == 2
        and all(is_number(edge) for edge in pair)
        and 0 < pair[0] < pair[1] < math.inf
    }
    events = read_events(run.events)
    return ReportFacts(config, data, result, ce, _curves(events), _scores(events, config), ranges)


def _curves(events: Iterable[Mapping[str, Any]]) -> dict[int, Curve]:
    """The losses of each block. A resumed block repeats steps; the last loss of a step counts."""
    curves: dict[int, Curve] = {}
    for event in events:
        block, step, loss = (event.get(key) for key in ("block", "step", "loss"))
        if (
            event.get("kind") != "step"
            or not isinstance(block, int)
            or not isinstance(step, int)
            or not is_number(loss)
        ):
            continue
        curve = curves.setdefault(block, [])
        while curve and curve[-1][0] >= step:
            curve.pop()
        if math.isfinite(loss):
            curve.append((step, float(loss)))
    return {block: curve for block, curve in sorted(curves.items()) if curve}


def _scores(events: Iterable[Mapping[str, Any]], config: Config) -> dict[int, Curve]:
    """Cross entropies on the valid split while training, by block; the fusion block's is fused."""
    curves: dict[int, Curve] = {}
    names = {f"block-{n}": n for n in range(1, config.independent + 1)}
    if config.fusion:
        names["fused"] = config.fusion
    for event in events:
        scores, steps = as_object(event.get("scores")), as_object(event.get("steps"))
        for name, block in names.items() if event.get("kind") == "score" else ():
            score, step = scores.get(name), steps.get(str(block))
            if is_number(score) and isinstance(step, int) and step > 0:
                curves.setdefault(block, []).append((step, float(score)))
    return curves


def _array(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kicker(facts: ReportFacts) -> str:
    corpus, config = as_object(facts.result.get("corpus")), facts.config
    layers = f"{config.layers_per_block} layer{'s' if config.layers_per_block > 1 else ''}"
    text = Path(str(corpus.get("name", facts.data))).name
    if is_number(corpus.get("train_bytes")):
        text += f" ({short_number(corpus['train_bytes'])} bytes)"
    return f"{config.blocks} blocks of {layers} · {config.length} · {text}"


def _verdict(facts: ReportFacts) -> str:
    """The result in one sentence."""
    ce = {name: nats / math.log(2) for name, nats in facts.ce.items()}
    composed = ce["composed"]
    if not math.isfinite(composed):
        return (
            "The composed model has no finite cross entropy: its training diverged. "
            "A lower learning rate may help."
        )
    single = [v for n, v in ce.items() if n.startswith("block_")]
    others = {
        "a single block on average": sum(single) / len(single) if single else math.nan,
        "its path after the first block": ce.get("euler_1", math.nan) if not single else math.nan,
        "the end-to-end reference of the same shape": ce.get("reference", math.nan),
    }
    comparisons = ", and ".join(
        _compare(composed, value, name) for name, value in others.items() if math.isfinite(value)
    )
    needs = (
        f"the composed model needs <strong>{composed:.3f} bits per byte</strong> "
        f"({facts.per_token(facts.ce['composed']):.3f} nats per token)"
    )
    return f"On text it never saw, {needs}{': ' if comparisons else ''}{comparisons}."


def _compare(value: float, other: float, name: str) -> str:
    difference = value - other
    if abs(difference) < 5e-4:
        return f"as much as {name}"
    share = f" ({abs(difference) / other:.1%})" if other > 0 else ""
    word = "more" if difference > 0 else "fewer"
    return f"<strong>{abs(difference):.3f} {word}</strong>{share} than {name}"


def _visible(text: str) -> str:
    """Control characters as their Unicode pictures, because a page would not show them."""
    return "".join(
        chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else "\u2421" if c == "\x7f" else c
        for c in text
    )


def _table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    kind: str,
    strong: int | None = None,
) -> str:
    """A table whose first cells name their rows. Escapes every cell; `strong` is the main row."""
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
    body = ""
    for n, (first, *rest) in enumerate(rows):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        title = f'<th scope="row">{html.escape(first)}</th>'
        body += f"<tr{' class=strong' if n == strong else ''}>{title}{cells}</tr>\n"
    caption = html.escape(caption)
    table = f"<caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
    region = f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}">'
    return f'{region}<table class="{kind}">{table}</table></div>'


def _ce_table(facts: ReportFacts) -> str:
    names, rows = predictor_order(facts), []
    for name in names:
        nats = facts.ce[name]
        per_token = perplexity(facts.per_token(nats))
        cells = (
            f"{facts.per_token(nats):.4f}",
            f"{nats / math.log(2):.4f}",
            f"{per_token:.4f}" if per_token < 1e6 else f"{per_token:.1e}",
        )
        rows.append(
            (
                predictor_label(name, facts.compose),
                *(cells if math.isfinite(nats) else ("not finite", "", "")),
            )
        )
    header = ("", "nats/token", "bits/byte", "token perplexity")
    return _table(
        f"Cross entropy on {valid_part(facts)}", header, rows, "numbers", names.index("composed")
    )


def _block_table(facts: ReportFacts) -> str:
    """Size, time and memory of each process, without columns that would be empty."""
    weights = {
        n: w for n, w in enumerate(_array(facts.result.get("pool_weights")), 1) if is_number(w)
    }
    columns = {
        "parameters": {n: f"{v:,.0f}" for n, v in facts.by_block("parameters").items()},
        "peak memory, MB": {n: f"{v:,.0f}" for n, v in facts.by_block("peak_mb").items()},
        "seconds": {n: f"{v:,.1f}" for n, v in facts.by_block("seconds").items()},
        "sigma": {n: f"{low:.3g} to {high:.3g}" for n, (low, high) in facts.ranges.items()},
        "pool weight": {n: f"{w:.3f}" for n, w in weights.items()},
        "last loss": {n: f"{curve[-1][1]:.4f}" for n, curve in facts.curves.items()},
    }
    filled = {title: cells for title, cells in columns.items() if cells}
    rows = [
        (facts.title(n), *(cells.get(n, "–") for cells in filled.values()))
        for n in facts.block_numbers
    ]
    return _table("Blocks, each trained in a process of its own", ("", *filled), rows, "numbers")


def _settings_table(config: Config) -> str:
    values = {name: getattr(config, name) for name in Config.model_fields}  # defaults too
    rows = [
        (
            name,
            f"{values[name]}{'' if values[name] == field.default else ' *'}",
            field.description or "",
        )
        for name, field in Config.model_fields.items()
    ]
    return _table(
        "An asterisk marks what is not the default.", ("setting", "value", "meaning"), rows, "words"
    )
