"""Whether an update counts: the verdict on its claims, its bytes made durable, its content read. What is refused leaves nothing behind."""

from __future__ import annotations

import time
from collections import Counter

from blocktrain.coordinator.rounds import Submission as Claim
from blocktrain.coordinator.rounds import Verdict, admit
from blocktrain.coordinator.run import LiveRun
from blocktrain.errors import Conflict
from blocktrain.protocol import messages as m
from blocktrain.protocol.compression import open_update, payload_cap
from blocktrain.protocol.refusals import MAX_SENTENCE, Code, Refused
from blocktrain.store.contract import UpdateRecord


def payload_limit(live: LiveRun, block: int) -> int:
    """The longest payload that an honest worker can send for a block."""
    return payload_cap(live.schemas[block], live.policy.compression)


def accept(live: LiveRun, message: m.Submission) -> bytes:
    """Record an update and give its receipt, or refuse it and change nothing; the same (task, payload) gets the same receipt for ever.

    The caller does not hold the lock: payloads become durable and are read while others are served. What was true before is asked again
    in the end, when it counts.
    """
    with live.lock:
        if (known := _known(live, message)) is not None:
            return known
        _judge(live, message)
        live.arriving[message.payload_sha256] += 1
    try:
        _assemble(live, message)
        return _take_in(live, message)
    except Refused:
        with live.lock:
            if (
                known := _known(live, message)
            ) is not None:  # it came twice at once, and the other was faster
                return known
        raise
    finally:
        with live.lock:
            live.arriving[message.payload_sha256] -= 1
            live.arriving += Counter()  # without those that are zero


def _known(live: LiveRun, message: m.Submission) -> bytes | None:
    """The receipt that was given before; none, without a look into the store, while the task is out."""
    if message.task in live.state.leases:
        return None
    known = live.store.answer(message.task, message.payload_sha256)
    if known is not None and known.update.worker != message.worker:
        raise Refused(Code.NOT_YOUR_TASK, f"task {message.task} was answered by another worker")
    return known.receipt if known else None


def _judge(live: LiveRun, message: m.Submission) -> Verdict:
    """The verdict on what a submission claims; what does not count is refused."""
    claim = Claim(
        message.worker, message.task, message.fence, message.block, message.base, message.steps
    )
    verdict = admit(live.clock(), live.state, live.options, claim)
    if not verdict.accepted:
        answered = (
            verdict.code == Code.UNKNOWN_TASK and live.store.answered(message.task) is not None
        )
        raise Refused(Code.TASK_ANSWERED if answered else Code(verdict.code), verdict.reason)
    if message.tokens != message.steps * live.config.batch * live.config.context:
        raise Refused(Code.WRONG_WEIGHT, f"{message.steps} steps are not {message.tokens} tokens")
    for task in filter(None, (message.continued.optimizer, message.continued.residual)):
        if (
            live.store.answered(task) != message.block
        ):  # such a state could not be computed again by anyone
            raise Refused(
                Code.MALFORMED,
                f"the update continues task {task}, which has no accepted update of block {message.block}",
            )
    return verdict


def _take_in(live: LiveRun, message: m.Submission) -> bytes:
    """Record a payload that is on the disk, or remove it."""
    try:
        content = live.store.blobs.read(message.payload_sha256)
        if len(content) != message.payload_length:
            raise Refused(
                Code.HASH_MISMATCH,
                f"the chunks have {len(content)} bytes, not {message.payload_length}",
            )
        open_update(content, live.schemas[message.block], method=live.policy.compression)
        with live.lock:
            live.merging.wait(message.block)
            live.store.require_open()
            receipt = _record(live, live.clock(), message, _judge(live, message))
        live.store.blobs.drop_chunks(message.task, message.fence)
        return receipt
    except Refused:
        with live.lock:
            _discard(live, message)
        raise


def _record(live: LiveRun, now: float, message: m.Submission, verdict: Verdict) -> bytes:
    lease = live.state.leases[message.task]
    update = UpdateRecord(
        task=message.task,
        fence=message.fence,
        block=message.block,
        base=message.base,
        worker=message.worker,
        payload=message.payload_sha256,
        size=message.payload_length,
        tokens=message.tokens,
        steps=message.steps,
        seconds=now - lease.granted,
        staleness=verdict.staleness,
        weight=verdict.weight,
        accepted=True,
        code=verdict.code,
    )

    def receipt(entry: str) -> m.Receipt:
        said = m.Receipt(
            run=message.run,
            worker=message.worker,
            task=message.task,
            fence=message.fence,
            block=message.block,
            base=message.base,
            payload_sha256=message.payload_sha256,
            accepted=True,
            sentence=verdict.reason[:MAX_SENTENCE],
            update=update.id,
            staleness=update.staleness,
            weight=update.weight,
            entry=entry,
            time=int(time.time() * 1000),
        )
        return live.identity.sign(said)

    return live.record(now, message, update, verdict.reason, receipt)


def _assemble(live: LiveRun, message: m.Submission) -> None:
    """One durable blob of the chunks."""
    limit = payload_limit(live, message.block)
    if message.payload_length > limit:
        raise Refused(
            Code.TOO_LARGE, f"a payload of {message.payload_length} bytes, {limit} are allowed"
        )
    plan = message.plan(live.policy.chunk_bytes)
    blobs = live.store.blobs
    have = blobs.chunks(message.task, message.fence)
    if missing := plan.missing(have):
        raise Refused(
            Code.MISSING_CHUNKS, f"chunks {', '.join(map(str, missing[:20]))} of {plan.chunks}"
        )
    try:
        blobs.assemble(
            message.task,
            message.fence,
            [have[i] for i in range(plan.chunks)],
            message.payload_sha256,
        )
    except Conflict as error:
        blobs.drop_chunks(message.task, message.fence)
        raise Refused(Code.HASH_MISMATCH, str(error)) from None


def _discard(live: LiveRun, message: m.Submission) -> None:
    """Nothing of a refused payload stays, unless the same bytes belong to another update."""
    name = message.payload_sha256
    live.store.blobs.drop_chunks(message.task, message.fence)
    used = name in live.recall.public or any(
        s.payload_sha256 == name for s, _ in live.recall.waiting.values()
    )
    if not used and live.arriving[name] == 1:
        live.store.blobs.delete(name)
