"""Amounts as people write them."""

from __future__ import annotations

import re

from blocktrain.errors import ConfigError

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def parse_bytes(text: str) -> int:
    """8GB, 512 MiB or 1.5e9 as a number of bytes."""
    match = re.fullmatch(
        r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper().replace("E", "e")
    )
    try:
        if match is None:
            raise ValueError
        count = int(float(match[1]) * _UNITS[match[2]])
        if not 0 < count < 2**53:
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(
            f"{text!r} is not an amount of bytes; write it like 8GB or 512MiB"
        ) from None
    return count


def amount(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # 1000 by three digits
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
