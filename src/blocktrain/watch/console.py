"""What operators see: lines of a running coordinator, the status as a table, the result of an audit."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from blocktrain.coordinator.calls import Coordinator
from blocktrain.errors import ConfigError, Unreachable
from blocktrain.protocol.messages import Kick
from blocktrain.protocol.status import Status
from blocktrain.terminal import amount, bar, console
from blocktrain.watch.feed import Listener
from blocktrain.web.client import Calls, HttpClient

WATCH_SECONDS = 2.0


class Watch:
    """One line for every version, worker, score and ending, as they come."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._feed = coordinator.feed
        self._listener = self._listen()
        self._troubled = False
        live = coordinator.live
        console.print(
            f"run {live.run.run[:12]}: {live.config.blocks} blocks, {live.config.steps} steps each",
            highlight=False,
        )
        self._finished = coordinator.finished is not None
        if coordinator.finished:
            _finished(coordinator.finished)

    def _listen(self) -> Listener:
        listener = Listener(kinds=("worker", "version", "score", "finish"))
        self._feed.listen(listener)
        return listener

    def tell(self) -> bool:
        """Print what is new; True when the run is finished."""
        if self._listener.gone:  # too much happened at once to be told of
            self._listener = self._listen()
        for event in self._listener.take():
            if event.kind != "finish":
                console.print(_line(event.value), highlight=False)
            elif not self._finished:
                self._finished = True
                _finished(event.value["reason"])
        if self._feed.problem and not self._troubled:
            self._troubled = True
            warn(self._feed.problem)
        return self._finished


def warn(sentence: str) -> None:
    """Something that an operator should know and that stops nothing."""
    console.print(f"[yellow]{sentence}[/]", highlight=False)


def _finished(reason: str) -> None:
    console.print(
        f"[bold]{reason}[/]; fetch the model with: blocktrain pull URL --out RUN", highlight=False
    )


def _line(event: dict[str, Any]) -> str:
    """A worker, a version or a score in one line."""
    if event["kind"] == "worker":
        device = f" ({event['device']})" if event["state"] == "joined" else ""
        return f"worker {event['name'] or event['worker'][:12]} {event['state']}{device}"
    moved = f"{amount(event['bytes_in'])} in, {amount(event['bytes_out'])} out"
    if event["kind"] == "score":
        return f"valid CE {', '.join(f'{name} {ce:.4f}' for name, ce in event['scores'].items())} ({moved})"
    loss = "" if event["loss"] is None else f", loss {event['loss']:.3f}"
    return (
        f"block {event['block']} version {event['version']}: {event['steps']} steps{loss} ({moved})"
    )


def show_status(client: Calls, *, watch: bool, as_json: bool) -> None:
    """Once, or again and again until interrupted."""
    if as_json:
        while True:
            print(client.status().model_dump_json(), flush=True)
            if not watch:
                return
            time.sleep(WATCH_SECONDS)
    if not watch:
        console.print(table(client.status()))
        return
    with Live(table(client.status()), console=console, auto_refresh=False) as screen:
        while True:
            time.sleep(WATCH_SECONDS)
            try:
                screen.update(table(client.status()), refresh=True)
            except Unreachable as error:
                screen.update(Text(str(error)), refresh=True)


def table(status: Status) -> Group:
    """Blocks and workers, with the bytes they moved."""
    blocks = _table("block", "version", "steps", "loss", "updates", "late", "in", "out", "round")
    for b in status.blocks:
        loss = "-" if b.loss is None else f"{b.loss:.3f}"
        why = b.round.reason if b.round else ""
        blocks.add_row(
            *map(
                str,
                (
                    b.block,
                    b.version,
                    b.steps,
                    loss,
                    b.accepted,
                    b.late,
                    amount(b.bytes_in),
                    amount(b.bytes_out),
                    why,
                ),
            )
        )
    workers = _table(
        "worker", "name", "state", "block", "task", "step", "loss", "steps/s", "updates", "seen"
    )
    for w in status.workers:
        loss = "-" if w.loss is None else f"{w.loss:.3f}"
        row = (
            w.worker[:12],
            w.name or w.device,
            w.state,
            w.block or "-",
            w.task or "-",
            f"{w.step}/{w.steps}",
            loss,
        )
        workers.add_row(
            *map(str, (*row, f"{w.speed:.1f}", w.accepted, f"{w.seen_seconds:.0f} s ago"))
        )
    refusals = ", ".join(f"{count} x {code}" for code, count in status.refusals.items())
    head = f"run {status.run[:12]} {status.state}: {status.rounds} rounds, {status.tokens:,} bytes of text, "
    head += f"{amount(status.bytes_in)} in, {amount(status.bytes_out)} out" + (
        f"\nrefused: {refusals}" if refusals else ""
    )
    head += (
        f"\nvalid CE: {', '.join(f'{name} {ce:.4f}' for name, ce in status.scores.items())}"
        if status.scores
        else ""
    )
    return Group(Text(head), blocks, workers if status.workers else Text("no workers yet"))


def _table(*columns: str) -> Table:
    made = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        made.add_column(
            column, justify="left" if column in ("worker", "name", "state", "round") else "right"
        )
    return made


def kick_worker(client: Calls, worker: str, reason: str) -> str:
    """Kick the one worker whose id or name begins like this."""
    known = client.status().workers
    found = [
        w.worker for w in known if w.worker.startswith(worker) or (w.name and w.name == worker)
    ]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} workers are called {worker!r}; known: {', '.join(w.worker[:12] for w in known) or 'none'}"
        )
    client.kick(Kick(worker=found[0], reason=reason))
    return found[0]


def audit_run(where: str, token: str, ca: Path | None, *, retrain: bool, as_json: bool) -> bool:
    """Check a run by its folder or address; prints what was found and says whether all is well."""
    from blocktrain.audit.audit import audit
    from blocktrain.audit.evidence import Folder, Remote

    remote = where.startswith(("http://", "https://"))
    with bar("audit") as progress, tempfile.TemporaryDirectory(prefix="blocktrain-audit-") as kept:
        source = (
            Remote(HttpClient(where, token, ca=ca), Path(kept)) if remote else Folder(Path(where))
        )
        found = audit(
            source, retrain=retrain, progress=lambda _, done, total: progress(done / max(total, 1))
        )
    if as_json:
        print(json.dumps(found.as_dict()))
        return found.ok
    for finding in found.findings:
        console.print(
            f"[red]{finding.name}[/] entry {finding.entry}: {finding.sentence}", highlight=False
        )
    counted = f"{found.entries} entries, {found.versions} versions recomputed, {found.updates} updates ({found.pending} not merged yet)"
    console.print(
        f"{'all is well' if found.ok else f'{len(found.findings)} findings'}: {counted}",
        highlight=False,
    )
    if retrain:
        console.print(f"{found.retrained} updates trained again to the same bytes", highlight=False)
    return found.ok
