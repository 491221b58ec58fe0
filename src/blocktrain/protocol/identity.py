"""Identities: an ed25519 key in a file, and signatures over the canonical bytes of a message."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from blocktrain.errors import IdentityError
from blocktrain.protocol.messages import PROTOCOL, Message, Signed
from blocktrain.protocol.refusals import Code, Refused

S = TypeVar("S", bound=Signed)

_MAX_KEY_FILE = 4096


def canonical(message: Message) -> bytes:
    """JSON in ASCII: sorted keys, no spaces, all fields but `signature`, floats as by repr."""
    fields = message.model_dump(mode="json", exclude={"signature"})
    return canonical_json(fields).encode()


def canonical_json(value: Any) -> str:
    """The one way to write a JSON value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def digest(message: Message) -> str:
    """sha256 of the canonical bytes."""
    return hashlib.sha256(canonical(message)).hexdigest()


def signing_bytes(message: Signed) -> bytes:
    """What is signed: a line with protocol and kind, then the canonical bytes.

    The line keeps a signature from fitting a message of another kind.
    """
    return f"blocktrain {PROTOCOL} {type(message).__name__}\n".encode() + canonical(message)


def worker_id(public_key: str) -> str:
    """32 hex digits: a machine that comes back with its key is the same worker."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:32]


def new_nonce() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Identity:
    """A private key; prints without it."""

    _key: Ed25519PrivateKey

    def __repr__(self) -> str:
        return f"Identity({self.public_key})"

    @property
    def public_key(self) -> str:
        """64 hex digits."""
        return self._key.public_key().public_bytes_raw().hex()

    @property
    def worker(self) -> str:
        """The worker id of this key."""
        return worker_id(self.public_key)

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that only the owner of the key can compute, different for every purpose."""
        return hmac.digest(self._key.private_bytes_raw(), b"blocktrain secret " + purpose, "sha256")

    def sign(self, message: S) -> S:
        """The same message with this key's signature."""
        return message.model_copy(
            update={"signature": self._key.sign(signing_bytes(message)).hex()}
        )


def verify(message: Signed, public_key: str) -> None:
    """Refuse a message that was not signed by this key, or was changed since."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(message.signature), signing_bytes(message))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        raise Refused(
            Code.BAD_SIGNATURE, f"{type(message).__name__} by the key {public_key[:12]}..."
        ) from None


def new_identity() -> Identity:
    """A fresh key that is in no file."""
    return Identity(Ed25519PrivateKey.generate())


def identity_from_seed(seed: bytes) -> Identity:
    """The key of 32 secret bytes."""
    return Identity(Ed25519PrivateKey.from_private_bytes(seed))


def load_identity(path: Path) -> Identity:
    """The key in a file that only its owner can read."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_KEY_FILE)
    except OSError as error:
        raise IdentityError(f"cannot read the key file {path}: {error.strerror or error}") from None
    if os.name == "posix" and mode & 0o077:
        raise IdentityError(
            f"others can read the key file {path};"
            f" run `chmod 600 {path}`, or remove it to get a new key"
        )
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(
            f"{path} is not an ed25519 key file; restore it, or remove it to get a new key"
        )
    return Identity(key)


def open_identity(path: Path) -> Identity:
    """The key in the file, made if there is none.

    Two processes that start at once get the same key.
    """
    if not path.exists():
        _create(path)
    return load_identity(path)


def _create(path: Path) -> None:
    """Write it for the owner alone, whole or not at all, and never over another key."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as out:
                out.write(pem)
                out.flush()
                os.fsync(out.fileno())
            try:
                os.link(partial, path)  # unlike a rename it fails where a key is already
            except FileExistsError:
                return
        finally:
            partial.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise IdentityError(
            f"cannot write the key file {path}: {error.strerror or error}"
        ) from None
