"""Every HTTP call of a coordinator, in one table.

The coordinator's routes, both clients (web/client.py) and the reference in the docs follow from
it. A row names the method of `Calls` that answers it, so to add a call is to add a row and write
that method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from blocktrain.protocol.ledger import LedgerPage
from blocktrain.protocol.messages import (
    DIGEST_HEADER,
    TICKET_HEADER,
    WORKER_HEADER,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    Kick,
    Manifest,
    Message,
    StageList,
    StageNotice,
    Submission,
    SubmitReply,
    TaskReply,
    TaskRequest,
    UploadState,
)
from blocktrain.protocol.status import Status

Needs = Literal["nothing", "token", "ticket", "operator"]
"""The join token (if the run has one); also the ticket of the task; the operator's token."""
JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"
OutT = TypeVar("OutT", bound=Message | None)


@dataclass(frozen=True)
class Argument:
    """A value outside the body."""

    name: str
    place: Literal["path", "query", "header"]
    kind: type[int] | type[str]
    header: str = ""
    default: int | None = None


@dataclass(frozen=True)
class Call(Generic[OutT]):
    """One row."""

    name: str
    """The method of `Calls`; a call of the page or of operators' tools has only a name."""
    method: Literal["GET", "POST", "PUT"]
    path: str
    request: type[Message] | None
    reply: type[OutT] | None
    """None, if `content` is JSON: the answer is {"ok": true}."""
    needs: Needs
    about: str
    arguments: tuple[Argument, ...] = ()
    body: Literal["", "application/json", "application/octet-stream"] = ""
    content: str = JSON
    """Content type of the answer."""

    def __post_init__(self) -> None:
        if self.request is not None:
            object.__setattr__(self, "body", JSON)


_TASK = Argument("task", "path", int)
_TICKET = Argument("ticket", "header", str, TICKET_HEADER)

MANIFEST = Call(
    "manifest",
    "GET",
    "/v1/run",
    None,
    Manifest,
    "token",
    "The run's settings and the newest version of every block, signed by the coordinator.",
)
JOIN = Call(
    "join",
    "POST",
    "/v1/join",
    Join,
    JoinReply,
    "token",
    "A worker joins and gets its first task.",
)
NEXT_TASK = Call(
    "next_task",
    "POST",
    "/v1/tasks",
    TaskRequest,
    TaskReply,
    "token",
    "The next task of a worker, or how long to wait and why.",
)
HEARTBEAT = Call(
    "heartbeat",
    "POST",
    "/v1/heartbeat",
    Heartbeat,
    HeartbeatReply,
    "token",
    "A worker reports its progress and learns whether its task still counts.",
)
UPLOAD_STATE = Call(
    "upload_state",
    "GET",
    "/v1/uploads/{task}",
    None,
    UploadState,
    "ticket",
    "The chunks of a task's payload that have arrived.",
    (_TASK, _TICKET),
)
PUT_CHUNK = Call(
    "put_chunk",
    "PUT",
    "/v1/uploads/{task}/{index}",
    None,
    UploadState,
    "ticket",
    "One chunk of a task's payload; sending it again is harmless.",
    (
        _TASK,
        Argument("index", "path", int),
        _TICKET,
        Argument("digest", "header", str, DIGEST_HEADER),
    ),
    BYTES,
)
SUBMIT = Call(
    "submit",
    "POST",
    "/v1/updates",
    Submission,
    SubmitReply,
    "token",
    "A signed update, after its chunks; the answer is a signed receipt and the next task.",
)
BLOB: Call[None] = Call(
    "blob",
    "GET",
    "/v1/blobs/{name}",
    None,
    None,
    "token",
    "Immutable bytes by their sha256: weights and corpus. `Range: bytes=START-` resumes.",
    (
        Argument("name", "path", str),
        Argument("start", "header", int, "Range", 0),
        Argument("worker", "header", str, WORKER_HEADER),
    ),
    content=BYTES,
)
STATUS = Call(
    "status",
    "GET",
    "/v1/status",
    None,
    Status,
    "token",
    "The state of blocks, rounds and workers, and all bytes in and out.",
)
LEDGER = Call(
    "ledger",
    "GET",
    "/v1/ledger",
    None,
    LedgerPage,
    "token",
    "A page of the public record, from the entry after number `after` on.",
    (Argument("after", "query", int, default=0),),
)
KICK: Call[None] = Call(
    "kick",
    "POST",
    "/v1/kick",
    Kick,
    None,
    "operator",
    "Removes a worker from the run for good.",
)
ANNOUNCE_STAGE: Call[None] = Call(
    "announce_stage",
    "POST",
    "/v1/stages",
    StageNotice,
    None,
    "token",
    "A stage says where it serves; the notice expires unless it is repeated.",
)
STAGES = Call(
    "stages",
    "GET",
    "/v1/stages",
    None,
    StageList,
    "token",
    "The stages that announced themselves within the last seconds.",
)

CALLS: tuple[Call[Any], ...] = (
    MANIFEST,
    JOIN,
    NEXT_TASK,
    HEARTBEAT,
    UPLOAD_STATE,
    PUT_CHUNK,
    SUBMIT,
    BLOB,
    STATUS,
    LEDGER,
    KICK,
    ANNOUNCE_STAGE,
    STAGES,
)

EVENTS: Call[None] = Call(
    "events",
    "GET",
    "/v1/events",
    None,
    None,
    "token",
    "Server-sent events: the history after event number `after`, then live"
    " (`follow=0` ends after the history).",
    (Argument("after", "query", int, default=0), Argument("follow", "query", int, default=1)),
    content="text/event-stream",
)
METRICS: Call[None] = Call(
    "metrics",
    "GET",
    "/metrics",
    None,
    None,
    "token",
    "The run and its server in Prometheus' text format.",
    content="text/plain",
)
HEALTH: Call[None] = Call(
    "health",
    "GET",
    "/healthz",
    None,
    None,
    "nothing",
    "Whether the process answers, whether there is a run, and whether the run is finished.",
)
REPLAY: Call[None] = Call(
    "replay",
    "GET",
    "/v1/replay",
    None,
    None,
    "nothing",
    "Whether the page shows a live run or a replay of its log.",
)
PAGE: Call[None] = Call(
    "page",
    "GET",
    "/",
    None,
    None,
    "nothing",
    "The dashboard; its files are under /page/.",
    content="text/html",
)

OPENAPI: Call[None] = Call(
    "openapi",
    "GET",
    "/openapi.json",
    None,
    None,
    "nothing",
    "These calls and their messages as OpenAPI 3.1.",
)

WATCH_CALLS: tuple[Call[None], ...] = (EVENTS, METRICS, HEALTH, REPLAY, PAGE, OPENAPI)


class Calls(Protocol):
    """What answers the calls: a coordinator, or a client that reaches one."""

    def manifest(self) -> Manifest: ...

    def join(self, message: Join) -> JoinReply: ...

    def next_task(self, message: TaskRequest) -> TaskReply: ...

    def heartbeat(self, message: Heartbeat) -> HeartbeatReply: ...

    def upload_state(self, task: int, ticket: str) -> UploadState: ...

    def put_chunk(
        self, task: int, index: int, ticket: str, content: bytes, digest: str
    ) -> UploadState: ...

    def submit(self, message: Submission) -> SubmitReply: ...

    def blob(self, name: str, start: int = 0, worker: str = "") -> Iterator[bytes]: ...

    def status(self) -> Status: ...

    def ledger(self, after: int = 0) -> LedgerPage: ...

    def kick(self, message: Kick) -> None: ...
