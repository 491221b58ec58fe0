"""The status of a run as tables that fit the terminal, down to 60 columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from blocktrain.errors import Unreachable
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.status import BlockStatus, Status, WorkerStatus
from blocktrain.terminal import console
from blocktrain.units import amount

WATCH_SECONDS = 2.0
ID_LETTERS = 8  # of a worker's id: enough for `kick`
NAME_LETTERS = 10  # of a worker's name, in a narrow terminal


def show_status(client: Calls, *, watch: bool, as_json: bool) -> None:
    """Print the status once or, with `watch`, until interrupted."""
    if as_json:
        while True:
            print(client.status().model_dump_json(), flush=True)
            if not watch:
                return
            time.sleep(WATCH_SECONDS)
    if not watch:
        console.print(StatusView(client.status()))
        return
    with Live(StatusView(client.status()), console=console, auto_refresh=False) as screen:
        while True:
            time.sleep(WATCH_SECONDS)
            try:
                screen.update(StatusView(client.status()), refresh=True)
            except Unreachable as error:
                screen.update(Text(str(error)), refresh=True)


@dataclass(frozen=True)
class Column:
    """A column of a table, left out where the terminal is narrower than `least`."""

    title: str
    cell: Callable[[Any], object]
    least: int = 0
    left: bool = False


def _loss(row: BlockStatus | WorkerStatus) -> str:
    return "-" if row.loss is None else f"{row.loss:.3f}"


def _standing(row: WorkerStatus) -> str:
    return f"quarantined, {row.barred} rounds" if row.barred else row.standing


BLOCK_COLUMNS = (
    Column("block", lambda b: b.block),
    Column("version", lambda b: b.version),
    Column("steps", lambda b: b.steps),
    Column("loss", _loss),
    Column("updates", lambda b: b.accepted),
    Column("late", lambda b: b.late),
    Column("in", lambda b: amount(b.bytes_in)),
    Column("out", lambda b: amount(b.bytes_out)),
)
WORKER_COLUMNS = (
    Column("worker", lambda w: w.worker[:ID_LETTERS], left=True),
    Column("name", lambda w: w.name or w.device, left=True),
    Column("state", lambda w: w.state, left=True),
    Column("block", lambda w: w.block or "-"),
    Column("task", lambda w: w.task or "-", least=80),
    Column("step", lambda w: f"{w.step}/{w.steps}"),
    Column("loss", _loss),
    Column("tokens/s", lambda w: f"{w.tokens_per_second:,.0f}", least=80),
    Column("updates", lambda w: w.accepted),
    Column("standing", _standing, least=120, left=True),
    Column("checked", lambda w: w.checked, least=120),
    Column("share", lambda w: f"{w.share:.2f}", least=120),
    Column("seen", lambda w: f"{_short_time(w.seen_seconds)} ago", least=100),
    Column("seen", lambda w: _short_time(w.seen_seconds), least=70),
)


@dataclass(frozen=True)
class StatusView:
    """Blocks, open rounds and workers, in the width that there is."""

    status: Status

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width, status = options.max_width, self.status
        yield Text("\n".join(self._summary()))
        yield ""
        yield _table(status.blocks, BLOCK_COLUMNS, width)
        for block in status.blocks:
            if block.round:
                yield Text(block.round.reason, style="dim")
        yield ""
        if status.workers:
            yield _table(status.workers, WORKER_COLUMNS, width)
        else:
            yield "no workers yet"

    def _summary(self) -> Iterable[str]:
        status = self.status
        yield (
            f"run {status.run[:12]} {status.state}: {status.rounds} rounds, "
            f"{status.tokens:,} tokens, "
            f"{amount(status.bytes_in)} in, {amount(status.bytes_out)} out"
        )
        if (each := status.bytes_per_update) and (share := status.float32_share):
            yield (
                f"{amount(each)} in and out for each update (corpus aside), {share:.3f} of float32 "
                "both ways"
            )
        disk = status.disk
        yield f"disk: {amount(disk.used)}" + (f" of {amount(disk.limit)}" if disk.limit else "")
        if disk.problem:
            yield f"no updates are taken: {disk.problem}"
        yield from (notice.sentence for notice in status.notices)
        if status.parent:
            yield status.parent.sentence
        for worker in status.workers:
            if worker.barred:
                name = worker.name or worker.worker[:ID_LETTERS]
                yield (
                    f"{name} is quarantined for {worker.barred} more rounds of its block: "
                    "its updates were left out again and again"
                )
        if status.refusals:
            yield "refused: " + ", ".join(f"{n} x {code}" for code, n in status.refusals.items())
        if status.scores:
            bits = ", ".join(f"{name} {b:.4f}" for name, b in status.bits_per_byte.items())
            nats = ", ".join(f"{name} {ce:.4f}" for name, ce in status.scores.items())
            yield f"valid: {bits} bits/byte ({nats} nats/token)"


def _table(rows: Sequence[Any], columns: Sequence[Column], width: int) -> Table:
    visible: dict[str, Column] = {}
    for column in columns:
        if width >= column.least:
            visible.setdefault(column.title, column)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in visible.values():
        table.add_column(
            column.title,
            justify="left" if column.left else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=NAME_LETTERS if column.title == "name" and width < 100 else None,
        )
    for row in rows:
        table.add_row(*(Text(str(column.cell(row))) for column in visible.values()))
    return table


def _short_time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
