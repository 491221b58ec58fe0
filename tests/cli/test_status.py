"""The status of a run as a table: it fits the terminal, and nothing in it is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from blocktrain.cli.status import StatusView
from blocktrain.protocol.messages import Blob
from blocktrain.protocol.refusals import Code
from blocktrain.protocol.status import BlockStatus, RoundStatus, Status, WorkerStatus

REASON = "round 1234 of block {} has 3 of 6 updates and 41 s, or until 2 more workers have answered"
STATES = ("training", "waiting", "lost", "left", "kicked")


def _status(*, workers: int = 5) -> Status:
    """Large numbers and long names, as in a run of some days."""
    blocks = [
        BlockStatus(
            block=n,
            version=1234,
            weights=Blob(sha256="a" * 64, length=10),
            steps=617_000,
            tokens=2**40,
            loss=2.34567,
            accepted=12_345,
            refused=3,
            late=62,
            round=RoundStatus(
                version=1234,
                updates=3,
                leased=6,
                target=6,
                minimum=2,
                extensions=1,
                open_seconds=12.0,
                deadline_seconds=41.0,
                reason=REASON.format(n),
            ),
            bytes_in=987_654_321,
            bytes_out=123_456_789_012,
        )
        for n in (1, 2, 3)
    ]
    seen = [
        WorkerStatus(
            worker=f"{n:02d}" + "b" * 30,
            name=f"workstation-{n}-in-the-corner",
            device="cuda:0",
            state=STATES[n % len(STATES)],  # type: ignore[arg-type]
            block=2,
            task=12_345,
            step=1234,
            steps=2000,
            loss=2.1,
            speed=1234.5,
            accepted=1234,
            seen_seconds=123_456.0,
        )
        for n in range(workers)
    ]
    return Status(
        protocol=1,
        run="c" * 32,
        fingerprint="d" * 64,
        state="running",
        up_seconds=1.0,
        rounds=3702,
        tokens=2**42,
        blocks=tuple(blocks),
        workers=tuple(seen),
        refusals={next(iter(Code)): 12},
        scores={"block-1": 2.2, "block-2": 2.25, "pool": 2.1, "fused": 1.9876},
        bytes_in=2_962_962_963,
        bytes_out=370_370_367_036,
    )


def _rendered(status: Status, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(StatusView(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_table_fits_the_terminal(width: int) -> None:
    lines = _rendered(_status(), width)
    assert max(map(len, lines)) <= width
    table = next(line for line in lines if line.startswith("block "))
    assert table.split() == ["block", "version", "steps", "loss", "updates", "late", "in", "out"]
    for n in (1, 2, 3):  # a row is a line, and no number is cut
        assert f"{n} 1234 617000 2.346 12345 62 988 MB 123 GB".split() in [x.split() for x in lines]
    for n in range(5):
        (row,) = [line for line in lines if line.startswith(f"{n:02d}bbbbbb")]
        assert STATES[n] in row and "1234/2000" in row and "2.100" in row
    words = " ".join(" ".join(lines).split())
    assert all(words.count(REASON.format(n)) == 1 for n in (1, 2, 3))


def test_a_wide_terminal_shows_more() -> None:
    def header(width: int) -> list[str]:
        lines = _rendered(_status(), width)
        return next(line for line in lines if line.startswith("worker ")).split()

    narrow, usual = header(60), header(80)
    assert set(narrow) < set(usual)
    assert set(header(160)) == {*usual, "standing", "checked", "share"}
    assert usual == [
        "worker",
        "name",
        "state",
        "block",
        "task",
        "step",
        "loss",
        "tokens/s",
        "updates",
        "seen",
    ]
    assert any("workstation-3-in-the-corner" in line for line in _rendered(_status(), 160))


def test_who_is_quarantined_is_told_in_a_sentence() -> None:
    status = _status()
    barred = status.workers[1].model_copy(update={"standing": "quarantined", "barred": 4})
    lines = _rendered(status.model_copy(update={"workers": (*status.workers, barred)}), 160)
    assert any("is quarantined for 4 more rounds of its block" in line for line in lines)
    assert any("quarantined, 4 rounds" in line for line in lines)


def test_a_run_without_workers_says_so() -> None:
    assert _rendered(_status(workers=0), 80)[-1] == "no workers yet"
