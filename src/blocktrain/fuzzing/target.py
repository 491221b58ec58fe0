"""One parser as a fuzz target, and what it may do with an input: read it, or refuse it clearly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blocktrain.errors import BlockTrainError
from blocktrain.processes import peak_mb

MOST_SECONDS = 5.0  # of processor time for one input
MOST_MEMORY = 256.0  # MB by which one input may raise the peak


@dataclass(frozen=True)
class FuzzTarget:
    """A row of the table."""

    name: str
    read: Callable[[bytes], object]
    """May raise the errors of blocktrain.errors, and no others."""
    seeds: Callable[[], Iterable[bytes]]
    """Inputs to begin with. The parser reads at least one of them."""


class BrokenPromise(Exception):
    """An input was read to something that the parser promises never to give. Always a bug."""


@dataclass(frozen=True)
class ParserOutcome:
    """What one input did. `problem` is empty, if that is allowed."""

    read: bool
    problem: str = ""
    error: BaseException | None = None


def try_input(target: FuzzTarget, content: bytes) -> ParserOutcome:
    """Feed one input to a parser."""
    memory, began = peak_mb(), time.process_time()
    read = False
    try:
        target.read(content)
        read = True
    except BlockTrainError as error:
        if not str(error):
            return ParserOutcome(False, f"{type(error).__name__} without a sentence", error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library is no Exception
        return ParserOutcome(
            False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", error
        )
    seconds, grown = time.process_time() - began, peak_mb() - memory
    if seconds > MOST_SECONDS:
        return ParserOutcome(
            read, f"{seconds:.1f} s of processor time, {MOST_SECONDS:g} are allowed"
        )
    if grown > MOST_MEMORY:
        return ParserOutcome(read, f"{grown:.0f} MB of memory, {MOST_MEMORY:g} are allowed")
    return ParserOutcome(read)
