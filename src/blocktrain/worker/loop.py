"""The worker's loop: join, fetch, train with no network, send while the next task is trained.

It may be killed at any moment. The optimizer state and the residual of an update are on the disk
before it is sent, and are continued only if the update was accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blocktrain.clock import Clock, SystemClock
from blocktrain.config import Config, make_config
from blocktrain.errors import ConfigError, Interrupted, RunError
from blocktrain.footprint import worker_memory
from blocktrain.learning.compose import build_block
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.shards import Batches, CorpusIndex, SequenceOrder, batches, order_of
from blocktrain.learning.train import block_weights
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.compression import METHODS
from blocktrain.protocol.identity import Identity, new_nonce
from blocktrain.protocol.refusals import Code, Refused, Then
from blocktrain.protocol.transfer import Plan, sha256
from blocktrain.worker.session import (
    POLL_SECONDS,
    EventHandler,
    HeartbeatThread,
    UpdateUpload,
    WorkerSession,
    pause,
)
from blocktrain.worker.shards import (
    CACHE_LIMIT,
    CachedShards,
    PreparedShards,
    ShardCache,
    ShardReader,
)
from blocktrain.worker.speed import SpeedMeter
from blocktrain.worker.state import BlockFolder, PendingUpdate, TrainingState, WorkerCache
from blocktrain.worker.task import BlockTraining, Downloads, open_training

# How long to wait for an update's answer before asking for the next task: a share of the task's
# training time, and at least so many seconds.
ANSWER_SHARE, ANSWER_SECONDS = 0.1, 0.2
REJOIN_SECONDS = 1.0
LIKELY_SHARDS = 2  # that are fetched beyond those of a task
SHARED_POLL = 0.3  # seconds: the coordinator is on the same machine


@dataclass(frozen=True)
class Machine:
    """What a worker may use. The coordinator is told all but the last."""

    device: str = "cpu"
    memory: int = 0  # bytes that training may use; 0: no limit
    name: str = ""
    cache_limit: int = CACHE_LIMIT  # bytes of shards that may be on its disk


@dataclass
class WorkSummary:
    """What a worker has done since it was started."""

    accepted: int = 0
    refused: int = 0
    steps: int = 0
    tokens: int = 0
    sent: int = 0  # bytes of payloads
    ended: str = ""  # why it left


class Worker:
    """One worker of one coordinator; `shared` as in WorkerCache.

    With the folder of the prepared corpus on the same machine, no shard is fetched.
    """

    def __init__(
        self,
        client: Calls,
        cache: Path,
        identity: Identity,
        machine: Machine,
        emit: EventHandler,
        *,
        shared: bool = False,
        corpus: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._session = WorkerSession(client, identity, emit, self._clock)
        self._emit, self._machine, self._id = emit, machine, identity.worker
        self._cache = WorkerCache(cache, identity.worker, shared=shared)
        self._prepared = corpus
        self._close_shards: Callable[[], None] = lambda: None
        self._orders: dict[int, SequenceOrder] = {}  # by block
        self.summary = WorkSummary()
        self._speed = 0.0
        self._training: BlockTraining | None = None
        self._upload: UpdateUpload | None = None
        self._refused_tasks: set[int] = set()  # refused tasks: nothing may continue them
        self._stopped: Callable[[], bool] = lambda: False
        self._finishing: Callable[[], bool] = lambda: False

    def run(
        self,
        stopped: Callable[[], bool] = lambda: False,
        finishing: Callable[[], bool] = lambda: False,
    ) -> WorkSummary:
        """Work until the run is finished.

        `finishing` ends it after the current task, `stopped` at once. Nothing is lost either way.
        """
        self._stopped, self._finishing = stopped, finishing
        try:
            while True:
                try:
                    self.summary.ended = self._work(self._join())
                    break
                except Refused as error:
                    if error.rule.then is not Then.REJOIN:
                        raise
                    self._emit("rejoin", reason=str(error))
                    self._drop()
                    pause(self._clock, REJOIN_SECONDS, stopped)
        except Interrupted:
            self.summary.ended = "stopped"
        except Refused as error:
            if error.code is not Code.RUN_FINISHED:
                raise
            self.summary.ended = str(error)
        finally:
            self._drop()
        self._emit("left", reason=self.summary.ended)
        return self.summary

    def _drop(self) -> None:
        """Drop everything that is not on the disk."""
        if self._upload is not None:
            self._upload.cancel()
        self._training, self._upload = None, None
        self._close_shards()

    # Joining

    def _join(self) -> m.JoinReply:
        session, machine = self._session, self._machine

        def call() -> m.JoinReply:
            message = m.Join(
                protocol=m.PROTOCOL,
                public_key=session.identity.public_key,
                name=machine.name,
                device=machine.device,
                memory=machine.memory,
                speed=self._speed,
                held=self._cache.held_state(),
                nonce=new_nonce(),
                time=session.now_ms(),
            )
            return session.client.join(session.identity.sign(message))

        reply = session.retries.call(call, self._stopped)
        if reply.protocol != m.PROTOCOL or reply.worker != self._id:
            raise RunError(
                f"the coordinator speaks protocol {reply.protocol}, this worker {m.PROTOCOL}; "
                "install the same version"
            )
        self.config = _read_config(reply, machine.device)
        self._cache.trust(reply.run, reply.coordinator)
        session.run, session.fingerprint = reply.run, reply.fingerprint
        session.key = reply.coordinator
        self._require_memory(1)
        self._downloads = Downloads(
            session, self._cache.cache, self._cache.weights(reply.run), self._stopped
        )
        self._emit(
            "joined",
            run=reply.run,
            worker=self._id,
            blocks=self.config.blocks,
            corpus=reply.corpus.name,
        )
        self.corpus: CorpusIndex = self._downloads.index(reply.corpus)
        self._orders = {}
        self._shards: ShardReader = self._open_shards()
        self._close_shards = self._shards.close
        return reply

    def _open_shards(self) -> ShardReader:
        if self._prepared is not None:
            return PreparedShards(TokenCorpus(self.corpus, self._prepared))
        cache = ShardCache(self._cache.cache / "shards", self._machine.cache_limit)
        fetch = self._downloads.shard
        return CachedShards(cache, self.corpus, fetch, self._clock, self._stopped)

    def _require_memory(self, index: int) -> None:
        needed = worker_memory(self.config, index)
        if 0 < self._machine.memory < needed:
            raise RunError(
                f"training block {index} takes about {needed / 1e9:.2g} GB and --memory allows "
                f"{self._machine.memory / 1e9:.2g} GB; allow more, or join a run with smaller "
                "blocks"
            )

    # The loop

    def _work(self, reply: m.JoinReply) -> str:
        """Work until there is nothing more to do; returns why."""
        todo: m.Task | m.Wait | None = self._resend_pending() or reply.next
        while True:
            if self._finishing():
                self._await_answer()
                self._session.leave()
                return "the current task is finished"
            if todo is None:
                todo = self._session.retries.call(self._request_task, self._stopped)
            if isinstance(todo, m.Wait) and todo.code == "finished":
                self._await_answer()
                self._session.leave()
                return todo.reason
            try:
                todo = self._idle(todo) if isinstance(todo, m.Wait) else self._do(todo)
            except Refused as error:
                if error.rule.then is not Then.NEXT:
                    raise
                self._emit("abandoned", reason=str(error))
                self._training, todo = None, None

    def _request_task(self) -> m.Task | m.Wait:
        training = self._training
        held = (
            m.Held(block=training.block, **dict(training.lineage_before))
            if training
            else self._cache.held_state()
        )
        return self._session.next_task(held, self._speed)

    def _idle(self, wait: m.Wait) -> m.Task | m.Wait | None:
        """Wait as the coordinator says, or until the update in transit is answered."""
        self._emit("waiting", seconds=wait.seconds, code=wait.code, reason=wait.reason)
        seconds = min(wait.seconds, SHARED_POLL) if self._cache.shared else wait.seconds
        end = self._clock.monotonic() + max(seconds, POLL_SECONDS)
        while self._clock.monotonic() < end and not self._finishing():
            pause(self._clock, POLL_SECONDS, self._stopped)
            if self._upload is not None and self._upload.finished.is_set():
                return self._take_answer()
        return None

    def _do(self, task: m.Task) -> m.Task | m.Wait | None:
        """One task; returns the next one if the answer to the update brought it."""
        folder = self._cache.block(self._session.run, task.block)
        pending = folder.pending() if self._upload is None else None
        if pending is not None and pending.answers(task.order):
            seconds = 0.0
            self._resend_as(folder, pending, task)
        else:
            began = self._clock.monotonic()
            upload = self._train(task, folder)
            if upload is None:
                return None
            seconds = self._clock.monotonic() - began
            self._upload = upload
            if not METHODS[task.compression].exact:
                self._downloads.keep_sent(upload.payload)
        if self._wait_for_answer(max(ANSWER_SHARE * seconds, ANSWER_SECONDS)):
            return self._take_answer()
        reply = self._session.retries.call(
            lambda: self._session.heartbeat(task, task.steps, None, 0), self._stopped
        )  # trained: in transit
        if not reply.go_on:  # already judged: the answer is in transit
            return self._await_answer()
        self._emit("sending", block=task.block, task=task.task)
        return None

    def _train(self, task: m.Task, folder: BlockFolder) -> UpdateUpload | None:
        """Train a task and start the upload of its update; None if it was abandoned."""
        order = task.order
        text = self._read_ahead(order)
        self._downloads.follow(
            task, lambda block: dict(block_weights(build_block(self.config, block)))
        )
        training = self._prepare(task, folder)
        self._emit(
            "task",
            block=order.block,
            task=order.task,
            base=order.base,
            start=order.start_step,
            steps=order.steps,
        )
        began, losses = self._clock.monotonic(), list[float]()
        if (checkpoint := folder.load_checkpoint(order, training.origin)) is not None:
            began -= checkpoint.info.seconds
            losses = training.resume(checkpoint)
        self._training = None  # in the middle of a task the state belongs to no task
        abandoned = self._run_steps(task, training, folder, text, (began, losses))
        seconds = max(self._clock.monotonic() - began - self._shards.waited, 1e-9)
        if not abandoned:
            self._speed = order.steps / seconds
            # Compressing this update needs the residual of the one before.
            self._await_answer(training)
            abandoned = self._obsolete(training)
        if abandoned:
            self._emit("abandoned", task=order.task, reason=abandoned)
            return None
        return self._finish(task, training, folder, losses, seconds)

    def _run_steps(
        self,
        task: m.Task,
        training: BlockTraining,
        folder: BlockFolder,
        text: Batches,
        so_far: tuple[float, list[float]],
    ) -> str:
        """All steps of a task, with no network; returns why it was abandoned, if it was.

        `so_far`: when it began, and the losses up to now.
        """
        order, (began, losses) = task.order, so_far
        end = order.start_step + order.steps
        meter = SpeedMeter(training.trainer)
        with HeartbeatThread(self._session, task) as heartbeat:
            for step, loss in training.trainer.run(text, end):
                losses.append(loss)
                heartbeat.step, heartbeat.loss = step - order.start_step, loss
                self._emit(
                    "step",
                    block=order.block,
                    task=order.task,
                    step=step,
                    of=end,
                    loss=loss,
                    **meter.after_step(),
                )
                if heartbeat.error is not None:
                    raise heartbeat.error
                if self._stopped():
                    seconds = self._clock.monotonic() - began
                    folder.save_checkpoint(training.checkpoint(order, losses, seconds))
                    raise Interrupted("stopped")
                if abandoned := heartbeat.cancelled or self._obsolete(training):
                    return abandoned
        return ""

    def _finish(
        self,
        task: m.Task,
        training: BlockTraining,
        folder: BlockFolder,
        losses: list[float],
        seconds: float,
    ) -> UpdateUpload:
        order, continued = task.order, training.lineage_before
        after, payload = self._compress(order, training)
        submission = m.Submission(
            run=self._session.run,
            worker=self._id,
            task=order.task,
            fence=task.fence,
            block=order.block,
            base=order.base,
            payload_sha256=sha256(payload),
            payload_length=len(payload),
            chunks=Plan(len(payload), task.chunk_bytes).chunks,
            steps=order.steps,
            tokens=order.steps * self.config.batch * self.config.context,
            loss_before=losses[0],
            loss_after=losses[-1],
            seconds=seconds,
            continued=continued,
            lineage=after.origin.lineage or "",
            nonce=new_nonce(),
            time=self._session.now_ms(),
        )
        pending = PendingUpdate(task=task, submission=submission)
        folder.save(after, pending, payload)
        self._training = training
        self._emit(
            "trained",
            block=order.block,
            task=order.task,
            step=after.origin.step,
            loss=losses[-1],
            seconds=seconds,
            bytes=len(payload),
            **SpeedMeter(training.trainer).fields(order.steps / seconds),
        )
        return UpdateUpload(self._session, pending, payload, after.residual, resend=False)

    def _compress(self, order: m.Order, training: BlockTraining) -> tuple[TrainingState, bytes]:
        """The state after an order, and its update."""
        return training.finish(order)

    def _prepare(self, task: m.Task, folder: BlockFolder) -> BlockTraining:
        """A trainer at the start of a task, with the state that it continues or a fresh one."""
        order = task.order
        if order.seed != self.config.seed:
            raise RunError(
                f"task {order.task} has the seed {order.seed}, the run has {self.config.seed}; "
                "install the coordinator's version"
            )
        if self._training is None or self._training.block != order.block:
            self._training = None  # before the next one is built: both may not fit
            self._require_memory(order.block)
            self._cache.remember(self._session.run, order.block)
        fits = self._training is not None and self._training.origin.fits(order)
        training = open_training(self.config, order, self._downloads.tensors, self._training)
        if not fits:
            self._await_answer()
            self._settle_shared(order, folder)
            state = folder.load()
            training.load_state(state if state.origin.fits(order) else TrainingState())
            if training.origin.optimizer is None and order.start_step > 0:
                self._emit("fresh", block=order.block, task=order.task)
        training.begin(order, self._downloads.tensors, alone=task.alone)
        self._downloads.keep_only([order.weights, *(pin.weights for pin in order.features)])
        return training

    def _read_ahead(self, order: m.Order) -> Batches:
        """Fetch the text of a task from now on; its batches wait for it if they have to."""
        if order.block not in self._orders:
            self._orders[order.block] = order_of(self.corpus, self.config, order.block)
        sequences, batch = self._orders[order.block], self.config.batch

        def shards(position: int) -> tuple[m.Blob, ...]:
            named = sequences.shards(position * batch, order.steps * batch)
            return tuple(
                m.Blob(sha256=shard.sha256, length=self.corpus.file_bytes(shard)) for shard in named
            )

        if order.shards != shards(order.position):
            raise RunError(
                f"task {order.task} names other shards than its batches are in; "
                "install the coordinator's version"
            )
        self._shards.begin(order.shards, shards(order.position + order.steps)[:LIKELY_SHARDS])
        return batches(sequences, batch, self._shards.open)

    def _settle_shared(self, order: m.Order, folder: BlockFolder) -> None:
        """Settle the pending update of another worker in a shared folder.

        An order that continues it shows that it was accepted.
        """
        if (old := folder.pending()) is not None:
            ended = (old.task.base + 1, old.task.start_step + old.task.steps)
            if old.task.task == order.continues.optimizer or ended == (
                order.base,
                order.start_step,
            ):
                folder.accept()
            else:
                folder.refuse()

    # Updates in transit

    def _resend_pending(self) -> m.Task | m.Wait | None:
        """Send updates that an earlier process trained and that have no answer yet."""
        todo = None
        for folder in self._cache.blocks(self._session.run):
            pending = folder.pending()
            if pending is not None and pending.submission.worker == self._id:
                self._resend(folder, pending)
                todo = self._await_answer()
        return todo

    def _resend_as(self, folder: BlockFolder, old: PendingUpdate, task: m.Task) -> None:
        """The disk already holds what the task asks for: send it under this lease."""
        claimed = old.submission.model_copy(update={"worker": self._id, "fence": task.fence})
        pending = PendingUpdate(task=task, submission=claimed)
        folder.rewrite(pending)
        self._resend(folder, pending)

    def _resend(self, folder: BlockFolder, pending: PendingUpdate) -> None:
        self._emit("resending", block=pending.task.block, task=pending.task.task)
        self._upload = UpdateUpload(self._session, pending, folder.payload(), None, resend=True)

    def _wait_for_answer(self, seconds: float) -> bool:
        """Whether the update in transit is answered within this time."""
        end = self._clock.monotonic() + seconds
        while self._upload is not None and not self._clock.wait(
            self._upload.finished, min(POLL_SECONDS, max(0.0, end - self._clock.monotonic()))
        ):
            if self._stopped():
                raise Interrupted("stopped")
            if self._clock.monotonic() >= end:
                return False
        return True

    def _await_answer(self, training: BlockTraining | None = None) -> m.Task | m.Wait | None:
        """Wait for the answer to the update in transit, if there is one."""
        if self._upload is None:
            return None
        self._wait_for_answer(float("inf"))
        return self._take_answer(training)

    def _obsolete(self, training: BlockTraining) -> str:
        """Why this task can no longer count. Takes an answer that has arrived in the meantime."""
        if self._upload is not None and self._upload.finished.is_set():
            self._take_answer(training)
        if training.origin.optimizer in self._refused_tasks:
            return "the update that it continues was refused"
        return ""

    def _take_answer(self, training: BlockTraining | None = None) -> m.Task | m.Wait | None:
        """Take the answer to an update; returns the next task if it brought one."""
        training = training or self._training
        upload, self._upload = self._upload, None
        if upload is None:
            return None
        reply, error = upload.reply, upload.error
        if reply is not None and reply.receipt.accepted:
            self._record_acceptance(upload, reply.receipt, training)
            return reply.next
        if reply is None and not (isinstance(error, Refused) and error.rule.then is Then.NEXT):
            raise error or RunError("an update ended without an answer")  # it stays on the disk
        task = upload.pending.task
        self._cache.block(self._session.run, task.block).refuse()
        self._refused_tasks.add(task.task)
        if self._training is not None and self._training.origin.optimizer == task.task:
            self._training = None
        self.summary.refused += 1
        self._emit(
            "refused",
            block=task.block,
            task=task.task,
            reason=reply.receipt.sentence if reply else str(error),
        )
        return reply.next if reply else None

    def _record_acceptance(
        self, upload: UpdateUpload, receipt: m.Receipt, training: BlockTraining | None
    ) -> None:
        task = upload.pending.task
        self._cache.block(self._session.run, task.block).accept()
        self._refused_tasks.discard(task.task)  # an earlier lease of it may have been refused
        if training is not None and training.block == task.block and upload.residual is not None:
            training.residual = upload.residual
            training.origin = training.origin.model_copy(update={"residual": task.task})
        self.summary.accepted += 1
        self.summary.steps += task.steps
        self.summary.tokens += upload.pending.submission.tokens
        self.summary.sent += upload.sent
        self._emit(
            "accepted",
            block=task.block,
            task=task.task,
            step=task.start_step + task.steps,
            bytes=upload.sent,
            sentence=receipt.sentence,
            update=receipt.update,
            entry=receipt.entry,
        )


def _read_config(reply: m.JoinReply, device: str) -> Config:
    """The run's settings, on this machine's device."""
    advice = "install the coordinator's version of blocktrain"
    try:
        config = make_config(dict(reply.config))
    except ConfigError as error:
        raise RunError(f"this version cannot read the run's settings ({error}); {advice}") from None
    if config.fingerprint != reply.fingerprint:
        mine, theirs = config.fingerprint[:12], reply.fingerprint[:12]
        raise RunError(
            f"the run's settings mean something else here ({mine}..., not {theirs}...); {advice}"
        )
    return config.replace(device=device)
