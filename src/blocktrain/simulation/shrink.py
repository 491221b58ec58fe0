"""A smaller tape that breaks the same invariant: without the faults and members that it needs not.

A tape decides everything, so a part of it can be left out and the rest tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from blocktrain.simulation.tape import Tape
from blocktrain.simulation.world import Outcome

MOST_TRIALS = 150


def shrink(
    tape: Tape, violation: str, simulate: Callable[[Tape], Outcome], trials: int = MOST_TRIALS
) -> Tape:
    """The smallest tape that was found within so many trials."""
    left = trials

    def fails(smaller: Tape) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and simulate(smaller).violation == violation

    best = tape.model_copy(update={"expected": violation})
    size = -(-len(best.faults) // 2)
    while size and left > 0:
        end = len(best.faults)
        while end > 0:
            begin = max(0, end - size)
            rest = (*best.faults[:begin], *best.faults[end:])
            candidate = best.model_copy(update={"faults": rest})
            if fails(candidate):
                best = candidate
            end = begin
        size //= 2
    for simplify in _simpler_worlds(best):
        candidate = simplify(best)
        if left > 0 and candidate != best and fails(candidate):
            best = candidate
    return best


def _simpler_worlds(tape: Tape) -> Iterator[Callable[[Tape], Tape]]:
    """Changes that leave less to read. Each is tried on what the ones before have left."""

    def change(**fields: object) -> Callable[[Tape], Tape]:
        def apply(tape: Tape) -> Tape:
            world = tape.world.model_copy(update=fields)
            return tape.model_copy(update={"world": world})

        return apply

    for member in reversed(range(len(tape.world.byzantine))):
        cheats = tape.world.byzantine
        yield change(byzantine=(*cheats[:member], *cheats[member + 1 :]))
    yield change(byzantine=())
    for count in reversed(range(1, len(tape.world.honest))):
        yield change(honest=tape.world.honest[:count])
    yield change(store="memory")
    yield change(compose="pool", blocks=1)
    yield change(outer="average")
    yield change(compression="none", version_compression="none")
    for rounds in reversed(range(1, tape.world.rounds)):
        yield change(rounds=rounds)
