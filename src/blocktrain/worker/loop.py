"""The worker's loop: join, fetch, train with no network, send while the next task is trained. Safe to kill at any moment.

The optimizer state and the residual of an update are on the disk before it is sent, and are continued only if it was accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blocktrain.config import Config, make_config
from blocktrain.errors import ConfigError, Interrupted, RunError
from blocktrain.learning.data import Corpus
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity, new_nonce
from blocktrain.protocol.refusals import Code, Refused, Then
from blocktrain.protocol.transfer import Plan, sha256
from blocktrain.web.client import Calls
from blocktrain.worker.state import BlockFolder, Cabinet, Kept, Pending
from blocktrain.worker.task import Desk, Downloads, footprint, open_desk
from blocktrain.worker.transport import LOOK_SECONDS, Delivery, Line, Pulse, Told, now_ms, rest

PATIENCE = 0.1  # of a task's training time: how long its update is waited for before the next task is asked for
LEAST_PATIENCE = 0.2  # seconds
REJOIN_SECONDS = 1.0
SHARED_POLL = 0.3  # seconds: the coordinator is on the same machine


@dataclass(frozen=True)
class Machine:
    """What a worker tells about itself."""

    device: str = "cpu"
    memory: int = 0  # bytes that training may use; 0: no limit
    name: str = ""


@dataclass
class Tally:
    """What a worker has done since it was started."""

    accepted: int = 0
    refused: int = 0
    steps: int = 0
    tokens: int = 0
    sent: int = 0  # bytes of payloads
    ended: str = ""  # why it left


class Worker:
    """One worker of one coordinator; `shared` as in Cabinet."""

    def __init__(
        self,
        client: Calls,
        cache: Path,
        identity: Identity,
        machine: Machine,
        told: Told,
        *,
        shared: bool = False,
    ) -> None:
        self._line = Line(client, identity, told)
        self._told, self._machine, self._id = told, machine, identity.worker
        self._cabinet = Cabinet(cache, identity.worker, shared=shared)
        self.tally = Tally()
        self._speed = 0.0
        self._desk: Desk | None = None
        self._delivery: Delivery | None = None
        self._rejected: set[int] = (
            set()
        )  # tasks whose update was refused: nothing may continue them
        self._stopped: Callable[[], bool] = lambda: False
        self._finishing: Callable[[], bool] = lambda: False

    def run(
        self,
        stopped: Callable[[], bool] = lambda: False,
        finishing: Callable[[], bool] = lambda: False,
    ) -> Tally:
        """Work until the run is finished. `finishing` ends it after the current task, `stopped` at once; nothing is lost either way."""
        self._stopped, self._finishing = stopped, finishing
        try:
            while True:
                try:
                    self.tally.ended = self._work(self._join())
                    break
                except Refused as error:
                    if error.rule.then is not Then.REJOIN:
                        raise
                    self._told("rejoin", reason=str(error))
                    self._drop()
                    rest(REJOIN_SECONDS, stopped)
        except Interrupted:
            self.tally.ended = "stopped"
        except Refused as error:
            if error.code is not Code.RUN_FINISHED:
                raise
            self.tally.ended = str(error)
        finally:
            self._drop()
        self._told("left", reason=self.tally.ended)
        return self.tally

    def _drop(self) -> None:
        """Let go of everything that is not on the disk."""
        if self._delivery is not None:
            self._delivery.cancel()
        self._desk, self._delivery = None, None

    # Joining

    def _join(self) -> m.JoinReply:
        identity, machine = self._line.identity, self._machine

        def call() -> m.JoinReply:
            message = m.Join(
                protocol=m.PROTOCOL,
                public_key=identity.public_key,
                name=machine.name,
                device=machine.device,
                memory=machine.memory,
                speed=self._speed,
                held=self._cabinet.held(),
                nonce=new_nonce(),
                time=now_ms(),
            )
            return self._line.client.join(identity.sign(message))

        reply = self._line.insist(call, self._stopped)
        if reply.protocol != m.PROTOCOL or reply.worker != self._id:
            raise RunError(
                f"the coordinator speaks protocol {reply.protocol}, this worker {m.PROTOCOL}; install the same version"
            )
        self.config = _config(reply, machine.device)
        self._cabinet.trust(reply.run, reply.coordinator)
        self._line.run, self._line.fingerprint, self._line.key = (
            reply.run,
            reply.fingerprint,
            reply.coordinator,
        )
        self._require_memory(1)
        self._downloads = Downloads(
            self._line, self._cabinet.cache, self._cabinet.weights(reply.run), self._stopped
        )
        self._told(
            "joined",
            run=reply.run,
            worker=self._id,
            blocks=self.config.blocks,
            corpus=reply.corpus.name,
        )
        self.corpus: Corpus = self._downloads.corpus(reply.corpus)
        self.corpus.require(self.config.context)
        return reply

    def _require_memory(self, index: int) -> None:
        needed = footprint(self.config, index)
        if 0 < self._machine.memory < needed:
            raise RunError(
                f"training block {index} takes about {needed / 1e9:.2g} GB and --memory allows {self._machine.memory / 1e9:.2g} GB; "
                "allow more, or join a run with smaller blocks"
            )

    # The loop

    def _work(self, reply: m.JoinReply) -> str:
        """Until there is nothing more to do; why."""
        todo: m.Task | m.Wait | None = self._send_left_over() or reply.next
        while True:
            if self._finishing():
                self._answer()
                self._line.leave()
                return "the current task is finished"
            if todo is None:
                todo = self._line.insist(self._ask, self._stopped)
            if isinstance(todo, m.Wait) and todo.code == "finished":
                self._answer()
                self._line.leave()
                return todo.reason
            try:
                todo = self._idle(todo) if isinstance(todo, m.Wait) else self._do(todo)
            except Refused as error:
                if error.rule.then is not Then.NEXT:
                    raise
                self._told("abandoned", reason=str(error))
                self._desk, todo = None, None

    def _ask(self) -> m.Task | m.Wait:
        desk = self._desk
        held = m.Held(block=desk.block, **dict(desk.continued)) if desk else self._cabinet.held()
        return self._line.next_task(held, self._speed)

    def _idle(self, wait: m.Wait) -> m.Task | m.Wait | None:
        """Wait as told, or until the update on its way is answered."""
        self._told("waiting", seconds=wait.seconds, code=wait.code, reason=wait.reason)
        seconds = min(wait.seconds, SHARED_POLL) if self._cabinet.shared else wait.seconds
        end = time.monotonic() + max(seconds, LOOK_SECONDS)
        while time.monotonic() < end and not self._finishing():
            rest(LOOK_SECONDS, self._stopped)
            if self._delivery is not None and self._delivery.done:
                return self._settle()
        return None

    def _do(self, task: m.Task) -> m.Task | m.Wait | None:
        """One task; the next one if the answer to the update brought it."""
        folder = self._cabinet.block(self._line.run, task.block)
        waiting = folder.pending() if self._delivery is None else None
        if waiting is not None and waiting.answers(task.order):
            seconds = 0.0
            self._deliver_again(folder, waiting, task)
        else:
            began = time.monotonic()
            sending = self._train(task, folder)
            if sending is None:
                return None
            seconds = time.monotonic() - began
            self._delivery = sending
        if self._wait_for_answer(max(PATIENCE * seconds, LEAST_PATIENCE)):
            return self._settle()
        reply = self._line.insist(
            lambda: self._line.heartbeat(task, task.steps, None, 0), self._stopped
        )  # trained: on its way
        if not reply.go_on:  # the coordinator has judged it: the answer is on its way
            return self._answer()
        self._told("sending", block=task.block, task=task.task)
        return None

    def _train(self, task: m.Task, folder: BlockFolder) -> Delivery | None:
        """Train a task and begin to send its update; None if it was abandoned."""
        order = task.order
        desk = self._sit(order, folder)
        self._told(
            "task",
            block=order.block,
            task=order.task,
            base=order.base,
            start=order.start_step,
            steps=order.steps,
        )
        began, losses = time.monotonic(), []
        if (halfway := folder.halfway(order, desk.facts)) is not None:
            began -= halfway.pause.seconds
            losses = desk.go_on(halfway)
        end = order.start_step + order.steps
        self._desk = None  # until the task is done, what is at hand belongs to no task
        with Pulse(self._line, task) as pulse:
            for step, loss in desk.trainer.run(self.corpus.train, end):
                losses.append(loss)
                pulse.step, pulse.loss = step - order.start_step, loss
                self._told("step", block=order.block, task=order.task, step=step, of=end, loss=loss)
                if pulse.error is not None:
                    raise pulse.error
                if self._stopped():
                    folder.halt(desk.halfway(order, losses, time.monotonic() - began))
                    raise Interrupted("stopped")
                if pulse.over or not self._still_good(desk):
                    self._told(
                        "abandoned",
                        task=order.task,
                        reason=pulse.over or "the update that it continues was refused",
                    )
                    return None
        seconds = max(time.monotonic() - began, 1e-9)
        self._speed = order.steps / seconds
        self._answer(
            desk
        )  # the residual of the update before must be known before this one is compressed
        if not self._still_good(desk):
            self._told(
                "abandoned", task=order.task, reason="the update that it continues was refused"
            )
            return None
        return self._finish(task, desk, folder, losses, seconds)

    def _finish(
        self, task: m.Task, desk: Desk, folder: BlockFolder, losses: list[float], seconds: float
    ) -> Delivery:
        order, continued = task.order, desk.continued
        after, payload = desk.finish(order)
        submission = m.Submission(
            run=self._line.run,
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
            lineage=after.facts.lineage or "",
            nonce=new_nonce(),
            time=now_ms(),
        )
        pending = Pending(task=task, submission=submission)
        folder.save(after, pending, payload)
        self._desk = desk
        self._told(
            "trained",
            block=order.block,
            task=order.task,
            step=after.facts.step,
            loss=losses[-1],
            seconds=seconds,
            bytes=len(payload),
        )
        return Delivery(self._line, pending, payload, after.residual, again=False)

    def _sit(self, order: m.Order, folder: BlockFolder) -> Desk:
        """The trainer at the beginning of an order, with the state that the order continues, or a fresh one."""
        if order.seed != self.config.seed:
            raise RunError(
                f"task {order.task} has the seed {order.seed}, the run has {self.config.seed}; install the coordinator's version"
            )
        if self._desk is None or self._desk.block != order.block:
            self._desk = None  # before the next one is built: both may not fit
            self._require_memory(order.block)
            self._cabinet.remember(self._line.run, order.block)
        fits = self._desk is not None and self._desk.facts.fit(order)
        desk = open_desk(self.config, order, self._downloads.tensors, self._desk)
        if not fits:
            self._answer()
            self._settle_old(order, folder)
            kept = folder.load()
            desk.take(kept if kept.facts.fit(order) else Kept())
            if desk.facts.optimizer is None and order.start_step > 0:
                self._told("fresh", block=order.block, task=order.task)
        desk.begin(order, self._downloads.tensors)
        self._downloads.keep([order.weights, *(pin.weights for pin in order.features)])
        return desk

    def _settle_old(self, order: m.Order, folder: BlockFolder) -> None:
        """An update that somebody left in a shared folder: an order that goes on from it says that it was accepted."""
        if (old := folder.pending()) is not None:
            ended = (old.task.base + 1, old.task.start_step + old.task.steps)
            if old.task.task == order.continues.optimizer or ended == (
                order.base,
                order.start_step,
            ):
                folder.accept()
            else:
                folder.refuse()

    # Updates on their way

    def _send_left_over(self) -> m.Task | m.Wait | None:
        """Send what an earlier process has trained and not seen answered; the next task if the answer brought one."""
        todo = None
        for folder in self._cabinet.blocks(self._line.run):
            pending = folder.pending()
            if pending is not None and pending.submission.worker == self._id:
                self._told("resending", block=pending.task.block, task=pending.task.task)
                self._delivery = Delivery(self._line, pending, folder.payload(), None, again=True)
                todo = self._answer()
        return todo

    def _deliver_again(self, folder: BlockFolder, old: Pending, task: m.Task) -> None:
        """What the task asks for is on the disk already: send it under this lease."""
        claimed = old.submission.model_copy(update={"worker": self._id, "fence": task.fence})
        pending = Pending(task=task, submission=claimed)
        folder.rewrite(pending)
        self._told("resending", block=task.block, task=task.task)
        self._delivery = Delivery(self._line, pending, folder.payload(), None, again=True)

    def _wait_for_answer(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._delivery is not None and not self._delivery.wait(
            min(LOOK_SECONDS, max(0.0, end - time.monotonic()))
        ):
            if self._stopped():
                raise Interrupted("stopped")
            if time.monotonic() >= end:
                return False
        return True

    def _answer(self, desk: Desk | None = None) -> m.Task | m.Wait | None:
        """Wait for the answer to the update on its way, if there is one."""
        if self._delivery is None:
            return None
        self._wait_for_answer(float("inf"))
        return self._settle(desk)

    def _still_good(self, desk: Desk) -> bool:
        """Whether what is being trained may still count; takes note of an answer that has come in the meantime."""
        if self._delivery is not None and self._delivery.done:
            self._settle(desk)
        return desk.facts.optimizer not in self._rejected

    def _settle(self, desk: Desk | None = None) -> m.Task | m.Wait | None:
        """Take the answer to an update; the next task if it brought one."""
        desk = desk or self._desk
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return None
        task, reply = delivery.pending.task, delivery.reply
        folder = self._cabinet.block(self._line.run, task.block)
        if reply is not None and reply.receipt.accepted:
            folder.accept()
            if desk is not None and desk.block == task.block and delivery.residual is not None:
                desk.residual, desk.facts = (
                    delivery.residual,
                    desk.facts.model_copy(update={"residual": task.task}),
                )
            self.tally.accepted += 1
            self.tally.steps += task.steps
            self.tally.tokens += delivery.pending.submission.tokens
            self.tally.sent += delivery.sent
            step = task.start_step + task.steps
            told = {
                "sentence": reply.receipt.sentence,
                "update": reply.receipt.update,
                "entry": reply.receipt.entry,
            }
            self._told(
                "accepted", block=task.block, task=task.task, step=step, bytes=delivery.sent, **told
            )
            return reply.next
        error = delivery.error
        if reply is None and not (isinstance(error, Refused) and error.rule.then is Then.NEXT):
            raise error or RunError("an update ended without an answer")  # it stays on the disk
        folder.refuse()
        self._rejected.add(task.task)
        if self._desk is not None and self._desk.facts.optimizer == task.task:
            self._desk = None
        self.tally.refused += 1
        self._told(
            "refused",
            block=task.block,
            task=task.task,
            reason=reply.receipt.sentence if reply else str(error),
        )
        return reply.next if reply else None


def _config(reply: m.JoinReply, device: str) -> Config:
    """The run's settings, on this machine's device."""
    advice = "install the coordinator's version of blocktrain"
    try:
        config = make_config(dict(reply.config))
    except ConfigError as error:
        raise RunError(f"this version cannot read the run's settings ({error}); {advice}") from None
    if config.fingerprint != reply.fingerprint:
        raise RunError(
            f"the run's settings mean something else here ({config.fingerprint[:12]}..., not {reply.fingerprint[:12]}...); {advice}"
        )
    return config.replace(device=device)
