"""How many requests are answered at a time, and the queue for the others.

Places are shared fairly between clients (API keys, or addresses). Who has more of them than another
client that waits pauses an answer between two pieces of text. So nobody waits for long answers of
somebody else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from blocktrain.serving.openai_messages import ApiError
from blocktrain.web import sse

QUEUE_SECONDS = 30.0  # the longest wait
TURN_SECONDS = 2.0  # after so long a client without a place gets that of one with a place
LONGEST_RETRY = 60


@dataclass(eq=False)
class _Ticket:
    """A request that waits for a place, or an answer that is paused."""

    client: str
    since: float
    place: asyncio.Future[None]
    paused: bool = False


class RequestQueue:
    """`most` requests run, `queue` wait, and the others learn when to try again."""

    def __init__(self, most: int, queue: int) -> None:
        self.most, self.queue = most, queue
        self._holding: Counter[str] = Counter()  # places by client
        self._tickets: list[_Ticket] = []  # in the order in which they came
        self._seconds = 1.0  # that an answer takes, smoothed

    @property
    def running(self) -> int:
        return self._holding.total()

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return sum(not ticket.paused for ticket in self._tickets)

    @asynccontextmanager
    async def slot(self, client: str = "") -> AsyncIterator[Slot]:
        """A place for an answer to this client."""
        ticket = self.line_up(client)
        self._refuse_surplus()
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await ticket.place
        except BaseException as error:
            if not self.give_up(ticket):
                self.release(client)
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise
        slot, began = Slot(self, client), time.monotonic()
        try:
            yield slot
        finally:
            self._seconds += 0.2 * (time.monotonic() - began - self._seconds)
            if slot.held:
                self.release(client)

    def must_pause(self, client: str) -> bool:
        """Whether a client that waits has too few places compared with this one.

        A paused answer keeps its memory, so there are no more of them than may wait.
        """
        now, mine = time.monotonic(), self._holding[client]
        if len(self._tickets) - self.waiting >= self.queue:
            return False
        for ticket in self._tickets:
            theirs = self._holding[ticket.client] + (now - ticket.since < TURN_SECONDS)
            if ticket.client != client and mine > theirs:
                return True
        return False

    def line_up(self, client: str, *, paused: bool = False) -> _Ticket:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = _Ticket(client, time.monotonic(), place, paused)
        self._tickets.append(ticket)
        self._grant()
        return ticket

    def give_up(self, ticket: _Ticket) -> bool:
        """Wait no longer; False if the place was granted meanwhile."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
        place = ticket.place
        return not place.done() or place.cancelled() or place.exception() is not None

    def release(self, client: str) -> None:
        self._holding[client] -= 1
        if not self._holding[client]:
            del self._holding[client]
        self._grant()

    def _grant(self) -> None:
        """Free places go to the clients that have the fewest."""
        while self._tickets and self.running < self.most:
            ticket = min(self._tickets, key=lambda t: self._holding[t.client])
            self._tickets.remove(ticket)
            if not ticket.place.done():  # else it was cancelled
                self._holding[ticket.client] += 1
                ticket.place.set_result(None)

    def _refuse_surplus(self) -> None:
        """With too many in the queue, the client with most of them loses its last one."""
        waiting = [ticket for ticket in self._tickets if not ticket.paused]
        if len(waiting) > self.queue:
            crowd = Counter(ticket.client for ticket in waiting)
            last = max(reversed(waiting), key=lambda ticket: crowd[ticket.client])
            self._tickets.remove(last)
            last.place.set_exception(self._busy())

    def _busy(self) -> ApiError:
        """Retry when all requests that wait now should have been answered."""
        again = min(
            LONGEST_RETRY, max(1, math.ceil(self._seconds * (self.waiting + 1) / self.most))
        )
        sentence = f"all slots are taken and {self.waiting} requests wait: try again in {again} s"
        return ApiError(429, sentence, "busy", retry_after=again)


class Slot:
    """A place of an answer under way."""

    def __init__(self, queue: RequestQueue, client: str) -> None:
        self.held = True
        self._queue, self._client = queue, client

    async def take_turns(self) -> AsyncGenerator[None]:
        """Between two pieces of text: wait while another client has to go first.

        Yields every few seconds, so that the connection can be kept alive.
        """
        queue = self._queue
        while queue.must_pause(self._client):
            self.held = False
            queue.release(self._client)
            ticket = queue.line_up(self._client, paused=True)
            try:
                while not ticket.place.done():
                    await asyncio.wait([ticket.place], timeout=sse.ALIVE_SECONDS)
                    yield None
            finally:
                self.held = not queue.give_up(ticket)
