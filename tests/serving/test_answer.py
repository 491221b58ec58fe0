"""What an answer shows: up to a stop word and no part of one, in whole tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serving.entry.answer import Output


@given(
    st.binary(max_size=40).map(lambda b: bytes(97 + x % 2 for x in b)),
    st.lists(st.sampled_from([b"ab", b"aab", b"bbb", b"b"]), max_size=2),
)
def test_what_is_shown_ends_before_the_first_stop_word_however_it_came(
    text: bytes, stop: list[bytes]
) -> None:
    ends = [text.find(word) + len(word) for word in stop if word in text]
    first = min(ends, default=None)
    expected = (
        text
        if first is None
        else min((text[:first].removesuffix(w) for w in stop if text[:first].endswith(w)), key=len)
    )
    for size in (1, 3, 50):
        output = Output(lambda token: bytes([token]), stop)
        visible = b""
        for i in range(0, len(text), size):
            if not output.stopped:
                output.take(text[i : i + size])
                visible += output.show(final=output.stopped or i + size >= len(text))
        if first is not None:
            assert output.stopped
            # Of two words that end at the same byte either may be cut off.
            assert visible in {
                text[:first].removesuffix(w) for w in stop if text[:first].endswith(w)
            }, expected
        elif text:
            assert (output.stopped, visible) == (False, text)
        assert output.tokens == len(visible)


def test_a_stop_word_may_begin_and_end_inside_a_token() -> None:
    pieces = {1: b"one ", 2: b"two", 3: b" three"}
    output = Output(pieces.__getitem__, [b"wo t"])
    output.take([1, 2])
    assert output.show(final=False) == b"one t" and not output.stopped
    output.take([3])
    assert output.stopped and output.show(final=True) == b""
    assert output.tokens == 1
