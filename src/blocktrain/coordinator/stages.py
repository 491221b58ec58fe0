"""The stages that serve a run's models, by their own word. In memory alone: they tell again, and a stage that does not is forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.stages import KEPT_SECONDS, MAX_STAGES, StageList, StageNotice


class Stages:
    """Who told lately, by address. Calls come from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, tuple[StageNotice, float]] = {}
        self._lock = threading.Lock()

    def tell(self, notice: StageNotice) -> None:
        """POST /v1/stages."""
        with self._lock:
            self._forget()
            if notice.address not in self._told and len(self._told) >= MAX_STAGES:
                raise Refused(Code.BUSY, f"{MAX_STAGES} stages are listed")
            self._told[notice.address] = (notice, self._clock())

    def listed(self) -> StageList:
        """GET /v1/stages."""
        with self._lock:
            self._forget()
            return StageList(stages=tuple(notice for notice, _ in self._told.values()))

    def _forget(self) -> None:
        before = self._clock() - KEPT_SECONDS
        self._told = {address: told for address, told in self._told.items() if told[1] >= before}
