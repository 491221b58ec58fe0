"""Is a stage still there? When to PING, what the round trip is, and when silence means that it is lost. Pure: the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

SILENCE = 0.85  # seconds beyond a round trip after which a line that owes something is given up
TICK = 0.25  # between PINGs while something is due
IDLE_TICKS = 8  # and this many times as rarely otherwise
SLOWEST = (
    1e6  # bytes per second that a line is given for what it has to send, before silence counts
)
SMOOTHING = 0.2


@dataclass(frozen=True)
class Beat:
    """What to do now: send a PING with this stamp (or none), or give up; and after how many seconds to ask again."""

    ping: int | None
    lost: bool
    again: float


@dataclass
class Pulse:
    """What is known about the other end of one connection."""

    rtt: float = 0.0  # seconds, smoothed; 0: not measured
    _heard: float = 0.0
    _asked: float = 0.0  # since when something has been due without a break
    _planned: float = 0.0
    _unheard: int = 0  # bytes sent since anything was heard
    _ticks: int = 0
    _stamp: int = 0
    _pings: dict[int, float] = field(default_factory=dict)  # those without an answer

    def begin(self, now: float) -> None:
        """A new connection."""
        self._heard = self._asked = self._planned = now
        self._unheard, self._pings = 0, {}

    def sent(self, size: int) -> None:
        """Bytes on their way to the other end."""
        self._unheard += size

    def heard(self, now: float) -> None:
        """Anything at all arrived."""
        self._heard, self._unheard = now, 0

    def asked(self, now: float, due: bool) -> None:
        """Something is due from now on; `due` says whether something already was."""
        if not due and not self._pings:
            self._asked = now

    def pong(self, stamp: int, now: float) -> None:
        """The answer to a PING."""
        sent = self._pings.pop(stamp, None)
        if sent is not None:
            self.measured(now - sent)

    def measured(self, seconds: float) -> None:
        """A round trip."""
        self.rtt += (seconds - self.rtt) * (SMOOTHING if self.rtt else 1.0)

    def beat(self, now: float, due: bool) -> Beat:
        """Called when the last beat said so."""
        waiting = due or bool(self._pings)
        deadline = max(self._heard, self._asked) + SILENCE + self.rtt + self._unheard / SLOWEST
        # A late call means that this process stood still, perhaps with the whole machine: what arrives meanwhile is read first.
        late = now >= self._planned + TICK
        if waiting and now >= deadline and not late:
            return Beat(None, True, 0.0)
        self._ticks += 1
        ping = None
        if due or self._ticks % IDLE_TICKS == 0:
            self.asked(now, due)
            self._stamp += 1
            self._pings[self._stamp] = now
            ping = self._stamp
        again = max(0.01, min(TICK, deadline - now)) if waiting and not late else TICK
        self._planned = now + again
        return Beat(ping, False, again)
