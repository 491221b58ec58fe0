"""One sentence for people when somebody tries to get more than its share."""

from __future__ import annotations

from blocktrain.protocol.events import Attempt
from blocktrain.protocol.refusals import Code

PAUSE_SECONDS = 60.0  # between two notices of one kind about one member
MOST_KNOWN = 1000  # members and kinds that are remembered
MISSED = 3  # tasks in a row that were taken and not answered
REFUSALS: dict[str, Attempt] = {Code.OVER_QUOTA: "share", Code.WRONG_STAGE_KEY: "stage"}


class Notices:
    """Lets through what is new: nobody can flood people with notices."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}

    def is_due(self, now: float, attempt: Attempt, worker: str) -> bool:
        """Whether this is worth another notice. It counts as given then."""
        key = (attempt, worker)
        if now - self._last.get(key, now - PAUSE_SECONDS) < PAUSE_SECONDS:
            return False
        self._last = {k: t for k, t in self._last.items() if now - t < PAUSE_SECONDS}
        if len(self._last) >= MOST_KNOWN:
            return False
        self._last[key] = now
        return True
