"""Every HTTP message, typed and limited. docs/protocol.md explains them.

Unknown fields, wrong types and values out of range are refused. The join token is a header
(`Authorization: Bearer ...`), never part of a body: it is checked before a body is read, and it
reaches neither the ledger nor a signature.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from blocktrain.errors import RunError
from blocktrain.protocol.compression import Method
from blocktrain.protocol.refusals import MAX_SENTENCE, Code, Refused, Then
from blocktrain.protocol.transfer import MAX_CHUNK_BYTES, MAX_CHUNKS, MIN_CHUNK_BYTES, Plan

PROTOCOL = 3
MAX_JSON = 1 << 16  # of a request
MAX_REPLY = 1 << 22  # of an answer
MAX_BLOCKS = 256
MAX_SHARDS = 4096  # of a task
MAX_CHAIN = 32  # deltas to one version that a task names
MAX_STAGES = 256
STAGE_NOTICE_SECONDS = 5.0  # between two notices of a stage
STAGE_EXPIRY_SECONDS = 20.0  # that a stage is listed after its last one
TICKET_HEADER = "BlockTrain-Ticket"  # of a chunk: the ticket in the task
DIGEST_HEADER = "BlockTrain-SHA256"  # of a chunk: its sha256
WORKER_HEADER = "BlockTrain-Worker"  # of a download: whose bytes these are, for the counters

CLOCK_SKEW = 3_600_000  # milliseconds by which the clocks of two machines may differ

_EXACT = 2**53 - 1  # the largest integer that every JSON reader keeps

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")]  # empty: not signed yet
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
RunId = Hex32
WorkerId = Hex32  # the first 32 digits of the sha256 of the public key
Nonce = Hex32
Name = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._:@/+ -]*$")]
Sentence = Annotated[str, Field(max_length=MAX_SENTENCE)]
BlockIndex = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
Number = Annotated[int, Field(ge=1, le=_EXACT)]
Count = Annotated[int, Field(ge=0, le=_EXACT)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
LossValue = Annotated[float, Field(ge=0, le=1e9)]
Weight = Annotated[float, Field(ge=0, le=1)]
Speed = Annotated[float, Field(ge=0, le=1e9)]
Settings = Annotated[
    dict[
        Annotated[str, Field(max_length=64, pattern=r"^[a-z][a-z0-9_]*$")],
        bool | int | float | Annotated[str, Field(max_length=200)],
    ],
    Field(max_length=200),
]


class Message(BaseModel):
    """Strict, frozen, without unknown fields, NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Signed(Message):
    """A message with an ed25519 signature over all other fields."""

    signature: Signature = ""


M = TypeVar("M", bound=Message)


def read(kind: type[M], raw: bytes, limit: int = MAX_JSON) -> M:
    """The message in a body, or a refusal that names the first fields that are wrong."""
    if len(raw) > limit:
        raise Refused(Code.TOO_LARGE, f"a message of {len(raw)} bytes, {limit} are allowed")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)[:3]
        parts = [
            f"{'.'.join(str(part) for part in item['loc'])[:80] or 'body'} {item['msg'][:100]}"
            for item in problems
        ]
        raise Refused(Code.MALFORMED, f"{kind.__name__}: {'; '.join(parts)}") from None


def write(message: Message) -> bytes:
    """The message as the body of a request or an answer."""
    return message.model_dump_json().encode()


def update_id(task: int, payload_sha256: str) -> str:
    """An update's id and idempotency key: sha256 of `task:payload_sha256`."""
    return hashlib.sha256(f"{task}:{payload_sha256}".encode()).hexdigest()


def as_name(text: str) -> str:
    """A text for people as a `Name`."""
    return re.sub(r"[^A-Za-z0-9._:@/+ -]", "-", text)[-64:]


class Blob(Message):
    """Immutable bytes by content, at GET /v1/blobs/{sha256}."""

    sha256: Sha256
    length: Count


class CorpusBlobs(Message):
    """What a run's corpus consists of; the name is for people."""

    name: Name
    index: Blob
    """Lists the shards. Each of them is a blob, too; tasks name those that they read."""
    tokenizer: Blob | None = None
    """The tokenizer.json that made the tokens; None for bytes."""


class BlockVersion(Message):
    """One version of a block and its weights."""

    block: BlockIndex
    version: Count
    weights: Blob


class VersionDelta(Message):
    """How a version follows from the one before it."""

    block: BlockIndex
    version: Number
    parent: Sha256
    """The weights of the version before."""
    weights: Sha256
    """The weights of this version."""
    delta: Blob
    """A payload like that of an update. Added to the parent it gives the weights, to the bit."""


def delta_path(
    target: str, deltas: Iterable[VersionDelta], held: Callable[[str], bool]
) -> tuple[VersionDelta, ...] | None:
    """The deltas from weights that are held to the weights `target`, in order; None: no way."""
    leading = {delta.weights: delta for delta in deltas}
    path: list[VersionDelta] = []
    while not held(target):
        if (step := leading.pop(target, None)) is None:
            return None
        path.append(step)
        target = step.parent
    return tuple(reversed(path))


class Lineage(Message):
    """After which task's end a worker's state begins; None is a fresh one."""

    optimizer: Number | None = None
    """The task that left the optimizer state."""
    residual: Number | None = None
    """The accepted task that left the compression residual."""


class Held(Lineage):
    """The state that a worker has of a block."""

    block: BlockIndex


class Join(Signed):
    """POST /v1/join: who comes, and what the machine can do."""

    protocol: Count
    public_key: PublicKey
    name: Name = ""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?|mps)$")]
    memory: Count
    """Bytes that training may use."""
    speed: Speed
    """Steps per second in the worker's own probe; 0 is not measured."""
    held: Held | None = None
    nonce: Nonce
    time: Count
    """The worker's clock in milliseconds since 1970: for people, never compared."""


class Order(Message):
    """The part of a task that decides what is computed.

    With it and the blobs anyone can compute the update again.
    """

    task: Number
    number: Count
    """Of the task within its block: unlike `task` it does not depend on other blocks."""
    block: BlockIndex
    base: Count
    """Version that is trained from."""
    weights: Blob
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    position: Annotated[int, Field(ge=0, lt=2**31)]
    """Step s reads batch position + s - start_step of the block's order of the corpus."""
    shards: Annotated[tuple[Blob, ...], Field(min_length=1, max_length=MAX_SHARDS)]
    """The shards of the corpus in which these batches are."""
    start_step: Annotated[int, Field(ge=0, lt=2**31)]
    steps: Annotated[int, Field(ge=1, lt=2**31)]
    """Steps start_step ... start_step + steps - 1 are made."""
    compression: Method
    continues: Lineage = Lineage()
    features: Annotated[tuple[BlockVersion, ...], Field(max_length=MAX_BLOCKS)] = ()
    """For the fusion block: the versions of the others that it reads."""

    @property
    def versions(self) -> tuple[BlockVersion, ...]:
        """All that must be there before the first step: its own base, and those that it reads."""
        own = BlockVersion(block=self.block, version=self.base, weights=self.weights)
        return (own, *self.features)


class Task(Order):
    """A lease on an order."""

    kind: Literal["task"] = "task"
    fence: Number
    """Grows with every lease of the same task; only the newest counts."""
    ticket: Hex32
    """Secret of this lease; sent with every chunk."""
    deadline_seconds: Seconds
    """Until the round closes, from now."""
    lease_seconds: Seconds
    """Until another worker may get the task, from now."""
    chunk_bytes: Annotated[int, Field(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    payload_limit: Count
    """Bytes that the payload may have."""
    alone: bool = False
    """In this run no other worker trains the block, so each version is made of one update."""
    deltas: Annotated[tuple[VersionDelta, ...], Field(max_length=MAX_BLOCKS * MAX_CHAIN)] = ()
    """The last deltas that lead to `weights` and to the versions in `features`. A worker that has
    one of the versions on the way fetches deltas, any other one whole weights."""

    @property
    def order(self) -> Order:
        """Without the lease: what the ledger keeps."""
        return Order(**{name: getattr(self, name) for name in Order.model_fields})


class Wait(Message):
    """Nothing to do now, and why."""

    kind: Literal["wait"] = "wait"
    seconds: Seconds
    code: Literal["no_work", "finished"]
    """no_work: ask again later, the reason says why. finished: leave."""
    reason: Sentence


Next = Annotated[Task | Wait, Field(discriminator="kind")]


class JoinReply(Message):
    """The run that was joined, and the first task."""

    protocol: Count
    run: RunId
    worker: WorkerId
    coordinator: PublicKey
    config: Settings
    fingerprint: Sha256
    corpus: CorpusBlobs
    next: Next


class TaskRequest(Signed):
    """POST /v1/tasks. While a task is leased, the answer is that task with the time left."""

    run: RunId
    worker: WorkerId
    fingerprint: Sha256
    held: Held | None = None
    speed: Speed
    leaving: bool = False
    """The worker goes: its open tasks are free at once, and the answer is `finished`."""
    nonce: Nonce


class TaskReply(Message):
    """The next task, or wait."""

    next: Next


class Heartbeat(Signed):
    """POST /v1/heartbeat: alive, and how far. It extends nothing."""

    run: RunId
    worker: WorkerId
    task: Number
    fence: Number
    step: Count
    """Steps of the task that are made."""
    loss: LossValue | None = None
    bytes: Count
    """Of the payload that are sent."""
    nonce: Nonce


class HeartbeatReply(Message):
    """Whether going on makes sense."""

    go_on: bool
    code: Code | None = None
    lease_seconds: Seconds
    deadline_seconds: Seconds


class UploadState(Message):
    """GET /v1/uploads/{task}, and the answer to a chunk: the chunks that are stored."""

    task: Number
    have: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=MAX_CHUNKS)], ...], Field(max_length=MAX_CHUNKS)
    ]


class Submission(Signed):
    """POST /v1/updates, after all chunks.

    The same (task, payload_sha256) always gets the same receipt.
    """

    run: RunId
    worker: WorkerId
    task: Number
    fence: Number
    block: BlockIndex
    base: Count
    payload_sha256: Sha256
    payload_length: Number
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)]
    steps: Number
    tokens: Number
    """Bytes of text that were predicted."""
    loss_before: LossValue
    """Mean loss of the first step."""
    loss_after: LossValue
    """Mean loss of the last step."""
    seconds: Seconds = 0.0
    """Spent on the steps alone, by the worker's clock; 0 is not measured.

    It sizes only the worker's own next tasks.
    """
    continued: Lineage
    """What the worker really continued; it may have lost what the task names."""
    lineage: Sha256
    """ledger.lineage: names the optimizer state at the end by the tasks it went through."""
    nonce: Nonce
    time: Count

    @property
    def update(self) -> str:
        """The update's id and idempotency key: sha256 of `task:payload_sha256`."""
        return update_id(self.task, self.payload_sha256)

    def plan(self, chunk_bytes: int) -> Plan:
        """The chunks of the payload; another number of chunks is refused."""
        plan = Plan(self.payload_length, chunk_bytes)
        if plan.chunks != self.chunks:
            raise Refused(
                Code.MALFORMED,
                f"{self.payload_length} bytes are {plan.chunks} chunks, not {self.chunks}",
            )
        return plan


class Receipt(Signed):
    """The coordinator's signed answer to a submission; the ledger records it."""

    run: RunId
    worker: WorkerId
    task: Number
    fence: Number
    block: BlockIndex
    base: Count
    payload_sha256: Sha256
    accepted: bool
    code: Code | None = None
    sentence: Sentence
    update: Sha256
    """Submission.update; updates are merged in the order of their ids."""
    staleness: Count = 0
    """Versions that were published since the base."""
    weight: Weight = 0.0
    """By staleness; in the mean an update counts with its tokens times this."""
    entry: Sha256
    """Hash of the ledger entry that records it."""
    time: Count

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.accepted != (self.code is None):
            raise ValueError("a refused update has a code, an accepted one has none")
        return self


class SubmitReply(Message):
    """The receipt and the next task in one answer."""

    receipt: Receipt
    next: Next


class Refusal(Message):
    """The body of every answer with a status of 400 or more."""

    code: Code
    sentence: Sentence
    then: Then
    retry_seconds: Seconds | None = None


def refusal(error: Refused, retry_seconds: float | None = None) -> Refusal:
    """The body for an error."""
    return Refusal(
        code=error.code, sentence=error.sentence, then=error.rule.then, retry_seconds=retry_seconds
    )


class Manifest(Signed):
    """GET /v1/run: what is current. Signed, so that a mirror cannot serve old or mixed data."""

    protocol: Count
    run: RunId
    coordinator: PublicKey
    number: Number
    """Length of the ledger; a client refuses a manifest below the highest it has seen."""
    head: Sha256
    """Hash of the ledger's entry of that number."""
    issued: Count
    expires: Count
    """Milliseconds since 1970, by the coordinator's clock."""
    config: Settings
    fingerprint: Sha256
    corpus: CorpusBlobs
    blocks: Annotated[tuple[BlockVersion, ...], Field(min_length=1, max_length=MAX_BLOCKS)]
    finished: bool = False

    def require_current(self, now: int) -> None:
        """RunError if it has expired, by a clock that may be an hour wrong."""
        late = now - self.expires - CLOCK_SKEW
        if late > 0:
            raise RunError(
                f"the run's manifest expired {(late + CLOCK_SKEW) / 3_600_000:.1f} hours ago: the "
                "clock here or at the coordinator is wrong (an hour is allowed), or somebody in "
                "between serves an old one; set both clocks, then ask the coordinator itself"
            )


class Kick(Message):
    """POST /v1/kick, with the operator's token."""

    worker: WorkerId
    reason: Sentence = ""


class StageNotice(Message):
    """POST /v1/stages: a stage says that it serves, and repeats this every few seconds.

    Only who knows the run's stage key can write one (protocol/handshake.py). Where and what the
    stage really is, it proves on its own connection.
    """

    address: Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z0-9.:\[\]_-]+:[0-9]{1,5}$")]
    """host:port, as others reach it."""
    model: Sha256
    """The hash of the model that it holds blocks of."""
    issued: Count
    """Milliseconds since 1970, by the stage's clock; every notice has a later one."""
    proof: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Of the stage key, over all other fields."""


class StageList(Message):
    """GET /v1/stages: the stages whose notice has not expired."""

    stages: Annotated[tuple[StageNotice, ...], Field(max_length=MAX_STAGES)]
