"""The calls of the protocol, as a worker makes them: over HTTP, or directly on a coordinator in the same process.

A call gives a message, or raises `Refused` (the coordinator's typed no) or `Unreachable` (nobody answered: try again later).
"""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import httpx2
from pydantic import ValidationError

from blocktrain.errors import BlockTrainError, Unreachable
from blocktrain.files import sync_folder
from blocktrain.protocol.ledger import LedgerPage
from blocktrain.protocol.messages import (
    DIGEST_HEADER,
    MAX_REPLY,
    TICKET_HEADER,
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
    Submission,
    SubmitReply,
    TaskReply,
    TaskRequest,
    UploadState,
    read,
    write,
)
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.stages import StageList, StageNotice
from blocktrain.protocol.status import Status
from blocktrain.protocol.transfer import range_header, sha256

R = TypeVar("R", bound=Message)
FIRST_IN_FLIGHT, MOST_IN_FLIGHT = 2, 8  # chunks of an upload on their way at a time
BRISK_SECONDS = 2.0  # a chunk that takes longer is on a slow line


class Calls(Protocol):
    """What a coordinator answers. `Coordinator` has these methods, and so has everything that stands for one."""

    def manifest(self) -> Manifest:
        """GET /v1/run."""

    def join(self, message: Join) -> JoinReply:
        """POST /v1/join."""

    def next_task(self, message: TaskRequest) -> TaskReply:
        """POST /v1/tasks."""

    def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        """POST /v1/heartbeat."""

    def upload_state(self, task: int, ticket: str) -> UploadState:
        """GET /v1/uploads/{task}."""

    def put_chunk(
        self, task: int, index: int, ticket: str, content: bytes, digest: str
    ) -> UploadState:
        """PUT /v1/uploads/{task}/{index}."""

    def submit(self, message: Submission) -> SubmitReply:
        """POST /v1/updates."""

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        """GET /v1/blobs/{sha256}, from byte `start` on; the worker's id is for the byte counters."""

    def status(self) -> Status:
        """GET /v1/status."""

    def ledger(self, after: int = 0) -> LedgerPage:
        """GET /v1/ledger."""

    def kick(self, message: Kick) -> None:
        """POST /v1/kick."""


class LocalClient:
    """A coordinator in this process. Every message goes through its bytes, so that both clients see the same refusals."""

    def __init__(self, coordinator: Calls) -> None:
        self._coordinator = coordinator

    def manifest(self) -> Manifest:
        """GET /v1/run."""
        return _again(self._coordinator.manifest())

    def join(self, message: Join) -> JoinReply:
        """POST /v1/join."""
        return _again(self._coordinator.join(_again(message)))

    def next_task(self, message: TaskRequest) -> TaskReply:
        """POST /v1/tasks."""
        return _again(self._coordinator.next_task(_again(message)))

    def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        """POST /v1/heartbeat."""
        return _again(self._coordinator.heartbeat(_again(message)))

    def upload_state(self, task: int, ticket: str) -> UploadState:
        """GET /v1/uploads/{task}."""
        return _again(self._coordinator.upload_state(task, ticket))

    def put_chunk(
        self, task: int, index: int, ticket: str, content: bytes, digest: str
    ) -> UploadState:
        """PUT /v1/uploads/{task}/{index}."""
        return _again(self._coordinator.put_chunk(task, index, ticket, content, digest))

    def submit(self, message: Submission) -> SubmitReply:
        """POST /v1/updates."""
        return _again(self._coordinator.submit(_again(message)))

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        """GET /v1/blobs/{sha256}."""
        return self._coordinator.blob(name, start, worker)

    def status(self) -> Status:
        """GET /v1/status."""
        return _again(self._coordinator.status())

    def ledger(self, after: int = 0) -> LedgerPage:
        """GET /v1/ledger."""
        return _again(self._coordinator.ledger(after))

    def kick(self, message: Kick) -> None:
        """POST /v1/kick."""
        self._coordinator.kick(_again(message))


def _again(message: R) -> R:
    return read(type(message), write(message), MAX_REPLY)


class HttpClient:
    """A coordinator somewhere else. Calls are safe to repeat, but only the caller knows how long that makes sense."""

    def __init__(
        self, url: str, token: str = "", *, ca: Path | None = None, timeout: float = 30.0
    ) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise BlockTrainError(
                f"{url!r} is not the address of a coordinator; it looks like http://host:port"
            )
        headers = {
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        verify = (
            _trust(ca) if ca else self.url.startswith("https:")
        )  # a fifth of a second to read whom to trust, where nobody is asked
        # Shorter than the server's keep-alive: a connection must not be closed while a request is on its way.
        limits = httpx2.Limits(keepalive_expiry=20.0)
        self._http = httpx2.Client(
            base_url=self.url, headers=headers, timeout=timeout, verify=verify, limits=limits
        )

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def manifest(self) -> Manifest:
        """GET /v1/run."""
        return self._get(Manifest, "/v1/run")

    def join(self, message: Join) -> JoinReply:
        """POST /v1/join."""
        return self._post(JoinReply, "/v1/join", message)

    def next_task(self, message: TaskRequest) -> TaskReply:
        """POST /v1/tasks."""
        return self._post(TaskReply, "/v1/tasks", message)

    def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        """POST /v1/heartbeat."""
        return self._post(HeartbeatReply, "/v1/heartbeat", message)

    def upload_state(self, task: int, ticket: str) -> UploadState:
        """GET /v1/uploads/{task}."""
        return self._get(UploadState, f"/v1/uploads/{task}", {TICKET_HEADER: ticket})

    def put_chunk(
        self, task: int, index: int, ticket: str, content: bytes, digest: str
    ) -> UploadState:
        """PUT /v1/uploads/{task}/{index}."""
        headers = {
            TICKET_HEADER: ticket,
            DIGEST_HEADER: digest,
            "Content-Type": "application/octet-stream",
        }
        with _reaching(self.url):
            return _message(
                UploadState,
                self._http.put(f"/v1/uploads/{task}/{index}", content=content, headers=headers),
            )

    def submit(self, message: Submission) -> SubmitReply:
        """POST /v1/updates."""
        return self._post(SubmitReply, "/v1/updates", message)

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]:
        """GET /v1/blobs/{sha256}, from byte `start` on."""
        headers = {
            **({"Range": range_header(start)} if start else {}),
            **({WORKER_HEADER: worker} if worker else {}),
        }
        with (
            _reaching(self.url),
            self._http.stream("GET", f"/v1/blobs/{name}", headers=headers) as response,
        ):
            if response.status_code != (206 if start else 200):
                response.read()
                raise _refused(response)
            yield from response.iter_raw()  # as it comes: what is collected into larger pieces is lost with the line

    def status(self) -> Status:
        """GET /v1/status."""
        return self._get(Status, "/v1/status")

    def ledger(self, after: int = 0) -> LedgerPage:
        """GET /v1/ledger."""
        return self._get(LedgerPage, f"/v1/ledger?after={after}")

    def kick(self, message: Kick) -> None:
        """POST /v1/kick."""
        self._tell("/v1/kick", message)

    def tell_stage(self, notice: StageNotice) -> None:
        """POST /v1/stages."""
        self._tell("/v1/stages", notice)

    def stages(self) -> StageList:
        """GET /v1/stages."""
        return self._get(StageList, "/v1/stages")

    def _tell(self, path: str, message: Message) -> None:
        with _reaching(self.url):
            response = self._http.post(
                path, content=write(message), headers={"Content-Type": "application/json"}
            )
        if response.status_code >= 400:
            raise _refused(response)

    def _get(self, kind: type[R], path: str, headers: dict[str, str] | None = None) -> R:
        with _reaching(self.url):
            return _message(kind, self._http.get(path, headers=headers))

    def _post(self, kind: type[R], path: str, message: Message) -> R:
        with _reaching(self.url):
            return _message(
                kind,
                self._http.post(
                    path, content=write(message), headers={"Content-Type": "application/json"}
                ),
            )


def _trust(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise BlockTrainError(
            f"cannot use the certificate {ca}: {error.strerror or error}"
        ) from None


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        raise Unreachable(
            f"no answer from {url} ({str(error) or type(error).__name__}); is the coordinator running?"
        ) from None


def _message(kind: type[R], response: httpx2.Response) -> R:
    if response.status_code >= 400:
        raise _refused(response)
    try:
        return read(kind, response.content, MAX_REPLY)
    except Refused as error:
        raise Unreachable(f"{response.url} does not speak this protocol ({error.detail})") from None


def _refused(response: httpx2.Response) -> BlockTrainError:
    """The coordinator's no; an error page of something in between counts as nobody at home."""
    try:
        found = Refusal.model_validate_json(response.content)
    except ValidationError:
        return Unreachable(
            f"{response.url} answered {response.status_code} without a reason; is it a coordinator?"
        )
    return Refused(found.code, sentence=found.sentence)


def fetch(
    client: Calls,
    blob: Blob,
    target: Path,
    *,
    worker: str = "",
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """A blob as a file, in `target` when it is whole and its hash is right; continues after an interruption where it ended."""
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
                    break  # more than was promised: the hash will say what it was
                out.write(piece)
                progress(len(piece))
        out.flush()
        os.fsync(out.fileno())
    if partial.stat().st_size < blob.length:
        raise Unreachable(f"the transfer of blob {blob.sha256[:12]}... was cut off")
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != blob.sha256:
        partial.unlink()
        raise Unreachable(
            f"the blob {blob.sha256[:12]}... arrived with other bytes; it is fetched again"
        )
    partial.replace(target)
    sync_folder(target.parent)
    return target


def upload(
    client: Calls,
    task: int,
    ticket: str,
    chunks: list[bytes],
    sent: Callable[[int], None] = lambda _: None,
) -> None:
    """All chunks that the coordinator does not have yet, several at a time; after an interruption just call it again."""
    have = set(client.upload_state(task, ticket).have)
    missing = deque(index for index in range(len(chunks)) if index not in have)
    for index in have.intersection(range(len(chunks))):
        sent(len(chunks[index]))

    def put(index: int) -> int:
        digest = sha256(chunks[index])
        try:
            client.put_chunk(task, index, ticket, chunks[index], digest)
        except Unreachable:  # a line that was cut: over a new one this chunk alone is sent again
            client.put_chunk(task, index, ticket, chunks[index], digest)
        return len(chunks[index])

    room, out = FIRST_IN_FLIGHT, dict[Future[int], float]()
    pool = ThreadPoolExecutor(MOST_IN_FLIGHT, thread_name_prefix=f"upload-{task}")
    try:
        while missing or out:
            while missing and len(out) < room:
                out[pool.submit(put, missing.popleft())] = time.monotonic()
            for done in wait(out, return_when=FIRST_COMPLETED).done:
                took = time.monotonic() - out.pop(done)
                sent(done.result())
                room = next_room(room, took)
    finally:
        pool.shutdown()  # those on their way arrive, or fail: they need not be sent again


def next_room(room: int, seconds: float) -> int:
    """How many chunks may be on their way after one took so long: a long line is filled, a slow one not shared until they time out."""
    return min(room + 1, MOST_IN_FLIGHT) if seconds <= BRISK_SECONDS else max(1, room - 1)


def retry_later(error: BlockTrainError) -> bool:
    """Whether the same call may succeed after a pause."""
    return isinstance(error, Unreachable) or (
        isinstance(error, Refused)
        and error.code in (Code.BUSY, Code.STORAGE_FAILED, Code.TOO_SLOW, Code.TOO_MANY_REQUESTS)
    )
