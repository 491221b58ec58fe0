"""Changed inputs: bits, bytes and lengths of anything, and the values of what is JSON."""

from __future__ import annotations

import json
import random
from typing import Any

LARGEST = 1 << 16  # bytes of a changed input
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
_BYTES = (b"\0", b"\xff", b"\n", b"{", b'"', b"[" * 2000, b"9" * 5000, b"\xed\xa0\x80", b"{{", b"%")
# JSON that Python cannot write; the texts in front stand for it.
_RAW = {
    "<deep>": "[" * 3000 + "]" * 3000,
    "<digits>": "9" * 5000,
    "<overflow>": "1e999",
    "<surrogate>": '"\\ud800"',
    "<nan>": "NaN",
    "<minus zero>": "-0.0",
}
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        0.5,
        2**31,
        2**53,
        2**63,
        2**64,
        10**30,
        -(2**63),
        1e308,
        5e-324,
    ),
    *("", "a", "\0", "../x", "none", "0" * 64, "x" * 300, "\N{SNOWMAN}"),
    *([], {}, [[]], [0] * 40, {"a": 1}, *_RAW),
)


def mutate(content: bytes, draw: random.Random) -> bytes:
    """The same with one or a few changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 6))):
        changed = _change_json(content, draw) if draw.random() < 0.6 else None
        content = _change_bytes(content, draw) if changed is None else changed
    return content[:LARGEST]


def _change_bytes(content: bytes, draw: random.Random) -> bytes:
    found = bytearray(content)
    at = draw.randrange(len(found) + 1)
    end = min(len(found), at + draw.choice((1, 1, 2, 4, 8, 64)))
    match draw.randrange(7):
        case 0 if at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        case 1 if at < len(found):
            found[at] = draw.randrange(256)
        case 2:
            del found[at:end]
        case 3:
            found[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
        case 4:
            number = draw.choice(_NUMBERS).to_bytes(8, draw.choice(("little", "big")))
            found[at : at + 8] = number[: draw.choice((1, 2, 4, 8))]
        case 5:
            found[at:at] = draw.choice(_BYTES)
        case _:
            to = draw.randrange(len(found) + 1)
            found[to:to] = found[at:end]
    return bytes(found)


def _change_json(content: bytes, draw: random.Random) -> bytes | None:
    """With another value, name or key somewhere; None if it is no JSON."""
    try:
        value = json.loads(content)
        changed = json.dumps(_change(value, draw))
    except (ValueError, RecursionError):
        return None
    for text, raw in _RAW.items():
        changed = changed.replace(json.dumps(text), raw)
    if changed.startswith("{") and len(changed) > 2 and draw.random() < 0.1:
        changed = f"{changed[:-1]}, {changed[1:]}"  # every key comes twice
    return changed.encode()


def _change(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw.choice(keys)
        copy = value.copy()
        match draw.randrange(8):
            case 0:
                del copy[key]
            case 1 if isinstance(copy, dict):
                copy[draw.choice(("", "more", "__class__", "x" * 100))] = copy[key]
            case 1 if isinstance(copy, list):
                copy.append(copy[key])
            case 2 if isinstance(copy, dict):
                copy[key] = copy[draw.choice(keys)]
            case _:
                copy[key] = _change(copy[key], draw)
        return copy
    if isinstance(value, int) and draw.random() < 0.4:
        return value + draw.choice((-1, 1, 255, -value, value))
    if isinstance(value, str) and value and draw.random() < 0.4:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(("", "\0", "f", "/", "é", "x" * 70)) + value[at + 1 :]
    return draw.choice(_VALUES)
