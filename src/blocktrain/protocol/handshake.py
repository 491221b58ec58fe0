"""How both ends of a connection prove that they know the shared key without sending it.

A proof is an HMAC-SHA256 under the key over the prover's side, both nonces and what it claims, so
it is valid for one connection only. Over TLS a claim begins with the sha256 of the stage's
certificate: who stands in between has another one.
"""

from __future__ import annotations

import hmac
from typing import Literal

from blocktrain.protocol.frames import PROTOCOL, FrameError, Hello, Role, Welcome, Why
from blocktrain.protocol.messages import StageNotice


def make_hello(
    key: bytes,
    challenge: bytes,
    nonce: bytes,
    role: Role,
    fingerprint: str,
    id_bytes: int,
    certificate: str = "",
) -> Hello:
    """The client's answer to a challenge."""
    claim = _over(certificate, f"{role} {fingerprint} {id_bytes}")
    proof = _proof(key, "client", challenge + nonce, claim)
    return Hello(role, nonce, proof, fingerprint, id_bytes)


def check_hello(
    key: bytes,
    challenge: bytes,
    hello: Hello,
    fingerprint: str,
    id_bytes: int,
    certificate: str = "",
) -> None:
    """Refuse a client that does not know the key, has another model, or ids of another width."""
    claim = _over(certificate, f"{hello.role} {hello.fingerprint} {hello.id_bytes}")
    expected = _proof(key, "client", challenge + hello.nonce, claim)
    if not hmac.compare_digest(expected, hello.proof):
        raise FrameError(Why.WRONG_KEY)
    if hello.fingerprint != fingerprint:
        raise FrameError(
            Why.WRONG_FINGERPRINT, f"{hello.fingerprint[:12]} instead of {fingerprint[:12]}"
        )
    if hello.id_bytes != id_bytes:
        raise FrameError(Why.WRONG_ID_WIDTH, f"{hello.id_bytes} bytes instead of {id_bytes}")


def prove_welcome(
    key: bytes, challenge: bytes, nonce: bytes, welcome: Welcome, certificate: str = ""
) -> Welcome:
    """The same WELCOME with the stage's proof in it."""
    w = welcome
    claim = _over(certificate, _welcome_claim(welcome))
    proof = _proof(key, "stage", challenge + nonce, claim)
    return Welcome(proof, w.kind, w.blocks, w.width, w.context, w.z_width, w.fingerprint, w.model)


def check_welcome(
    key: bytes,
    challenge: bytes,
    nonce: bytes,
    welcome: Welcome,
    fingerprint: str,
    model: str = "",
    certificate: str = "",
) -> None:
    """Refuse a stage that does not know the key, or holds another model ("" takes any weights)."""
    claim = _over(certificate, _welcome_claim(welcome))
    if not hmac.compare_digest(_proof(key, "stage", challenge + nonce, claim), welcome.proof):
        raise FrameError(Why.WRONG_KEY)
    if welcome.fingerprint != fingerprint:
        raise FrameError(
            Why.WRONG_FINGERPRINT, f"{welcome.fingerprint[:12]} instead of {fingerprint[:12]}"
        )
    if model and welcome.model != model:
        raise FrameError(Why.WRONG_MODEL, f"{welcome.model[:12]} instead of {model[:12]}")


def prove_notice(key: bytes, notice: StageNotice) -> StageNotice:
    """The same notice with the proof that its stage knows the key."""
    return notice.model_copy(update={"proof": _notice_proof(key, notice)})


def is_proven(key: bytes, notice: StageNotice) -> bool:
    """Whether a stage that knows the key has written this notice. Without a key none has."""
    return bool(key) and hmac.compare_digest(_notice_proof(key, notice), notice.proof)


def _notice_proof(key: bytes, notice: StageNotice) -> str:
    text = f"blocktrain stage\n{notice.address} {notice.model} {notice.issued}"
    return hmac.digest(key, text.encode(), "sha256").hex()


def _over(certificate: str, claim: str) -> str:
    return f"{certificate} {claim}" if certificate else claim


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
