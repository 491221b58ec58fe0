"""What a sweep costs, predicted from a line and a model; and how many bytes to draft, from what was measured (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_DRAFTED = 32
FADING = 0.9  # what a measurement counts for after the next one
PRIOR_ACCEPTANCE, PRIOR_BYTES = (
    0.85,
    20.0,
)  # before anything is known: so good, and as firmly as so many drafted bytes
REMEMBERED = 400.0  # drafted bytes over which acceptance is averaged
EQUAL = 1.02  # times as long is as good as equal
GOING_ON = 0.05  # probability that a draft is right to its end, from which on it is worth to draft on behind it
PRIOR_SLOPE, SLOPE_WEIGHT = 5e-5, 50.0  # seconds per position of a sweep, and how firmly


@dataclass(frozen=True)
class Linear:
    """Seconds of a computation on m positions."""

    base: float
    each: float = 0.0

    def __call__(self, positions: int) -> float:
        return self.base + self.each * positions


@dataclass(frozen=True)
class Line:
    """A line between two hosts: round trip in seconds, bits per second (0: no bound), and seconds that the software adds to a hop."""

    rtt: float
    bits: float = 0.0
    overhead: float = 1e-3

    def transfer(self, size: float) -> float:
        """Seconds that so many bytes take to pass."""
        return 8 * size / self.bits if self.bits else 0.0


def fan_sweep(
    positions: int, line: Line, answer_bytes: float, stage: Linear, fusion: Linear
) -> float:
    """Seconds of a fan sweep. `answer_bytes` come back for a position, from all stages together: they share the entry's downlink."""
    return (
        line.rtt
        + line.overhead
        + line.transfer(positions * answer_bytes)
        + stage(positions)
        + fusion(positions)
    )


def ring_sweep(positions: int, line: Line, hosts: int, state_bytes: float, stage: Linear) -> float:
    """Seconds of a sweep through `hosts` hosts one after another, the first of them the entry's; the last one answers it."""
    hop = line.rtt / 2 + line.overhead + line.transfer(positions * state_bytes)
    return (hosts - 1) * hop + hosts * stage(positions) + line.rtt / 2 + line.overhead


def expected_bytes(acceptance: float, drafted: int) -> float:
    """Bytes that a sweep over so many drafted ones commits, if each is accepted with this probability on its own."""
    return (
        drafted + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
    )


def exact_seconds(acceptance: float, drafted: int, draft: float, sweep: float) -> float:
    """Seconds per byte of mode exact; `draft` is for one byte, `sweep` for drafted + 1 positions.

    A draft that is right to its end was followed up while its sweep was under way: the next one costs what did not fit in there.
    """
    followed_up = acceptance**drafted if drafted else 0.0
    drafting = (1 - followed_up) * drafted * draft + followed_up * max(
        (drafted + 1) * draft - sweep, 0.0
    )
    return (drafting + sweep) / expected_bytes(acceptance, drafted)


def swept_seconds(
    acceptance: float, length: int, sweeps: int, draft: float, sweep: Callable[[int], float]
) -> float:
    """Seconds per byte of mode sweep for an output of this length: what a sweep does not commit is drafted anew."""
    seconds, left = 0.0, float(length)
    for _ in range(sweeps):
        seconds += left * draft + sweep(round(left))
        left = max(0.0, left - expected_bytes(acceptance, round(left) - 1))
        if left < 1:
            break
    return (seconds + left * draft) / length


class SweepMeter:
    """Seconds of a sweep as a line over its positions, fitted to the latest sweeps."""

    def __init__(self) -> None:
        self.guess = 2e-3  # of a sweep of no positions, as long as none was measured
        self._weight = self._m = self._s = self._mm = self._ms = 0.0

    def add(self, positions: int, seconds: float) -> None:
        """One sweep, as it was measured."""
        values = (1.0, positions, seconds, positions * positions, positions * seconds)
        old = (self._weight, self._m, self._s, self._mm, self._ms)
        self._weight, self._m, self._s, self._mm, self._ms = (
            FADING * a + b for a, b in zip(old, values, strict=True)
        )

    def __call__(self, positions: int) -> float:
        """What a sweep of so many positions is expected to take."""
        if not self._weight:
            return self.guess + PRIOR_SLOPE * positions
        mean_m, mean_s = self._m / self._weight, self._s / self._weight
        variance = self._mm - self._weight * mean_m**2
        covariance = self._ms - self._weight * mean_m * mean_s
        slope = max((covariance + SLOPE_WEIGHT * PRIOR_SLOPE) / (variance + SLOPE_WEIGHT), 0.0)
        return max(mean_s + slope * (positions - mean_m), mean_s / 10)


class Pace:
    """How long drafting and sweeping take here and how often a drafted byte is right: what the length of a draft depends on."""

    def __init__(self) -> None:
        self.sweep = SweepMeter()
        self.draft = 1e-3  # seconds a byte
        self._tried, self._right = PRIOR_BYTES, PRIOR_ACCEPTANCE * PRIOR_BYTES

    @property
    def acceptance(self) -> float:
        """Probability that the next drafted byte is right, as far as is known."""
        return self._right / self._tried

    def drafted(self, count: int, seconds: float) -> None:
        """So many bytes were drafted in so long."""
        if count:
            share = 1 - FADING**count
            self.draft += share * (
                min(seconds / count, 3 * self.draft) - self.draft
            )  # one hiccup of the machine is no trend

    def verified(self, accepted: int, drafted: int) -> None:
        """Of a draft so many bytes were right; those after the first wrong one say nothing."""
        tried = min(accepted + 1, drafted)
        fading = max(1 - tried / REMEMBERED, 0.0)
        self._tried, self._right = fading * self._tried + tried, fading * self._right + accepted

    def undrafted(self) -> None:
        """A sweep without a draft: what is known of acceptance grows old, so that drafting gets another chance."""
        self._tried, self._right = (
            0.98 * self._tried + 0.02 * PRIOR_BYTES,
            0.98 * self._right + 0.02 * PRIOR_BYTES * PRIOR_ACCEPTANCE,
        )

    def best_draft(self, most: int) -> int:
        """How many bytes to draft so that a byte is soonest; 0 is to write one at a time.

        Of lengths that are as good as equal the longest: it needs the fewest sweeps.
        """
        acceptance = min(self.acceptance, 0.995)
        seconds = [
            exact_seconds(acceptance, n, self.draft, self.sweep(n + 1))
            for n in range(min(most, MOST_DRAFTED) + 1)
        ]
        best = min(seconds)
        return (
            max(n for n, each in enumerate(seconds) if each <= EQUAL * best)
            if best < seconds[0]
            else 0
        )

    def worth_going_on(self, drafted: int) -> bool:
        """Whether a draft of this length is right often enough to draft on behind it."""
        return self.acceptance**drafted >= GOING_ON
