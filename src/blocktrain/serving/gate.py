"""Who may come in, and how many at a time: API keys, names of this machine, places and the queue for them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.errors import IdentityError
from blocktrain.serving.openai_messages import ApiError

LEAST_KEY = 16  # characters
MOST_KEYS = 10_000
QUEUE_SECONDS = 30.0  # that anybody waits for a place
MAX_READING = 256  # bodies that are being received
MAX_FROM_ONE = 64  # of them from one address
LONGEST_RETRY = 60


@dataclass(frozen=True)
class Keys:
    """The API keys of a server, as digests. None of them: everybody may come in."""

    digests: frozenset[bytes] = frozenset()

    def check(self, authorization: str) -> None:
        """Refuse whoever has none of the keys."""
        if not self.digests:
            return
        kind, _, given = authorization.partition(" ")
        if not given.strip():
            raise ApiError(
                401,
                "this server wants an API key: send it as `Authorization: Bearer KEY`",
                "missing_api_key",
            )
        mine = _digest(given.strip())
        # All of them, whatever fits: the time that it takes tells nothing.
        if kind.lower() != "bearer" or not sum(
            hmac.compare_digest(mine, known) for known in self.digests
        ):
            raise ApiError(
                401,
                "this is none of the API keys of this server: ask its operator for one",
                "invalid_api_key",
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> Keys:
    """One key a line; empty lines and those that begin with # do not count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise IdentityError(f"cannot read the API keys in {path}: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(keys) <= MOST_KEYS:
        raise IdentityError(
            f"{path} holds {len(keys)} API keys; put at least one there and at most {MOST_KEYS}, one a line"
        )
    for number, key in enumerate(keys, 1):
        if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise IdentityError(
                f"key {number} in {path} is not {LEAST_KEY} or more printable ASCII characters without spaces"
            )
    return Keys(frozenset(map(_digest, keys)))


def check_name(host: str) -> None:
    """Refuse a request to a name that is not this machine's: a web page that points its own name here (DNS rebinding) has one."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]").lower().rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name != "localhost" and not name.endswith(".localhost"):
            raise ApiError(
                421,
                "without API keys this server is called localhost or by its address only",
                "wrong_host",
            ) from None


@dataclass
class Reading:
    """Bodies that are being received, by address: a slow line takes nobody's place."""

    count: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def one(self, address: str) -> Iterator[None]:
        """While one is being received."""
        if self.count.total() >= MAX_READING or self.count[address] >= MAX_FROM_ONE:
            raise ApiError(
                429, "too many requests are being received: try again", "busy", retry_after=1
            )
        self.count[address] += 1
        try:
            yield
        finally:
            self.count[address] -= 1
            if not self.count[address]:
                del self.count[address]


class Places:
    """So many are answered at a time, so many wait in order, and the others are told when to come again."""

    def __init__(self, most: int, queue: int) -> None:
        self.most, self.queue = most, queue
        self.running = self.waiting = 0
        self._free = asyncio.Semaphore(most)
        self._seconds = 1.0  # that an answer takes, smoothed

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A place, as long as the block lasts."""
        if self._free.locked() and self.waiting >= self.queue:
            raise self._busy()
        self.waiting += 1
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise self._busy() from None
        finally:
            self.waiting -= 1
        self.running += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds += 0.2 * (time.monotonic() - began - self._seconds)
            self.running -= 1
            self._free.release()

    def _busy(self) -> ApiError:
        """When all who wait now will have been answered, about."""
        again = min(
            LONGEST_RETRY, max(1, math.ceil(self._seconds * (self.waiting + 1) / self.most))
        )
        said = f"every place is taken and {self.waiting} wait: try again in {again} s"
        return ApiError(429, said, "busy", retry_after=again)
