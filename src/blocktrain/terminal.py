"""Progress bars, tables and text for a terminal. Bars and tables go to stderr, text to stdout."""

from __future__ import annotations

import codecs
import math
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from blocktrain.units import amount

console = Console(stderr=True)


@contextmanager
def bar(title: str) -> Iterator[Callable[[float], None]]:
    """A progress bar; call what it gives with the share that is done."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # it would print an empty line
    ) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda share: progress.update(task, completed=share)


@contextmanager
def token_bar(title: str) -> Iterator[Callable[[int, int, int], None]]:
    """A bar for tokenizing; call what it gives with bytes read, bytes in all, and tokens so far.

    It is shown from the first call on, and its rate counts from there.
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # it would print an empty line
    ) as progress:
        task: TaskID | None = None
        began, first = 0.0, 0

        def update(read: int, size: int, tokens: int) -> None:
            nonlocal task, began, first
            if task is None:
                task, began, first = (
                    progress.add_task(title, total=size, completed=read, note=""),
                    time.monotonic(),
                    tokens,
                )
            rate = (tokens - first) / max(time.monotonic() - began, 1e-3)
            note = f"{amount(read)} of {amount(size)}, {tokens:,} tokens, {rate:,.0f}/s"
            progress.update(task, completed=read, note=note)

        yield update


class StepBars:
    """A bar per trainer with steps, loss and remaining time, from its first report on."""

    def __init__(self, steps_of: Callable[[int], int]) -> None:
        self._steps_of = steps_of  # a block; 0 is the reference
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
        )

    def __enter__(self) -> StepBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: Mapping[str, Any]) -> None:
        """Show an event of kind `step` or `score`; others change nothing."""
        if event["kind"] == "score":
            self._progress.console.print(
                score_line(event), highlight=False, markup=False, soft_wrap=True
            )
        if event["kind"] != "step":
            return
        name = f"block-{event['block']}" if event["block"] else "reference"
        bits = f", {event['bits_per_byte']:.3f} bits/byte" if "bits_per_byte" in event else ""
        loss = f"{event['loss']:.3f}{bits}"
        fields: dict[str, Any] = {"loss": loss, "speed": speed(event)}
        if name not in self._tasks:
            total = self._steps_of(event["block"])
            self._tasks[name] = self._progress.add_task(name, total=total, **fields)
        self._progress.update(self._tasks[name], completed=event["step"], **fields)

    def warn(self, sentence: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(
            f"[yellow]{escape(sentence)}[/]", highlight=False, soft_wrap=True
        )


class JobBars:
    """One bar for all jobs and one for each that is running."""

    def __init__(self, title: str, count: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>20}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._all = self._progress.add_task(title, total=count, note="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> JobBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, name: str, message: dict[str, Any]) -> None:
        """Steps and loss of a training, or the share of any other job."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1.0, note="")
        share = message["share"] if "share" in message else message["step"] / message["steps"]
        note = f"loss {message['loss']:.3f}" if "loss" in message else ""
        self._progress.update(self._tasks[name], completed=share, note=note, visible=share < 1)
        self._progress.update(
            self._all, completed=sum(task.finished for task in self._progress.tasks[1:])
        )


class TextWriter:
    """Writes a model's bytes to stdout as they come.

    A model may write any byte. A terminal would obey control characters, so there they are
    escaped, and a character is written when its last byte is there. Files and pipes get the bytes.
    """

    def __init__(self, *, raw: bool) -> None:
        self._raw = raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, content: bytes, *, final: bool = False) -> None:
        if not self._raw:
            content = printable(self._decoder.decode(content, final)).encode()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Show what is left of an unfinished character, and end the line."""
        self.write(b"", final=True)
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()


def printable(text: str) -> str:
    """The text with every character escaped that a terminal may obey or hide."""
    return "".join(
        c
        if c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def warn(sentence: str) -> None:
    """A problem that the user should know about and that stops nothing."""
    console.print(f"[yellow]{escape(sentence)}[/]", highlight=False)


def perplexity(nats: float) -> float:
    """Of a cross entropy; infinite if it exceeds a float, as after a training that diverged."""
    return math.exp(nats) if nats < 700 else math.inf


def ce_table(title: str, ce: dict[str, float], bytes_per_token: float) -> Table:
    """Cross entropies, which are nats per byte, in the units that people compare.

    Bits per byte compare models of different tokenizers.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in ("model", "nats/token", "bits/byte", "token perplexity"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, value in ce.items():
        style = "bold" if name == "composed" else None
        table.add_row(
            name,
            f"{value * bytes_per_token:.4f}",
            f"{value / math.log(2):.4f}",
            f"{perplexity(value * bytes_per_token):.4f}",
            style=style,
        )
    return table


def score_line(event: Mapping[str, Any]) -> str:
    """The score of a run's versions in one line."""
    scores: dict[str, float] = event["scores"]
    each = ", ".join(f"{name} {ce:.4f}" for name, ce in scores.items())
    if not scores:
        return "valid CE: not finite"
    best = min(scores, key=lambda name: scores[name])
    bits = scores[best] / event.get("bytes_per_token", 1.0) / math.log(2)
    return f"valid CE {each} nats/token; {best} {bits:.4f} bits/byte"


def rows_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows of one shape as a table; the columns are those of the first row."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in rows[0]:
        table.add_column(
            column, justify="left" if isinstance(rows[0][column], str) else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in rows[0]))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def speed(event: Mapping[str, Any]) -> str:
    """How fast a block trains, for people."""
    if not event.get("tokens_per_second"):
        return ""
    text = f"{event['tokens_per_second']:,.0f} tokens/s"
    share = event.get("peak_share")
    return text if share is None else f"{text}, est. {share:.0%} of peak"
