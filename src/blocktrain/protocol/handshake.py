"""How both ends of a connection prove that they know the shared key without sending it.

A proof is an HMAC-SHA256 under the key over the prover's side, both nonces and what it claims, so
it is valid for one connection only.
"""

from __future__ import annotations

import hmac
from typing import Literal

from blocktrain.protocol.frames import PROTOCOL, FrameError, Hello, Role, Welcome, Why


def make_hello(
    key: bytes, challenge: bytes, nonce: bytes, role: Role, fingerprint: str, id_bytes: int
) -> Hello:
    """The client's answer to a challenge."""
    claim = f"{role} {fingerprint} {id_bytes}"
    proof = _proof(key, "client", challenge + nonce, claim)
    return Hello(role, nonce, proof, fingerprint, id_bytes)


def check_hello(
    key: bytes, challenge: bytes, hello: Hello, fingerprint: str, id_bytes: int
) -> None:
    """Refuse a client that does not know the key, has another model, or ids of another width."""
    claim = f"{hello.role} {hello.fingerprint} {hello.id_bytes}"
    expected = _proof(key, "client", challenge + hello.nonce, claim)
    if not hmac.compare_digest(expected, hello.proof):
        raise FrameError(Why.WRONG_KEY)
    if hello.fingerprint != fingerprint:
        raise FrameError(
            Why.WRONG_FINGERPRINT, f"{hello.fingerprint[:12]} instead of {fingerprint[:12]}"
        )
    if hello.id_bytes != id_bytes:
        raise FrameError(Why.WRONG_ID_WIDTH, f"{hello.id_bytes} bytes instead of {id_bytes}")


def prove_welcome(key: bytes, challenge: bytes, nonce: bytes, welcome: Welcome) -> Welcome:
    """The same WELCOME with the stage's proof in it."""
    w = welcome
    proof = _proof(key, "stage", challenge + nonce, _welcome_claim(welcome))
    return Welcome(proof, w.kind, w.blocks, w.width, w.context, w.z_width, w.fingerprint, w.model)


def check_welcome(
    key: bytes, challenge: bytes, nonce: bytes, welcome: Welcome, fingerprint: str, model: str = ""
) -> None:
    """Refuse a stage that does not know the key, or holds another model ("" takes any weights)."""
    if not hmac.compare_digest(
        _proof(key, "stage", challenge + nonce, _welcome_claim(welcome)), welcome.proof
    ):
        raise FrameError(Why.WRONG_KEY)
    if welcome.fingerprint != fingerprint:
        raise FrameError(
            Why.WRONG_FINGERPRINT, f"{welcome.fingerprint[:12]} instead of {fingerprint[:12]}"
        )
    if model and welcome.model != model:
        raise FrameError(Why.WRONG_MODEL, f"{welcome.model[:12]} instead of {model[:12]}")


def _welcome_claim(welcome: Welcome) -> str:
    blocks = ",".join(str(n) for n in welcome.blocks)
    return (
        f"{welcome.kind} {blocks} {welcome.width} {welcome.context} {welcome.z_width} "
        f"{welcome.fingerprint} {welcome.model}"
    )


def _proof(key: bytes, who: Literal["client", "stage"], nonces: bytes, claim: str) -> bytes:
    return hmac.digest(
        key, f"blocktrain frames {PROTOCOL} {who}\n".encode() + nonces + claim.encode(), "sha256"
    )
