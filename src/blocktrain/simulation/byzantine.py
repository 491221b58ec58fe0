"""Members that cheat: one small class each, in the table `POLICIES`.

To add one, write a class, add its name to `tape.Member`, and put it into the table. What must hold
in spite of it is in `invariants`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from backports import zstd

from blocktrain.errors import BlockTrainError
from blocktrain.protocol import messages as m
from blocktrain.protocol.compression import METHODS, compress
from blocktrain.protocol.ledger import JoinFacts, UpdateBody, read_body
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.protocol.tensors import Tensors, pack, schema_hash, schema_of
from blocktrain.protocol.transfer import sha256, split
from blocktrain.simulation.begin import LANE
from blocktrain.simulation.network import put_all
from blocktrain.simulation.tape import Member
from blocktrain.simulation.worker import Continuation, HonestWorker, TrainedUpdate

PATIENCE = 2.0  # seconds between two tries


class Cheat(HonestWorker):
    """Works as an honest worker does, but for what a policy overrides."""

    honest = False

    def _main(self) -> None:
        """Whatever it is told, it comes again, unless it was removed."""
        while not self.ended:
            try:
                super()._main()
            except BlockTrainError:
                self.disk.pending.clear()
            self.outside.clock.sleep(PATIENCE)

    def _finish(
        self, task: m.Task, state: Continuation, base: Tensors, seconds: float
    ) -> TrainedUpdate:
        made = super()._finish(task, state, base, seconds)
        self.misbehave(task, base, made)
        return made

    def misbehave(self, task: m.Task, base: Tensors, made: TrainedUpdate) -> None:
        """What it does between training and sending."""

    def attempt(self, work: Callable[[], object]) -> None:
        """Something that is most likely refused."""
        try:
            work()
        except BlockTrainError:
            self.outside.clock.sleep(0.1)

    def put(self, task: m.Task, payload: bytes) -> None:
        chunks = split(payload, task.chunk_bytes)
        put_all(self.session.client, task.task, task.ticket, chunks)

    def claim(self, task: m.Task, payload: bytes, **lies: object) -> None:
        """Submit a payload, with fields that nothing on this side has checked."""
        fields = self.submission(task, payload, 1.0, m.Lineage(), "6a" * 32)
        message = self.outside.identity.sign(fields.model_copy(update=lies))
        self.attempt(lambda: self.session.client.submit(message))

    def send(self, task: m.Task, payload: bytes, **lies: object) -> None:
        self.attempt(lambda: self.put(task, payload))
        self.claim(task, payload, **lies)


class Squatter(Cheat):
    """Takes tasks, begins to send, says that it is alive, and never answers. Then it may leave."""

    def _do(self, task: m.Task) -> m.Task | m.Wait | None:
        self.attempt(lambda: self.put(task, b"nothing"))
        for _ in range(self.outside.draw.choice((2, 20))):
            self.attempt(lambda: self.session.heartbeat(task, 0, None, 0))
            self.outside.clock.sleep(PATIENCE)
        if self.outside.draw.random() < 0.5:
            self.session.leave()
            raise Refused(Code.UNKNOWN_WORKER)
        return None


class Replayer(Cheat):
    """Sends each of its updates again, the very same bytes, later and more than once."""

    def _take_answer(self) -> m.Task | m.Wait | None:
        sent, upload = self._sent, self._upload
        found = super()._take_answer()
        if sent is not None and upload is not None and upload.reply is not None:
            message, first = self.outside.identity.sign(sent.submission), upload.reply.receipt
            for _ in range(3):
                self.attempt(lambda: self._replay(message, first))
                self.outside.clock.sleep(self.outside.draw.uniform(0.1, 8.0))
        return found

    def _replay(self, message: m.Submission, first: m.Receipt) -> None:
        again = self.session.client.submit(message).receipt
        self.outside.witness.repeated(first, again)


class DoubleSubmitter(Cheat):
    """Answers each task with two updates."""

    def misbehave(self, task: m.Task, base: Tensors, made: TrainedUpdate) -> None:
        delta, tags = self.change(task, base)
        delta["weights"] = -delta["weights"]
        if METHODS[task.compression].exact:
            other = pack_weights({name: base[name] + delta[name] for name in base})
        else:
            other = compress(delta, None, task.compression)[0]
        self.outside.witness.sent(sha256(other), tags)
        for payload in (other, made.payload, other):
            self.send(task, payload)


class WrongHash(Cheat):
    """Announces other bytes, another length, or other steps than it sends."""

    def misbehave(self, task: m.Task, base: Tensors, made: TrainedUpdate) -> None:
        said = made.submission
        lies: tuple[dict[str, object], ...] = (
            {"payload_sha256": "0" * 64},
            {"payload_length": said.payload_length - 1},
            {"steps": task.steps + 1},
            {"tokens": said.tokens + 1},
            {"base": task.base + 1},
            {"continued": m.Lineage(optimizer=10**6)},
        )
        for lie in lies:
            self.send(task, made.payload, **lie)


class StaleFence(Cheat):
    """Sleeps until its lease has run out, and then answers with every fence it can think of."""

    def misbehave(self, task: m.Task, base: Tensors, made: TrainedUpdate) -> None:
        self.outside.clock.sleep(task.lease_seconds + 5.0)
        for fence in (task.fence + 1, task.fence):
            self.send(task, made.payload, fence=fence)


class SpeedLiar(Cheat):
    """Says that it is very fast, or very slow."""

    def submission(
        self, task: m.Task, payload: bytes, seconds: float, continued: m.Lineage, name: str
    ) -> m.Submission:
        lie = self.outside.draw.choice((1e-6, 1e-3, 40.0))
        return super().submission(task, payload, lie, continued, name)


class NotANumber(Cheat):
    """Sends values that are not finite, and bytes that are no payload."""

    def misbehave(self, task: m.Task, base: Tensors, made: TrainedUpdate) -> None:
        delta, tags = self.change(task, base)
        delta["weights"][0] = np.nan
        for payload in (pack(delta), pack_weights({n: base[n] + delta[n] for n in base})):
            self.outside.witness.sent(sha256(payload), tags)
            self.send(task, payload)


class Huge(Cheat):
    """Sends an update that is a thousand times too long."""

    def change(self, task: m.Task, base: Tensors) -> tuple[Tensors, Tensors]:
        delta, tags = super().change(task, base)
        delta["weights"] = delta["weights"] * np.float32(1e3)
        return delta, tags


class Zeros(Cheat):
    """Sends an update that changes nothing, not even the lane."""

    def change(self, task: m.Task, base: Tensors) -> tuple[Tensors, Tensors]:
        nothing = {name: np.zeros_like(t) for name, t in base.items()}
        return nothing, {LANE: nothing[LANE]}


class Thief(Cheat):
    """Answers the tasks of others, with tickets that it makes up, and speaks in their names."""

    def misbehave(self, task: m.Task, base: Tensors, made: TrainedUpdate) -> None:
        for other in range(max(1, task.task - 4), task.task + 4):
            if other != task.task:
                self._steal(task.model_copy(update={"task": other, "fence": 1}), made.payload)
        self.attempt(self._send_others_away)

    def _steal(self, stolen: m.Task, payload: bytes) -> None:
        def break_in() -> None:
            self.put(stolen, payload)
            self.outside.witness.trespassed("chunks came with the ticket of another task")

        self.attempt(break_in)
        self.claim(stolen, payload)

    def _send_others_away(self) -> None:
        client = self.session.client
        for entry in client.ledger(0).entries:
            if entry.kind != "join":
                continue
            victim = read_body(JoinFacts, entry).worker
            if victim != self.id:
                request = m.TaskRequest(
                    run=self.session.run,
                    worker=victim,
                    fingerprint=self.session.fingerprint,
                    speed=0.0,
                    leaving=True,
                    nonce=self.session.surroundings.nonce(),
                )
                client.next_task(self.outside.identity.sign(request))
                self.outside.witness.trespassed("a worker was signed off by another one")


class Copier(Cheat):
    """Tries to read the payloads of others before their round is closed."""

    def misbehave(self, task: m.Task, base: Tensors, made: TrainedUpdate) -> None:
        self.attempt(self._copy)

    def _copy(self) -> None:
        client, after = self.session.client, 0
        while page := client.ledger(after).entries:
            after = page[-1].seq
            for entry in page[-20:]:
                if entry.kind == "update":
                    name = read_body(UpdateBody, entry).submission.payload_sha256
                    self.attempt(lambda name=name: list(client.blob(name)))  # type: ignore[misc]


def pack_weights(weights: Tensors) -> bytes:
    """A payload of weights that nothing on this side has checked."""
    names = sorted(weights)
    wire = METHODS["none"].encode([weights[name].reshape(-1) for name in names], 0)
    return zstd.compress(pack(wire, f"weights 1 none 0 {schema_hash(schema_of(weights))}"))


POLICIES: dict[Member, type[Cheat]] = {
    "squatter": Squatter,
    "replayer": Replayer,
    "double": DoubleSubmitter,
    "wrong-hash": WrongHash,
    "stale-fence": StaleFence,
    "speed-liar": SpeedLiar,
    "nan": NotANumber,
    "huge": Huge,
    "zeros": Zeros,
    "thief": Thief,
    "copier": Copier,
}
