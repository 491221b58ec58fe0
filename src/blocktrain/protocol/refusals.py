"""Every refusal of a coordinator: a stable code, an HTTP status, a sentence, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from blocktrain.errors import BlockTrainError

MAX_SENTENCE = 500


class Code(StrEnum):
    """The stable names; a client may compare these, never the sentences."""

    BAD_TOKEN = "bad_token"
    BAD_SIGNATURE = "bad_signature"
    UNKNOWN_WORKER = "unknown_worker"
    KICKED = "kicked"
    WRONG_PROTOCOL = "wrong_protocol"
    WRONG_RUN = "wrong_run"
    WRONG_FINGERPRINT = "wrong_fingerprint"
    RUN_FINISHED = "run_finished"
    NOT_FOUND = "not_found"
    LENGTH_REQUIRED = "length_required"
    WRONG_ENCODING = "wrong_encoding"
    WRONG_HOST = "wrong_host"
    WRONG_ORIGIN = "wrong_origin"
    WRONG_TYPE = "wrong_type"
    WRONG_STAGE_KEY = "wrong_stage_key"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    MALFORMED = "malformed"
    REPLAYED = "replayed"
    DUPLICATE = "duplicate"
    TASK_ANSWERED = "task_answered"
    UNKNOWN_TASK = "unknown_task"
    UNKNOWN_BLOCK = "unknown_block"
    NOT_YOUR_TASK = "not_your_task"
    WRONG_BASE = "wrong_base"
    WRONG_STEPS = "wrong_steps"
    WRONG_WEIGHT = "wrong_weight"
    BLOCK_FINISHED = "block_finished"
    STALE_FENCE = "stale_fence"
    LEASE_EXPIRED = "lease_expired"
    TOO_STALE = "too_stale"
    MISSING_CHUNKS = "missing_chunks"
    HASH_MISMATCH = "hash_mismatch"
    WRONG_SHAPE = "wrong_shape"
    NOT_FINITE = "not_finite"
    OVER_QUOTA = "over_quota"
    DISK_LIMIT = "disk_limit"
    BUSY = "busy"
    TOO_MANY_REQUESTS = "too_many_requests"
    STORAGE_FAILED = "storage_failed"
    DAMAGED = "damaged"


class Then(StrEnum):
    """What a worker does after a refusal."""

    STOP = "stop"  # a person has to change something
    REJOIN = "rejoin"  # POST /v1/join, then go on
    NEXT = "next"  # drop this task and ask for another
    RESEND = "resend"  # send the payload's missing or damaged parts again
    RETRY = "retry"  # the same request again, after a pause


@dataclass(frozen=True)
class Rule:
    """How a code is answered."""

    status: int
    then: Then
    sentence: str


RULES: dict[Code, Rule] = {
    Code.BAD_TOKEN: Rule(
        401,
        Then.STOP,
        "the join token is missing or wrong; use the join command that the coordinator printed",
    ),
    Code.BAD_SIGNATURE: Rule(
        403,
        Then.STOP,
        "the signature does not fit the message and the key; sign with the key that joined",
    ),
    Code.UNKNOWN_WORKER: Rule(401, Then.REJOIN, "this run knows no such worker; join first"),
    Code.KICKED: Rule(
        403, Then.STOP, "the operator removed this worker from the run; ask the operator"
    ),
    Code.WRONG_PROTOCOL: Rule(
        409,
        Then.STOP,
        "the protocol numbers differ; install the coordinator's version of blocktrain",
    ),
    Code.WRONG_RUN: Rule(409, Then.REJOIN, "this message belongs to another run; join this one"),
    Code.WRONG_FINGERPRINT: Rule(
        409,
        Then.REJOIN,
        "the settings differ from those of the run; take the ones in the join reply",
    ),
    Code.RUN_FINISHED: Rule(
        410, Then.STOP, "the run is finished; fetch the model with `blocktrain pull`"
    ),
    Code.NOT_FOUND: Rule(
        404, Then.NEXT, "there is nothing under this name; ask for a task and use the names in it"
    ),
    Code.LENGTH_REQUIRED: Rule(
        411, Then.STOP, "the body needs an exact Content-Length; do not send it chunked"
    ),
    Code.WRONG_ENCODING: Rule(
        415, Then.STOP, "bodies are sent as they are; leave Content-Encoding out"
    ),
    Code.WRONG_HOST: Rule(
        421,
        Then.STOP,
        "this server does not answer under that name; use its address, or start it with"
        " --allow-host NAME",
    ),
    Code.WRONG_ORIGIN: Rule(
        403,
        Then.STOP,
        "web pages from elsewhere may not call this server; open its own page, and let a proxy"
        " pass the Host header on",
    ),
    Code.WRONG_TYPE: Rule(
        415,
        Then.STOP,
        "a body names its type; send JSON as application/json and chunks as"
        " application/octet-stream",
    ),
    Code.WRONG_STAGE_KEY: Rule(
        403,
        Then.STOP,
        "only who knows the stage key may announce a stage; start it with --key and the file"
        " stage.key from the coordinator's folder",
    ),
    Code.TOO_LARGE: Rule(
        413,
        Then.NEXT,
        "this is larger than the run allows; send what the task describes and nothing else",
    ),
    Code.TOO_SLOW: Rule(
        408, Then.RETRY, "the body did not arrive in time; send smaller chunks or use a faster line"
    ),
    Code.MALFORMED: Rule(
        400, Then.NEXT, "the message cannot be read; compare it with docs/protocol.md"
    ),
    Code.REPLAYED: Rule(
        409,
        Then.NEXT,
        "this nonce was used before for something else; draw a new one for every message",
    ),
    Code.DUPLICATE: Rule(
        200, Then.NEXT, "this update was already counted; the first answer is given again"
    ),
    Code.TASK_ANSWERED: Rule(
        409, Then.NEXT, "this task already has another update; ask for the next task"
    ),
    Code.UNKNOWN_TASK: Rule(
        404, Then.NEXT, "this run has given you no such task; ask for the next one"
    ),
    Code.UNKNOWN_BLOCK: Rule(
        404, Then.NEXT, "this run has no such block; ask for a task and train the block in it"
    ),
    Code.NOT_YOUR_TASK: Rule(
        409, Then.NEXT, "this task belongs to another worker; ask for one of your own"
    ),
    Code.WRONG_BASE: Rule(
        409, Then.NEXT, "the task starts from another version; train from the weights that it names"
    ),
    Code.WRONG_STEPS: Rule(
        409, Then.NEXT, "the task has another number of steps; make exactly those"
    ),
    Code.WRONG_WEIGHT: Rule(
        422,
        Then.NEXT,
        "the tokens of this update cannot be counted; report those of the task's steps",
    ),
    Code.BLOCK_FINISHED: Rule(
        410, Then.NEXT, "the block has spent its budget; ask for the next task"
    ),
    Code.STALE_FENCE: Rule(
        409, Then.NEXT, "the task was given to somebody else in the meantime; ask for the next one"
    ),
    Code.LEASE_EXPIRED: Rule(
        409, Then.NEXT, "the lease of the task has run out; ask for the next one"
    ),
    Code.TOO_STALE: Rule(
        409,
        Then.NEXT,
        "the block has moved on too far since this task's base version; ask for the next task",
    ),
    Code.MISSING_CHUNKS: Rule(
        409, Then.RESEND, "some chunks of the payload have not arrived; send those and submit again"
    ),
    Code.HASH_MISMATCH: Rule(
        422, Then.RESEND, "the bytes do not have the announced sha256; send them again"
    ),
    Code.WRONG_SHAPE: Rule(
        422, Then.NEXT, "these are not the tensors of the block; build it from the run's settings"
    ),
    Code.NOT_FINITE: Rule(
        422,
        Then.NEXT,
        "a value is not finite or out of range;"
        " drop the optimizer state and start from the base weights",
    ),
    Code.OVER_QUOTA: Rule(
        429,
        Then.RETRY,
        "a worker may not have more on the coordinator's disk; send the rest when a round has"
        " taken what is there",
    ),
    Code.DISK_LIMIT: Rule(
        503,
        Then.RETRY,
        "the coordinator takes no updates until its operator allows more or frees the disk;"
        " keep the update and send it later",
    ),
    Code.BUSY: Rule(503, Then.RETRY, "the coordinator is busy; try again after a pause"),
    Code.TOO_MANY_REQUESTS: Rule(
        429, Then.RETRY, "too many requests from this key or address; slow down"
    ),
    Code.STORAGE_FAILED: Rule(
        503,
        Then.RETRY,
        "this could not be stored durably and does not count yet; send it again later",
    ),
    Code.DAMAGED: Rule(
        500,
        Then.STOP,
        "the coordinator's copy is damaged; its operator restores the file from a backup, or from "
        "the folder `shards` in the cache of a worker",
    ),
}


class Refused(BlockTrainError):
    """A typed no; `detail` says what was seen, the rule's sentence names the fix."""

    def __init__(self, code: Code, detail: str = "", *, sentence: str | None = None) -> None:
        self.code = code
        self.detail = detail
        super().__init__(
            sentence
            or (f"{detail}: {self.rule.sentence}"[:MAX_SENTENCE] if detail else self.rule.sentence)
        )

    @property
    def rule(self) -> Rule:
        """How this code is answered."""
        return RULES[self.code]

    @property
    def sentence(self) -> str:
        """What to tell the caller."""
        return str(self)
