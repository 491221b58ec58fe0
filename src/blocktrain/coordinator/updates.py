"""An update's way in: judged, made durable, checked, recorded. A refusal leaves nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from blocktrain.coordinator import state
from blocktrain.coordinator.closing import RoundCloser
from blocktrain.coordinator.rounds import Claim, Verdict, deadline_after, judge
from blocktrain.coordinator.run import TrainingRun, short
from blocktrain.errors import Conflict
from blocktrain.protocol import messages as m
from blocktrain.protocol.compression import check_update, payload_cap
from blocktrain.protocol.ledger import UpdateFacts
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.store.contract import UpdateRecord

SPEED_MEMORY = 0.7  # share of the old value in a worker's measured overhead


def payload_limit(run: TrainingRun, block: int) -> int:
    """The longest payload that an honest worker can send for a block."""
    return payload_cap(run.schemas[block], run.policy.compression)


class UpdateIntake:
    def __init__(self, run: TrainingRun, closer: RoundCloser) -> None:
        self._run, self._closer = run, closer
        self.in_flight: Counter[str] = Counter()  # payloads that are durable and not recorded yet

    def accept(self, message: m.Submission) -> bytes:
        """Record an update and give its receipt, or refuse it and change nothing.

        The same task and payload get the same receipt for ever. The caller does not hold the lock:
        payloads become durable and are read while others are served. What was decided before is
        decided again in the end, when it counts.
        """
        run, name = self._run, message.payload_sha256
        with run.lock:
            if (known := self._known_receipt(message)) is not None:
                return known
            self._judge(message)
            self.in_flight[name] += 1
        try:
            self._assemble(message)
            return self._take_in(message)
        except Refused:
            with run.lock:
                # It came twice at the same time, and the other one was faster.
                if (known := self._known_receipt(message)) is not None:
                    return known
            raise
        finally:
            with run.lock:
                self.in_flight[name] -= 1
                self.in_flight += Counter()  # removes those that are zero

    def _known_receipt(self, message: m.Submission) -> bytes | None:
        """The receipt that was given before. The store is not asked while the task is out."""
        if message.task in self._run.state.leases:
            return None
        known = self._run.store.answer(message.task, message.payload_sha256)
        if known is not None and known.update.worker != message.worker:
            raise Refused(Code.NOT_YOUR_TASK, f"another worker has answered task {message.task}")
        return known.receipt if known else None

    def _judge(self, message: m.Submission) -> Verdict:
        """The verdict on what a submission claims. What does not count is refused."""
        run = self._run
        claim = Claim(
            message.worker, message.task, message.fence, message.block, message.base, message.steps
        )
        verdict = judge(run.clock.monotonic(), run.state, run.options, claim)
        if not verdict.accepted:
            code = Code(verdict.code)
            if code is Code.UNKNOWN_TASK and run.store.answered_block(message.task) is not None:
                code = Code.TASK_ANSWERED
            raise Refused(code, verdict.reason)
        if message.tokens != message.steps * run.config.batch * run.config.context:
            raise Refused(
                Code.WRONG_WEIGHT, f"{message.steps} steps are not {message.tokens} tokens"
            )
        for task in filter(None, (message.continued.optimizer, message.continued.residual)):
            # An audit could not compute such a state again.
            if run.store.answered_block(task) != message.block:
                raise Refused(
                    Code.MALFORMED,
                    f"the update continues task {task}, "
                    f"which has no accepted update of block {message.block}",
                )
        return verdict

    def _assemble(self, message: m.Submission) -> None:
        """One durable blob of the chunks."""
        run, blobs = self._run, self._run.store.blobs
        limit = payload_limit(run, message.block)
        if message.payload_length > limit:
            raise Refused(
                Code.TOO_LARGE, f"a payload of {message.payload_length} bytes, {limit} are allowed"
            )
        run.quotas.require_disk()
        plan = message.plan(run.policy.chunk_bytes)
        have = blobs.chunks(message.task, message.fence)
        if missing := plan.missing(have):
            indices = ", ".join(map(str, missing[:20]))
            raise Refused(Code.MISSING_CHUNKS, f"chunks {indices} of {plan.chunks}")
        chunks = [have[i] for i in range(plan.chunks)]
        try:
            blobs.assemble(message.task, message.fence, chunks, message.payload_sha256)
        except Conflict as error:
            run.quotas.uploads.drop((message.task, message.fence))
            raise Refused(Code.HASH_MISMATCH, str(error)) from None

    def _take_in(self, message: m.Submission) -> bytes:
        """Record a payload that is durable, or remove it."""
        run = self._run
        try:
            content = run.store.blobs.read(message.payload_sha256)
            if len(content) != message.payload_length:
                raise Refused(
                    Code.HASH_MISMATCH,
                    f"the chunks have {len(content)} bytes, not {message.payload_length}",
                )
            check_update(content, run.schemas[message.block], method=run.policy.compression)
            with run.lock:
                self._closer.wait_released(message.block)
                run.store.require_open()
                receipt = self._record(message, self._judge(message))
                self._closer.checks.consider(message.update)
            run.quotas.uploads.drop((message.task, message.fence))
            return receipt
        except Refused:
            with run.lock:
                self._discard(message)
            raise

    def _record(self, message: m.Submission, verdict: Verdict) -> bytes:
        """One transaction: the update, its ledger entry, its receipt, and what follows from it."""
        run = self._run
        now = run.clock.monotonic()
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
            seconds=now - run.state.leases[message.task].granted,
            staleness=verdict.staleness,
            weight=verdict.weight,
            accepted=True,
            code=verdict.code,
        )
        content = UpdateFacts(submission=message, order=run.history.orders[message.task])
        body = {**vars(update), "id": update.id, **content.model_dump(mode="json")}
        entry = run.next_entry("update", body)
        receipt = m.Receipt(
            run=message.run,
            worker=message.worker,
            task=message.task,
            fence=message.fence,
            block=message.block,
            base=message.base,
            payload_sha256=message.payload_sha256,
            accepted=True,
            sentence=short(verdict.reason),
            update=update.id,
            staleness=update.staleness,
            weight=update.weight,
            entry=entry.hash,
            time=int(run.clock.time() * 1000),
        )
        after = self._after(now, message, update)
        try:
            return run.save_update(after, update, entry, run.identity.sign(receipt), message.nonce)
        except Conflict as error:
            raise Refused(Code.REPLAYED, str(error)) from None

    def _after(self, now: float, message: m.Submission, update: UpdateRecord) -> state.RunState:
        run = self._run
        block = run.state.blocks[message.block]
        deadline = deadline_after(now, block, run.options, update.seconds)
        return state.add_update(
            self._with_speed(message, update),
            message.task,
            state.waiting_update(update),
            deadline,
            update.seconds,
        )

    def _with_speed(self, message: m.Submission, update: UpdateRecord) -> state.RunState:
        """The state with what this task says about its worker.

        That is how long a step takes, and how much time everything else takes.
        """
        run = self._run
        worker = run.state.workers.get(message.worker)
        if worker is None or update.seconds is None or not 0 < message.seconds <= update.seconds:
            return run.state
        extra = update.seconds - message.seconds
        overhead = SPEED_MEMORY * worker.overhead + (1 - SPEED_MEMORY) * extra
        measured = replace(
            worker,
            seconds_per_step=message.seconds / message.steps,
            overhead=min(overhead, run.options.task_seconds / 2),
        )
        return state.with_worker(run.state, measured)

    def _discard(self, message: m.Submission) -> None:
        """Nothing of a refused payload stays, unless the same bytes belong to another update."""
        run, name = self._run, message.payload_sha256
        run.quotas.uploads.drop((message.task, message.fence))
        waiting = (submission for submission, _ in run.history.waiting.values())
        used = name in run.history.public or any(s.payload_sha256 == name for s in waiting)
        if not used and self.in_flight[name] == 1:
            run.store.blobs.delete(name)
