"""One honest message of every kind, the same in all tests."""

from __future__ import annotations

from blocktrain.config import make_config
from blocktrain.protocol import identity, ledger, status
from blocktrain.protocol.messages import (
    PROTOCOL,
    Blob,
    BlockVersion,
    CorpusBlobs,
    Heartbeat,
    HeartbeatReply,
    Held,
    Join,
    JoinReply,
    Kick,
    Lineage,
    Manifest,
    Message,
    Receipt,
    Refusal,
    StageList,
    StageNotice,
    Submission,
    SubmitReply,
    Task,
    TaskReply,
    TaskRequest,
    UploadState,
    VersionDelta,
    Wait,
    refusal,
)
from blocktrain.protocol.refusals import Code, Refused

RUN, WORKER, NONCE, KEY, SHA = "0a" * 16, "1b" * 16, "2c" * 16, "3d" * 32, "4e" * 32
CONFIG = make_config({})
BLOB = Blob(sha256=SHA, length=1234)
CORPUS = CorpusBlobs(name="wikitext2", index=BLOB, tokenizer=BLOB)
VERSION = BlockVersion(block=1, version=3, weights=BLOB)
TASK = Task(
    task=7,
    number=3,
    block=2,
    base=3,
    weights=BLOB,
    seed=5,
    position=12,
    shards=(Blob(sha256="5d" * 32, length=64),),
    start_step=120,
    steps=40,
    compression="int4",
    continues=Lineage(optimizer=5, residual=4),
    features=(VERSION,),
    fence=2,
    ticket="5f" * 16,
    deadline_seconds=30.5,
    lease_seconds=60.0,
    chunk_bytes=1 << 20,
    payload_limit=99999,
)
WAIT = Wait(seconds=2.5, code="no_work", reason="all tasks of this round are handed out")
SUBMISSION = Submission(
    run=RUN,
    worker=WORKER,
    task=7,
    fence=2,
    block=2,
    base=3,
    payload_sha256=SHA,
    payload_length=3000000,
    chunks=3,
    steps=40,
    tokens=81920,
    loss_before=2.5,
    loss_after=0.00001,
    seconds=12.5,
    continued=Lineage(optimizer=5),
    lineage="6a" * 32,
    nonce=NONCE,
    time=1790000000000,
)
RECEIPT = Receipt(
    run=RUN,
    worker=WORKER,
    task=7,
    fence=2,
    block=2,
    base=3,
    payload_sha256=SHA,
    accepted=True,
    sentence="counted",
    update=SUBMISSION.update,
    staleness=1,
    weight=0.7,
    entry=SHA,
    time=1790000000001,
)
JOIN = Join(
    protocol=PROTOCOL,
    public_key=KEY,
    name="lab/pc 4",
    device="cuda:1",
    memory=8 << 30,
    speed=12.5,
    held=Held(block=2, optimizer=5),
    nonce=NONCE,
    time=1790000000000,
)
MANIFEST = Manifest(
    protocol=PROTOCOL,
    run=RUN,
    coordinator=KEY,
    number=4,
    head=SHA,
    issued=1790000000000,
    expires=1790000060000,
    config=CONFIG.model_dump(),
    fingerprint=CONFIG.fingerprint,
    corpus=CORPUS,
    blocks=(VERSION,),
)
STATUS = status.Status(
    protocol=PROTOCOL,
    run=RUN,
    fingerprint=SHA,
    state="running",
    up_seconds=4.0,
    rounds=2,
    tokens=100,
    bytes_in=10,
    bytes_out=20,
    blocks=(
        status.BlockStatus(
            block=1,
            version=2,
            weights=BLOB,
            steps=80,
            tokens=100,
            accepted=2,
            refused=0,
            late=1,
            round=status.RoundStatus(
                version=2,
                updates=0,
                leased=1,
                target=1,
                minimum=1,
                extensions=0,
                open_seconds=0.5,
                deadline_seconds=9.0,
                reason="1 of 1 tasks out",
            ),
        ),
    ),
    workers=(
        status.WorkerStatus(
            worker=WORKER, name="lab", device="cpu", state="training", block=1, task=7
        ),
    ),
    refusals={Code.TOO_STALE: 1},
    scores={"block-1": 1.5},
)
FACTS: dict[ledger.EntryKind, Message] = {
    "run": ledger.RunFacts(
        protocol=PROTOCOL,
        run=RUN,
        coordinator=KEY,
        config=CONFIG.model_dump(),
        fingerprint=CONFIG.fingerprint,
        corpus=CORPUS,
        blocks=(VERSION,),
    ),
    "start": ledger.StartFacts(epoch=1),
    "join": ledger.JoinFacts(worker=WORKER, public_key=KEY, name="lab", device="cpu"),
    "lease": ledger.LeaseFacts(worker=WORKER, fence=2, order=TASK.order),
    "expire": ledger.ExpireFacts(worker=WORKER, task=6, fence=1, reason="lease ran out"),
    "update": ledger.UpdateFacts(submission=SUBMISSION, order=TASK.order),
    "version": ledger.VersionFacts(
        block=2,
        version=4,
        parent=SHA,
        weights=BLOB,
        momentum=None,
        parts=(ledger.Part(update=SHA, share=1.0, scale=1.0),),
        outer="average",
        outer_learning_rate=0.7,
        outer_momentum=0.9,
        reason="target reached",
    ),
    "round": ledger.RoundFacts(
        block=2, version=4, event="extended", seconds=90.0, reason="no update by the deadline"
    ),
    "kick": ledger.KickFacts(worker=WORKER, reason="asked to"),
    "finish": ledger.FinishFacts(reason="token budget spent"),
}


def chain() -> list[ledger.LedgerEntry]:
    """A whole small ledger."""
    entries: list[ledger.LedgerEntry] = []
    for seq, (kind, facts) in enumerate(FACTS.items(), start=1):
        previous, body = (
            entries[-1].hash if entries else ledger.BEGINNING,
            identity.canonical(facts).decode(),
        )
        digest = ledger.entry_hash(seq, kind, body, previous)
        entries.append(
            ledger.LedgerEntry(seq=seq, kind=kind, body=body, previous=previous, hash=digest)
        )
    return entries


STAGE = StageNotice(address="127.0.0.1:8481", model=SHA, issued=1790000000000, proof=SHA)
DELTA = VersionDelta(
    block=1, version=3, parent=SHA, weights=SHA, delta=Blob(sha256=SHA, length=100)
)
REFUSAL: Refusal = refusal(Refused(Code.BUSY), retry_seconds=1.5)
MESSAGES: tuple[Message, ...] = (
    JOIN,
    JoinReply(
        protocol=PROTOCOL,
        run=RUN,
        worker=WORKER,
        coordinator=KEY,
        config=CONFIG.model_dump(),
        fingerprint=CONFIG.fingerprint,
        corpus=CORPUS,
        next=TASK,
    ),
    TaskRequest(run=RUN, worker=WORKER, fingerprint=SHA, speed=3.0, nonce=NONCE),
    TaskReply(next=WAIT),
    TASK,
    TASK.order,
    WAIT,
    Heartbeat(run=RUN, worker=WORKER, task=7, fence=2, step=3, loss=2.0, bytes=0, nonce=NONCE),
    HeartbeatReply(go_on=False, code=Code.STALE_FENCE, lease_seconds=0.0, deadline_seconds=1.0),
    UploadState(task=7, have=(0, 2)),
    SUBMISSION,
    RECEIPT,
    SubmitReply(receipt=RECEIPT, next=WAIT),
    REFUSAL,
    MANIFEST,
    Kick(worker=WORKER),
    STAGE,
    StageList(stages=(STAGE,)),
    DELTA,
    TASK.model_copy(update={"deltas": (DELTA,)}),
    STATUS,
    *FACTS.values(),
    chain()[0],
    ledger.LedgerPage(entries=tuple(chain()), total=10),
)
