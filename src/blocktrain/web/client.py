"""The clients of a coordinator: over HTTP, or in the same process.

A call gives a message, or raises `Refused` (the coordinator's typed no) or `Unreachable` (no
answer: try again later).
"""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx2
from pydantic import ValidationError

from blocktrain.clock import Clock, SystemClock
from blocktrain.errors import BlockTrainError, Damaged, Unreachable, WrongBytes
from blocktrain.files import sync_folder
from blocktrain.protocol import calls
from blocktrain.protocol.calls import Call, Calls
from blocktrain.protocol.ledger import LedgerPage
from blocktrain.protocol.messages import (
    MAX_REPLY,
    WORKER_HEADER,
    Blob,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    Kick,
    Manifest,
    Message,
    Refusal,
    StageList,
    StageNotice,
    Submission,
    SubmitReply,
    TaskReply,
    TaskRequest,
    UploadState,
    read,
    write,
)
from blocktrain.protocol.refusals import Refused, Then
from blocktrain.protocol.status import Status
from blocktrain.protocol.transfer import range_header, sha256

R = TypeVar("R", bound=Message | None)
M = TypeVar("M", bound=Message)
FIRST_IN_FLIGHT, MOST_IN_FLIGHT = 2, 8  # chunks of an upload on their way at a time
BRISK_SECONDS = 2.0  # a chunk that takes longer is on a slow connection


class Client(ABC):
    """The calls of protocol/calls.py, made through `_call`. Implements `Calls`."""

    @abstractmethod
    def _call(
        self,
        call: Call[R],
        *arguments: int | str,
        message: Message | None = None,
        content: bytes = b"",
    ) -> R:
        """One call; its arguments are in the order of the table."""

    @abstractmethod
    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        """Bytes from `start` on. The worker's id is for the byte counters."""

    def manifest(self) -> Manifest:
        return self._call(calls.MANIFEST)

    def join(self, message: Join) -> JoinReply:
        return self._call(calls.JOIN, message=message)

    def next_task(self, message: TaskRequest) -> TaskReply:
        return self._call(calls.NEXT_TASK, message=message)

    def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        return self._call(calls.HEARTBEAT, message=message)

    def upload_state(self, task: int, ticket: str) -> UploadState:
        return self._call(calls.UPLOAD_STATE, task, ticket)

    def put_chunk(
        self, task: int, index: int, ticket: str, content: bytes, digest: str
    ) -> UploadState:
        return self._call(calls.PUT_CHUNK, task, index, ticket, digest, content=content)

    def submit(self, message: Submission) -> SubmitReply:
        return self._call(calls.SUBMIT, message=message)

    def status(self) -> Status:
        return self._call(calls.STATUS)

    def ledger(self, after: int = 0) -> LedgerPage:
        return self._call(calls.LEDGER, after)

    def kick(self, message: Kick) -> None:
        return self._call(calls.KICK, message=message)


class LocalClient(Client):
    """A coordinator in this process.

    Every message goes through its bytes, so that both clients see the same refusals.
    """

    def __init__(self, coordinator: Calls) -> None:
        self._coordinator = coordinator

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        return self._coordinator.blob(name, start, worker)

    def _call(
        self,
        call: Call[R],
        *arguments: int | str,
        message: Message | None = None,
        content: bytes = b"",
    ) -> R:
        kwargs: dict[str, object] = {
            argument.name: value for argument, value in zip(call.arguments, arguments, strict=True)
        }
        if call.body == calls.BYTES:
            kwargs["content"] = content
        if message is not None:
            kwargs["message"] = _copy(message)
        reply = getattr(self._coordinator, call.name)(**kwargs)
        return reply if call.reply is None else _copy(reply)


def _copy(message: M) -> M:
    return read(type(message), write(message), MAX_REPLY)


class HttpClient(Client):
    """A coordinator somewhere else.

    Calls are safe to repeat; how long that makes sense, the caller knows.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ca: Path | None = None,
        timeout: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self.url, self._clock = url.rstrip("/"), clock or SystemClock()
        if not self.url.startswith(("http://", "https://")):
            raise BlockTrainError(
                f"{url!r} is not the address of a coordinator; it looks like http://host:port"
            )
        headers = {
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        # To read the trusted certificates takes a fifth of a second: only where they are needed.
        verify = _trust(ca) if ca else self.url.startswith("https:")
        # Shorter than the server's keep-alive, so that it never closes a connection in use.
        limits = httpx2.Limits(keepalive_expiry=20.0)
        self._http = httpx2.Client(
            base_url=self.url, headers=headers, timeout=timeout, verify=verify, limits=limits
        )

    def close(self) -> None:
        self._http.close()

    def manifest(self) -> Manifest:
        """An expired one is an error: a mirror could go on serving it for ever."""
        manifest = super().manifest()
        manifest.require_current(int(1000 * self._clock.time()))
        return manifest

    def announce_stage(self, notice: StageNotice) -> None:
        return self._call(calls.ANNOUNCE_STAGE, message=notice)

    def stages(self) -> StageList:
        return self._call(calls.STAGES)

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        headers = {
            **({"Range": range_header(start)} if start else {}),
            **({WORKER_HEADER: worker} if worker else {}),
        }
        path = calls.BLOB.path.format(name=name)
        with (
            _translate_errors(self.url),
            self._http.stream(calls.BLOB.method, path, headers=headers) as response,
        ):
            if response.status_code != (206 if start else 200):
                response.read()
                raise _refusal(response)
            # Raw pieces: what is collected into larger ones is lost with the connection.
            yield from response.iter_raw()

    def _call(
        self,
        call: Call[R],
        *arguments: int | str,
        message: Message | None = None,
        content: bytes = b"",
    ) -> R:
        places: dict[str, dict[str, str]] = {"path": {}, "query": {}, "header": {}}
        for argument, value in zip(call.arguments, arguments, strict=True):
            places[argument.place][argument.header or argument.name] = str(value)
        headers = {**places["header"], **({"Content-Type": call.body} if call.body else {})}
        with _translate_errors(self.url):
            response = self._http.request(
                call.method,
                call.path.format(**places["path"]),
                params=places["query"] or None,
                headers=headers,
                content=(content if message is None else write(message)) if call.body else None,
            )
        if response.status_code >= 400:
            raise _refusal(response)
        if call.reply is None:
            return None  # type: ignore[return-value]
        try:
            return read(call.reply, response.content, MAX_REPLY)  # type: ignore[type-var]
        except Refused as error:
            raise Unreachable(
                f"{response.url} does not speak this protocol ({error.detail})"
            ) from None


def _trust(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise BlockTrainError(
            f"cannot use the certificate {ca}: {error.strerror or error}"
        ) from None


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        raise Unreachable(
            f"no answer from {url} ({str(error) or type(error).__name__});"
            " is the coordinator running?"
        ) from None


def _refusal(response: httpx2.Response) -> BlockTrainError:
    """The coordinator's refusal. A proxy's error page counts as no answer."""
    try:
        refusal = Refusal.model_validate_json(response.content)
    except ValidationError:
        return Unreachable(
            f"{response.url} answered {response.status_code} without a reason; is it a coordinator?"
        )
    return Refused(refusal.code, sentence=refusal.sentence)


def fetch_bytes(client: Calls, blob: Blob, limit: int) -> bytes:
    """A small blob, after its hash has been checked."""
    if blob.length > limit:
        raise Damaged(f"blob {blob.sha256[:12]}... has {blob.length} bytes, {limit} are allowed")
    content = bytearray()
    for piece in client.blob(blob.sha256):
        content += piece
        if len(content) > blob.length:
            break
    if sha256(bytes(content)) != blob.sha256:
        raise Damaged(
            f"blob {blob.sha256} arrives with other bytes than its name says; it is damaged at "
            "the coordinator: its operator restores it from a backup"
        )
    return bytes(content)


def fetch(
    client: Calls,
    blob: Blob,
    target: Path,
    *,
    worker: str = "",
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """A blob as a file: it is at `target` once its hash is right. Resumes an earlier transfer."""
    if target.exists() and target.stat().st_size == blob.length:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    with partial.open("ab") as out:
        if out.tell() > blob.length:
            out.truncate(0)
        if out.tell() < blob.length:
            for piece in client.blob(blob.sha256, out.tell(), worker):
                if out.tell() + len(piece) > blob.length:
                    break  # more than was announced: the hash will be wrong
                out.write(piece)
                progress(len(piece))
        out.flush()
        os.fsync(out.fileno())
    if partial.stat().st_size < blob.length:
        raise Unreachable(f"the transfer of blob {blob.sha256[:12]}... was cut off")
    with partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.sha256:
        partial.unlink()
        raise WrongBytes(
            f"blob {blob.sha256[:12]}... arrived with wrong bytes; it is fetched again"
        )
    partial.replace(target)
    sync_folder(target.parent)
    return target


def upload(
    client: Calls,
    task: int,
    ticket: str,
    chunks: list[bytes],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Send all chunks that the coordinator lacks, several at a time; call it again to resume."""
    have = set(client.upload_state(task, ticket).have)
    missing = deque(index for index in range(len(chunks)) if index not in have)
    for index in have.intersection(range(len(chunks))):
        progress(len(chunks[index]))

    def put(index: int) -> int:
        digest = sha256(chunks[index])
        try:
            client.put_chunk(task, index, ticket, chunks[index], digest)
        except Unreachable:  # the connection broke: send this chunk again over a new one
            client.put_chunk(task, index, ticket, chunks[index], digest)
        return len(chunks[index])

    room, out = FIRST_IN_FLIGHT, dict[Future[int], float]()
    pool = ThreadPoolExecutor(MOST_IN_FLIGHT, thread_name_prefix=f"upload-{task}")
    try:
        while missing or out:
            while missing and len(out) < room:
                out[pool.submit(put, missing.popleft())] = time.monotonic()
            for future in wait(out, return_when=FIRST_COMPLETED).done:
                took = time.monotonic() - out.pop(future)
                progress(future.result())
                room = next_room(room, took)
    finally:
        pool.shutdown()  # chunks on their way arrive or fail


def next_room(room: int, seconds: float) -> int:
    """How many chunks may be on their way after one took so long.

    More fill a line with a long round trip; fewer keep chunks on a slow line from timing out.
    """
    return min(room + 1, MOST_IN_FLIGHT) if seconds <= BRISK_SECONDS else max(1, room - 1)


def retry_later(error: BlockTrainError) -> bool:
    """Whether the same call may succeed after a pause."""
    refused = isinstance(error, Refused) and error.rule.then is Then.RETRY
    return isinstance(error, Unreachable) or refused
