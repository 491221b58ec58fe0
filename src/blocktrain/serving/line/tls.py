"""TLS between entry and stages.

With a key no authority is needed: a stage makes a certificate for itself when it starts, and both
sides name its hash in the proofs of the handshake. So nobody without the key can stand in between.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from blocktrain.errors import ConfigError

LIFETIME = timedelta(days=3650)  # longer than any process


class StageTls(NamedTuple):
    """What a stage serves TLS with, and the sha256 of its certificate."""

    context: ssl.SSLContext
    certificate: str


def own_tls() -> StageTls:
    """A new certificate that vouches for nothing by itself. Its key is never kept on a disk."""
    key, now = Ed25519PrivateKey.generate(), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "blocktrain stage")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - LIFETIME)
        .not_valid_after(now + LIFETIME)
        .sign(key, None)
    )
    with tempfile.TemporaryDirectory(prefix="blocktrain-stage-") as folder:  # for its owner alone
        path = Path(folder) / "stage.pem"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            file.write(secret + certificate.public_bytes(Encoding.PEM))
        return load_tls(path, path)


def load_tls(certificate: Path, key: Path) -> StageTls:
    """The certificate and the key of files (PEM)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
        first = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot use the certificate {certificate} with {key}: {reason}"
        ) from None
    return StageTls(context, certificate_hash(first.public_bytes(Encoding.DER)))


def certificate_hash(content: bytes) -> str:
    """The sha256 of a certificate (DER)."""
    return hashlib.sha256(content).hexdigest()


def trust_key() -> ssl.SSLContext:
    """For a client with a key: any certificate will do, because the handshake proves it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def trust_authority(ca: Path) -> ssl.SSLContext:
    """For a client that knows who signs the certificates of the stages."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # SSLError is one
        raise ConfigError(f"cannot use the certificate {ca}: {error.strerror or error}") from None
