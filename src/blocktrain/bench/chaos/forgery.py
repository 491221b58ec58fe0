"""Submissions that must not count: forged, replayed and malformed ones. Pure, one row each.

To add one, write a function and put it into `FORGERIES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity
from blocktrain.protocol.ledger import BEGINNING, LeaseFacts
from blocktrain.protocol.transfer import sha256


@dataclass(frozen=True)
class ForgeryMaterial:
    """What a forger has: the public record, a key that has joined, and one that has not."""

    run: str
    member: Identity
    stranger: Identity
    recorded: Sequence[m.Submission]
    """Accepted submissions of others, as the ledger shows them to everybody."""
    leased: Sequence[LeaseFacts]
    """Leases of others that may be open."""
    own: tuple[m.Order, int]
    """A task that the member was given, with its fence."""
    draw: random.Random


@dataclass(frozen=True)
class Forged:
    """The body of a submission, and a payload that is uploaded for the own task before."""

    body: bytes
    payload: bytes = b""


Forgery = Callable[[ForgeryMaterial], Forged]


def _hex(draw: random.Random, digits: int) -> str:
    return draw.randbytes(digits // 2).hex()


def _own_claim(at: ForgeryMaterial) -> m.Submission:
    return _claim(at, *at.own, at.member.worker)


def _claim(at: ForgeryMaterial, order: m.Order, fence: int, worker: str) -> m.Submission:
    """What an honest worker would say about such a task, without a signature."""
    return m.Submission(
        run=at.run,
        worker=worker,
        task=order.task,
        fence=fence,
        block=order.block,
        base=order.base,
        payload_sha256=_hex(at.draw, 64),
        payload_length=1000,
        chunks=1,
        steps=order.steps,
        tokens=at.recorded[0].tokens * order.steps // at.recorded[0].steps,
        loss_before=3.0,
        loss_after=2.5,
        continued=m.Lineage(),
        lineage=BEGINNING,
        nonce=_hex(at.draw, 32),
        time=0,
    )


def _some(at: ForgeryMaterial) -> m.Submission:
    return at.draw.choice(at.recorded)


def _signed(key: Identity, message: m.Submission) -> Forged:
    return Forged(m.write(key.sign(message)))


def replay(at: ForgeryMaterial) -> Forged:
    """The old receipt is a good answer; a second entry is not."""
    return Forged(m.write(_some(at)))


def change_a_field(at: ForgeryMaterial) -> Forged:
    old, draw = _some(at), at.draw
    changes: Sequence[dict[str, Any]] = (
        {"task": old.task + 1},
        {"fence": old.fence + 1},
        {"base": old.base + 1},
        {"steps": old.steps + 1},
        {"loss_after": 0.0},
        {"payload_sha256": _hex(draw, 64)},
        {"nonce": _hex(draw, 32)},
        {"worker": at.member.worker},
        {"seconds": old.seconds + 1.0},
    )
    return Forged(m.write(old.model_copy(update=draw.choice(changes))))


def sign_for_another(at: ForgeryMaterial) -> Forged:
    lease = at.draw.choice(at.leased)
    return _signed(at.member, _claim(at, lease.order, lease.fence, lease.worker))


def take_anothers_task(at: ForgeryMaterial) -> Forged:
    lease = at.draw.choice(at.leased)
    return _signed(at.member, _claim(at, lease.order, lease.fence, at.member.worker))


def never_joined(at: ForgeryMaterial) -> Forged:
    lease = at.draw.choice(at.leased)
    return _signed(at.stranger, _claim(at, lease.order, lease.fence, at.stranger.worker))


def unsigned(at: ForgeryMaterial) -> Forged:
    return Forged(m.write(_own_claim(at)))


def another_run(at: ForgeryMaterial) -> Forged:
    claim = _own_claim(at)
    return _signed(at.member, claim.model_copy(update={"run": _hex(at.draw, 32)}))


def without_payload(at: ForgeryMaterial) -> Forged:
    return _signed(at.member, _own_claim(at))


def payload_of_noise(at: ForgeryMaterial) -> Forged:
    """Everything is in order, but what was uploaded is no update."""
    payload = at.draw.randbytes(200)
    said = {"payload_sha256": sha256(payload), "payload_length": 200}
    claim = _own_claim(at)
    return Forged(_signed(at.member, claim.model_copy(update=said)).body, payload)


def payload_of_another_name(at: ForgeryMaterial) -> Forged:
    payload = at.draw.randbytes(1000)
    claim = _own_claim(at)
    return Forged(_signed(at.member, claim).body, payload)


def claim_other_work(at: ForgeryMaterial) -> Forged:
    claim = _own_claim(at)
    changes: Sequence[dict[str, Any]] = (
        {"steps": claim.steps + 1},
        {"tokens": claim.tokens + 1},
        {"base": claim.base + 1},
        {"fence": claim.fence + 1},
        {"task": claim.task + 1000},
        {"payload_length": 2**40},
        {"continued": m.Lineage(optimizer=10**6)},
    )
    return _signed(at.member, claim.model_copy(update=at.draw.choice(changes)))


def cut(at: ForgeryMaterial) -> Forged:
    body = m.write(_some(at))
    return Forged(body[: at.draw.randrange(len(body))])


def flip_a_byte(at: ForgeryMaterial) -> Forged:
    body = bytearray(m.write(_some(at)))
    body[at.draw.randrange(len(body))] ^= 1 << at.draw.randrange(8)
    return Forged(bytes(body))


def noise_for_json(at: ForgeryMaterial) -> Forged:
    return Forged(at.draw.randbytes(at.draw.randrange(1, 2000)))


def unknown_field(at: ForgeryMaterial) -> Forged:
    return Forged(m.write(_some(at))[:-1] + b',"trusted":true}')


def not_finite(at: ForgeryMaterial) -> Forged:
    body = m.write(_some(at).model_copy(update={"loss_after": 0.12345}))
    return Forged(body.replace(b"0.12345", at.draw.choice((b"NaN", b"Infinity", b"1e999"))))


def deep(at: ForgeryMaterial) -> Forged:
    return Forged(b"[" * 30_000 + b"]" * 30_000)


def too_long(at: ForgeryMaterial) -> Forged:
    return Forged(b" " * m.MAX_JSON + m.write(_some(at)))


FORGERIES: dict[str, Forgery] = {
    row.__name__.replace("_", "-"): row
    for row in (
        replay,
        change_a_field,
        sign_for_another,
        take_anothers_task,
        never_joined,
        unsigned,
        another_run,
        without_payload,
        payload_of_noise,
        payload_of_another_name,
        claim_other_work,
        cut,
        flip_a_byte,
        noise_for_json,
        unknown_field,
        not_finite,
        deep,
        too_long,
    )
}
