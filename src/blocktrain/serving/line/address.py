"""Addresses of stages, and the secrets that guard them."""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path

from blocktrain.errors import ConfigError, IdentityError

LEAST_KEY = 16  # characters
MOST_KEY_FILE = 4096


def parse_address(text: str) -> tuple[str, int]:
    """host:port, with IPv6 hosts in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not host:port, for example 127.0.0.1:8481")
    return host.strip("[]"), int(port)


def parse_route(text: str) -> tuple[str, ...]:
    """host:port,host:port as names."""
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    if len(set(names)) != len(names):
        raise ConfigError(f"--route {text!r} names a stage twice; name each once")
    return names


def format_address(host: str, port: int) -> str:
    """The inverse of parse_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(path: Path) -> bytes:
    """The shared secret in a file that only its owner can read."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(MOST_KEY_FILE).strip()
    except OSError as error:
        raise IdentityError(f"cannot read the key file {path}: {error.strerror or error}") from None
    if os.name == "posix" and mode & 0o077:
        raise IdentityError(f"others can read the key file {path}; run `chmod 600 {path}`")
    if len(key) < LEAST_KEY:
        raise IdentityError(
            f"{path} holds {len(key)} characters; "
            f"put at least {LEAST_KEY} random ones there, the same on all hosts"
        )
    return key
