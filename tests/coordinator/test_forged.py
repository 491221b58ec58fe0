"""Of ten thousand forged, replayed or malformed submissions none is accepted, or changes anything.

They take the way of every request: bytes, a message, the call. Some hundred come over HTTP.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from backports import zstd

from blocktrain.clock import SimulatedClock
from blocktrain.fuzzing.mutate import mutate
from blocktrain.protocol import calls, compression
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import new_identity
from blocktrain.protocol.refusals import RULES, Code, Refused
from blocktrain.protocol.transfer import sha256
from blocktrain.watch.server import Listen, WatchedCoordinator, serve_coordinator
from blocktrain.web.client import LocalClient
from support.fake_worker import TOKEN, FakeWorker, as_task, beginning, snapshot

FORGERIES, OVER_HTTP = 10_000, 300


@dataclass
class Attack:
    """A run with honest members, what they have sent and will send, and who attacks it."""

    coordinator: WatchedCoordinator
    honest: FakeWorker
    """Has a task, and all its chunks are there: only its submission is missing."""
    task: m.Task
    payload: bytes
    submission: m.Submission
    done: FakeWorker
    """Has answered a task, and has the next one."""
    receipt: m.Receipt
    answered: m.Submission
    second: m.Task
    late: m.Submission
    """Of a task that somebody else has by now."""
    thief: FakeWorker
    """Joined, with a task of its own."""
    own: m.Task
    kicked: m.Submission
    draw: random.Random

    def claim(self, /, **changes: Any) -> bytes:
        """The honest member says something else, and signs it."""
        return m.write(self.honest.submission(self.task, self.payload, **changes))

    def text(self, **values: str) -> bytes:
        """The honest submission with fields that are written like this."""
        fields = json.loads(m.write(self.submission))
        return _as_text({name: json.dumps(value) for name, value in fields.items()} | values)


def _as_text(fields: dict[str, str]) -> bytes:
    return ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()


@contextmanager
def attacked(folder: Path) -> Iterator[Attack]:
    clock = SimulatedClock(1000.0)
    with beginning(folder, clock=clock, replicas=1000) as coordinator:
        people = [FakeWorker(LocalClient(coordinator), seed) for seed in range(1, 7)]
        slow, quick, honest, done, thief, removed = people
        old = slow.joined()
        late = slow.submission(old, slow.payload(old))
        slow.upload(old, slow.payload(old))
        clock.now += 100.0
        coordinator.tick()
        assert as_task(quick.join().next).task == old.task
        task = honest.joined()
        payload = honest.payload(task)
        honest.upload(task, payload)
        first = done.joined()
        done.upload(first, done.payload(first))
        answered = done.submission(first, done.payload(first))
        reply = done.client.submit(answered)
        own, lost = thief.joined(), removed.joined()
        kicked = removed.submission(lost, removed.payload(lost))
        coordinator.kick(m.Kick(worker=removed.id))
        assert reply.receipt.accepted, "an honest one before"
        yield Attack(
            coordinator,
            honest,
            task,
            payload,
            honest.submission(task, payload),
            done,
            reply.receipt,
            answered,
            as_task(reply.next),
            late,
            thief,
            own,
            kicked,
            random.Random(0),
        )


# What is sent. Each makes a body, or raises the refusal of what it sends before.


def another_signature(a: Attack) -> bytes:
    """None, somebody else's, or that of another message."""
    beat = a.honest.identity.sign(
        m.Heartbeat(
            run=a.honest.run,
            worker=a.honest.id,
            task=a.task.task,
            fence=a.task.fence,
            step=1,
            bytes=0,
            nonce=a.draw.randbytes(16).hex(),
        )
    )
    signature = a.draw.choice(
        (
            "",
            a.draw.randbytes(64).hex(),
            beat.signature,
            a.answered.signature,
            a.thief.identity.sign(a.submission).signature,
        )
    )
    return m.write(a.submission.model_copy(update={"signature": signature}))


def changed_after_signing(a: Attack) -> bytes:
    field, value = a.draw.choice(
        (
            ("loss_after", a.draw.random()),
            ("loss_before", a.draw.random()),
            ("seconds", 1 + a.draw.random()),
            ("payload_sha256", a.draw.randbytes(32).hex()),
            ("payload_length", a.draw.randrange(1, 1 << 20)),
            ("tokens", a.draw.randrange(1, 1 << 20)),
            ("steps", a.draw.randrange(3, 1 << 20)),
            ("lineage", a.draw.randbytes(32).hex()),
            ("nonce", a.draw.randbytes(16).hex()),
            ("time", a.draw.randrange(1, 1 << 40)),
            ("worker", a.thief.id),
        )
    )
    return m.write(a.submission.model_copy(update={field: value}))


def of_a_stranger(a: Attack) -> bytes:
    stranger = new_identity()
    said = a.submission.model_copy(update={"worker": stranger.worker})
    return m.write(stranger.sign(said))


def of_another_run(a: Attack) -> bytes:
    return a.claim(run=a.draw.randbytes(16).hex())


def with_a_stolen_task(a: Attack) -> bytes:
    task = a.draw.choice((a.task, a.second))
    return m.write(a.thief.submission(task, a.draw.choice((a.payload, b"other bytes"))))


def with_the_answer_of_another(a: Attack) -> bytes:
    said = a.answered.model_copy(update={"worker": a.thief.id, "nonce": a.draw.randbytes(16).hex()})
    return m.write(a.thief.identity.sign(said))


def with_an_old_fence(a: Attack) -> bytes:
    return m.write(a.late)


def with_a_fence_that_was_never_given(a: Attack) -> bytes:
    return a.claim(fence=a.task.fence + a.draw.randrange(1, 1000))


def for_no_such_task(a: Attack) -> bytes:
    return a.claim(task=a.draw.randrange(1000, 2**53))


def for_another_block(a: Attack) -> bytes:
    return a.claim(block=a.draw.choice((3 - a.task.block, 3, 256)))


def from_another_version(a: Attack) -> bytes:
    return a.claim(base=a.draw.randrange(1, 2**53))


def with_other_steps(a: Attack) -> bytes:
    steps = a.draw.choice((1, 3, a.draw.randrange(3, 1 << 30)))
    return a.claim(steps=steps, tokens=steps * 32)


def with_other_tokens(a: Attack) -> bytes:
    return a.claim(tokens=a.draw.choice((1, 65, a.draw.randrange(65, 2**53))))


def after_a_task_that_never_counted(a: Attack) -> bytes:
    return a.claim(continued=m.Lineage(**{a.draw.choice(("optimizer", "residual")): 999}))


def another_answer_to_an_answered_task(a: Attack) -> bytes:
    changes = {"payload_sha256": a.draw.randbytes(32).hex(), "nonce": a.draw.randbytes(16).hex()}
    return m.write(a.done.identity.sign(a.answered.model_copy(update=changes)))


def of_another_length(a: Attack) -> bytes:
    length = a.draw.choice((1, len(a.payload) + 5000, 1 << 30, 1 << 50))
    return a.claim(payload_length=length, chunks=min(-(-length // 1024), 1 << 16))


def in_other_chunks(a: Attack) -> bytes:
    return a.claim(chunks=a.submission.chunks + a.draw.randrange(1, 9))


def without_its_chunks(a: Attack) -> bytes:
    return m.write(a.thief.submission(a.own, a.payload))


def of_a_kicked_worker(a: Attack) -> bytes:
    return m.write(a.kicked)


NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "9" * 400, "1.5", '"1"', "null", "[]")


def with_odd_numbers(a: Attack) -> bytes:
    """Those that JSON does not have, and those that no field may have."""
    whole = ("task", "fence", "block", "base", "payload_length", "chunks", "steps", "tokens")
    floats = ("loss_before", "loss_after", "seconds")
    if a.draw.random() < 0.3:
        return a.text(**{a.draw.choice(floats): a.draw.choice(NUMBERS[:6])})
    return a.text(**{a.draw.choice(whole): a.draw.choice(NUMBERS)})


def with_a_key_twice(a: Attack) -> bytes:
    """The last one counts, and it is not what was signed."""
    field, value = a.draw.choice((("task", "9"), ("tokens", "7"), ("loss_after", "0.25")))
    return m.write(a.submission)[:-1] + f',"{field}":{value}}}'.encode()


def cut_off(a: Attack) -> bytes:
    body = m.write(a.submission)
    return body[: a.draw.randrange(len(body))]


def of_another_kind(a: Attack) -> bytes:
    return m.write(a.draw.choice((a.honest.request(), a.honest.join_message(), a.receipt)))


def changed_anywhere(a: Attack) -> bytes:
    """Any bytes and values, as long as they do not say the same."""
    while True:
        body = mutate(m.write(a.submission), a.draw)
        try:
            if m.read(m.Submission, body) != a.submission:
                return body
        except Refused:
            return body


def chunk(a: Attack) -> bytes:
    """A chunk without its ticket, of a wrong length, with another hash, or of another place."""
    task, content = a.task, a.payload[: a.task.chunk_bytes]
    ticket, digest = a.draw.randbytes(16).hex(), a.draw.randbytes(32).hex()
    sent: tuple[int, int, str, bytes, str] = a.draw.choice(
        (
            (task.task, 0, ticket, content, sha256(content)),
            (a.own.task, 0, task.ticket, content, sha256(content)),
            (task.task, 0, task.ticket, content, digest),
            (task.task, 0, task.ticket, content + b"x", sha256(content + b"x")),
            (task.task, 1 << 20, task.ticket, content, sha256(content)),
            (999, 0, task.ticket, content, sha256(content)),
        )
    )
    a.coordinator.put_chunk(*sent)
    raise AssertionError("the chunk was taken")


CHEAP: tuple[Callable[[Attack], bytes], ...] = (
    another_signature,
    changed_after_signing,
    of_a_stranger,
    of_another_run,
    with_a_stolen_task,
    with_the_answer_of_another,
    with_an_old_fence,
    with_a_fence_that_was_never_given,
    for_no_such_task,
    for_another_block,
    from_another_version,
    with_other_steps,
    with_other_tokens,
    after_a_task_that_never_counted,
    another_answer_to_an_answered_task,
    of_another_length,
    in_other_chunks,
    without_its_chunks,
    of_a_kicked_worker,
    with_odd_numbers,
    with_a_key_twice,
    cut_off,
    of_another_kind,
    changed_anywhere,
    chunk,
)


# These send a payload first. The chunks of a refused one are dropped, so each sends it again.


def with_a_nonce_that_was_used(a: Attack) -> bytes:
    payload = a.done.payload(a.second)
    a.done.upload(a.second, payload)
    return m.write(a.done.submission(a.second, payload, nonce=a.answered.nonce))


def with_another_hash(a: Attack) -> bytes:
    payload = a.thief.payload(a.own)
    a.thief.upload(a.own, payload)
    said = a.thief.submission(a.own, payload, payload_sha256=a.draw.randbytes(32).hex())
    return m.write(said)


def with_a_payload_that_is_none(a: Attack) -> bytes:
    """Cut, of other tensors or another compression, with values that nobody computes."""
    honest = a.thief.payload(a.own)
    raw = bytearray(zstd.decompress(honest))
    size = int.from_bytes(raw[:8], "little")
    scales = 8 + size + json.loads(raw[8 : 8 + size])["scales"]["data_offsets"][0]
    raw[scales : scales + 2] = b"\xff\x7f"  # not a number
    tensors = {name: np.zeros(t.shape, "<f4") for name, t in a.thief.weights(a.own).items()}
    payload = a.draw.choice(
        (
            honest[: a.draw.randrange(1, len(honest))],
            honest + b"x",
            compression.compress({"a": np.zeros(3, "<f4")}, None, "int4")[0],
            compression.compress(tensors, None, "int8")[0],
            compression.compress_weights(tensors),
            zstd.compress(bytes(1 << 20)),
            zstd.compress(bytes(raw)),
        )
    )
    a.thief.upload(a.own, payload)
    return m.write(a.thief.submission(a.own, payload))


COSTLY = (with_a_nonce_that_was_used, with_another_hash, with_a_payload_that_is_none)


def attempt(a: Attack, make: Callable[[Attack], bytes]) -> Code | None:
    """Why it is refused; None: it was accepted."""
    try:
        a.coordinator.submit(m.read(m.Submission, make(a)))
    except Refused as error:
        assert error.sentence
        return error.code
    return None


def test_none_of_ten_thousand_is_accepted(tmp_path: Path) -> None:
    with attacked(tmp_path) as a:
        before = snapshot(a.coordinator)
        counts: Counter[str] = Counter()
        codes: dict[str, set[Code | None]] = {}
        for number in range(FORGERIES):
            make = COSTLY[number % len(COSTLY)] if number % 250 == 0 else a.draw.choice(CHEAP)
            counts[make.__name__] += 1
            codes.setdefault(make.__name__, set()).add(attempt(a, make))
        accepted = [name for name, found in codes.items() if None in found]
        assert accepted == [] and counts.total() == FORGERIES
        assert set(codes) == {make.__name__ for make in (*CHEAP, *COSTLY)}
        for name, code in EXPECTED.items():
            assert codes[name] == {code}, name
        assert snapshot(a.coordinator) == before, "nothing has changed"
        for _ in range(100):  # the same again is answered by the first receipt, and counts once
            assert a.coordinator.submit(a.answered).receipt == a.receipt
        assert snapshot(a.coordinator) == before
        a.honest.upload(a.task, a.payload)
        assert a.coordinator.submit(a.submission).receipt.accepted, "an honest one after"
        assert snapshot(a.coordinator).head != before.head


EXPECTED = {
    "another_signature": Code.BAD_SIGNATURE,
    "of_a_stranger": Code.UNKNOWN_WORKER,
    "of_another_run": Code.WRONG_RUN,
    "with_a_stolen_task": Code.NOT_YOUR_TASK,
    "with_the_answer_of_another": Code.NOT_YOUR_TASK,
    "with_an_old_fence": Code.STALE_FENCE,
    "for_no_such_task": Code.UNKNOWN_TASK,
    "with_other_steps": Code.WRONG_STEPS,
    "with_other_tokens": Code.WRONG_WEIGHT,
    "another_answer_to_an_answered_task": Code.TASK_ANSWERED,
    "without_its_chunks": Code.MISSING_CHUNKS,
    "of_a_kicked_worker": Code.KICKED,
    "with_odd_numbers": Code.MALFORMED,
    "with_a_key_twice": Code.BAD_SIGNATURE,
    "cut_off": Code.MALFORMED,
    "with_a_nonce_that_was_used": Code.REPLAYED,
    "with_another_hash": Code.HASH_MISMATCH,
}


def test_nor_over_http(tmp_path: Path) -> None:
    with (
        attacked(tmp_path) as a,
        serve_coordinator(a.coordinator, Listen(token=TOKEN)) as url,
        httpx2.Client(base_url=url, timeout=120) as http,
    ):
        key = {"Authorization": f"Bearer {TOKEN}", "Content-Type": calls.JSON}
        before = snapshot(a.coordinator)
        makes = [make for make in CHEAP if make is not chunk]
        for number in range(OVER_HTTP):
            body = makes[number % len(makes)](a)
            answer = http.post(calls.SUBMIT.path, content=body, headers=key)
            found = m.Refusal.model_validate_json(answer.content)
            assert answer.status_code == RULES[found.code].status and answer.status_code < 500
        body = m.write(a.submission)
        for headers in ({"Content-Type": calls.JSON}, {**key, "Authorization": "Bearer x"}):
            assert http.post(calls.SUBMIT.path, content=body, headers=headers).status_code == 401
        assert snapshot(a.coordinator) == before
        a.honest.upload(a.task, a.payload)
        reply = http.post(calls.SUBMIT.path, content=body, headers=key)
        assert m.SubmitReply.model_validate_json(reply.content).receipt.accepted
