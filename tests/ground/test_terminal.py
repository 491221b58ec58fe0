"""Text for a terminal: characters arrive whole, and none of them controls it."""

from __future__ import annotations

import pytest

from blocktrain.terminal import TextWriter, printable
from blocktrain.units import amount


def _written(
    content: bytes, capfdbinary: pytest.CaptureFixture[bytes], *, raw: bool
) -> list[bytes]:
    """What is written after each byte, and at the end."""
    writer, pieces = TextWriter(raw=raw), []
    for byte in content:
        writer.write(bytes([byte]))
        pieces.append(capfdbinary.readouterr().out)
    writer.close()
    return [*pieces, capfdbinary.readouterr().out]


def test_a_character_is_written_when_it_is_whole(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    euro = "€".encode()
    assert _written(euro, capfdbinary, raw=False) == [b"", b"", euro, b"\n"]
    assert _written(euro[:2], capfdbinary, raw=False) == [b"", b"", b"\\xe2\\x82\n"]
    assert b"".join(_written(b"\xff\xe2ok", capfdbinary, raw=False)) == b"\\xff\\xe2ok\n"


def test_raw_bytes_pass_as_they_are(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    content = bytes(range(256))
    assert b"".join(_written(content, capfdbinary, raw=True)) == content + b"\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("日本 é 🙂 \u00a0", "日本 é 🙂 \u00a0"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\r\x07\x7f", "\\r\\x07\\x7f"),
        ("\x9b31m", "\\x9b31m"),  # the one-character form of ESC [
        ("\u202eabc", "\\u202eabc"),  # would turn the line around
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_amounts_have_three_digits() -> None:
    assert [amount(n) for n in (0, 999, 1000, 12_345, 9.996e8)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 kB",
        "1 GB",
    ]
