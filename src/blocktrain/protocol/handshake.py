"""How both ends of a connection prove that they know the shared key without sending it, and what they claim in the same breath.

A proof is HMAC-SHA256 under the key over who proves it, both nonces, and the claim: it fits one connection only.
"""

from __future__ import annotations

import hmac
from typing import Literal

from blocktrain.protocol.frames import PROTOCOL, FrameError, Hello, Role, Welcome, Why


def make_hello(key: bytes, challenge: bytes, nonce: bytes, role: Role, fingerprint: str) -> Hello:
    """The client's answer to a challenge."""
    return Hello(
        role, nonce, _proof(key, "client", challenge + nonce, f"{role} {fingerprint}"), fingerprint
    )


def check_hello(key: bytes, challenge: bytes, hello: Hello, fingerprint: str) -> None:
    """Refuse a client that does not know the key, or is at another model."""
    expected = _proof(key, "client", challenge + hello.nonce, f"{hello.role} {hello.fingerprint}")
    if not hmac.compare_digest(expected, hello.proof):
        raise FrameError(Why.WRONG_KEY)
    if hello.fingerprint != fingerprint:
        raise FrameError(
            Why.WRONG_FINGERPRINT, f"{hello.fingerprint[:12]} instead of {fingerprint[:12]}"
        )


def prove_welcome(key: bytes, challenge: bytes, nonce: bytes, welcome: Welcome) -> Welcome:
    """The same WELCOME with the stage's proof in it."""
    w = welcome
    proof = _proof(key, "stage", challenge + nonce, _held(welcome))
    return Welcome(proof, w.kind, w.blocks, w.width, w.context, w.z_width, w.fingerprint, w.model)


def check_welcome(
    key: bytes, challenge: bytes, nonce: bytes, welcome: Welcome, fingerprint: str, model: str = ""
) -> None:
    """Refuse a stage that does not know the key, or holds another model ("" takes any weights)."""
    if not hmac.compare_digest(
        _proof(key, "stage", challenge + nonce, _held(welcome)), welcome.proof
    ):
        raise FrameError(Why.WRONG_KEY)
    if welcome.fingerprint != fingerprint:
        raise FrameError(
            Why.WRONG_FINGERPRINT, f"{welcome.fingerprint[:12]} instead of {fingerprint[:12]}"
        )
    if model and welcome.model != model:
        raise FrameError(Why.WRONG_MODEL, f"{welcome.model[:12]} instead of {model[:12]}")


def _held(welcome: Welcome) -> str:
    blocks = ",".join(str(n) for n in welcome.blocks)
    return f"{welcome.kind} {blocks} {welcome.width} {welcome.context} {welcome.z_width} {welcome.fingerprint} {welcome.model}"


def _proof(key: bytes, who: Literal["client", "stage"], nonces: bytes, claim: str) -> bytes:
    return hmac.digest(
        key, f"blocktrain frames {PROTOCOL} {who}\n".encode() + nonces + claim.encode(), "sha256"
    )
