"""What the serving loops decide, without a network: commits, stop words, sweeps, drafts, windows of drafts, costs, routes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import ConfigError
from blocktrain.learning.compose import Model
from blocktrain.learning.generate import Sampler, autoregressive, window_start
from blocktrain.serving.entry.cost import (
    Line,
    Linear,
    Pace,
    SweepMeter,
    exact_seconds,
    expected_bytes,
    fan_sweep,
    ring_sweep,
    swept_seconds,
)
from blocktrain.serving.entry.decode import Answer, Picker, accept, common
from blocktrain.serving.entry.drafting import Drafter, Lean
from blocktrain.serving.entry.route import chain, nearest, parse_route
from blocktrain.serving.holding import FanBlocks
from conftest import random_model, tiny_config

CONTEXT = 16
FUSE = random_model(tiny_config(context=CONTEXT))
DENOISE = random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise"))
letters = st.binary(max_size=40).map(lambda b: bytes(97 + x % 2 for x in b))
small = st.binary(max_size=12).map(lambda b: bytes(x % 3 for x in b))


@given(small, small)
def test_common_counts_leading_bytes(a: bytes, b: bytes) -> None:
    expected = len(
        list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    )
    assert common(a, b) == common(b, a) == expected


@given(small, st.integers(0, 3))
def test_a_sweep_commits_what_was_right_and_one_more_byte_of_the_model(
    draft: bytes, seed: int
) -> None:
    def model(before: bytes) -> int:  # any function of the text before
        return (sum(before) + len(before) + seed) % 3

    picks = [model(draft[:i]) for i in range(len(draft) + 1)]
    found = bytes(accept(draft, iter(picks)))
    text = b""
    while len(text) < len(found):
        text += bytes([model(text)])
    assert found == text  # nothing that the model would not have written itself
    assert found[:-1] == draft[: len(found) - 1]
    assert len(found) == len(draft) + 1 or found[-1] != draft[len(found) - 1]


def test_no_more_is_picked_than_is_committed() -> None:
    assert accept([1, 2, 3], (pick for pick in [1, 9, None])) == [1, 9]  # type: ignore[misc]


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
        answer = Answer(b"prompt ab", len(text) or 1, 16, stop)
        pieces = [answer.commit(text[i : i + size]) for i in range(0, len(text), size)]
        shown = b"".join(pieces)
        if first is not None:
            assert answer.finish == "stop"
            # Of two words that end at the same byte either may be cut off.
            assert shown in {
                text[:first].removesuffix(w) for w in stop if text[:first].endswith(w)
            }, expected
        elif text:
            assert (answer.finish, shown) == ("length", text)


def test_an_answer_knows_its_room() -> None:
    answer = Answer(bytes(50), 100, CONTEXT)
    assert (answer.cut, answer.begin, answer.left) == (window_start(50, CONTEXT), 40, 100)
    while answer.finish is None:
        assert 1 <= answer.room <= CONTEXT + 1
        last = len(answer.text) + answer.room - 1  # the last byte that this window may predict
        assert window_start(last, CONTEXT) == answer.begin
        assert answer.room == answer.left or window_start(last + 1, CONTEXT) != answer.begin
        answer.commit(bytes(answer.room))
    assert Answer(b"", 0, CONTEXT).finish == "length"


def test_near_ties_are_counted_once_a_position() -> None:
    picker = Picker(Sampler(temperature=0))
    tie, clear = torch.zeros(256), torch.zeros(256)
    tie[[3, 5]] = torch.tensor([9.0, 9.00005])
    clear[7] = 5.0
    assert list(picker.picks(torch.stack([tie, clear]), 10)) == [5, 7]
    list(picker.picks(torch.stack([tie]), 10))
    assert picker.near_ties == 1
    list(picker.picks(torch.stack([clear]), 10))
    assert picker.near_ties == 0


@pytest.mark.parametrize("model", [FUSE, DENOISE], ids=["next", "denoise"])
def test_the_lean_drafter_has_the_bits_of_the_plain_one(model: Model) -> None:
    with torch.inference_mode():
        plain, lean = (
            model.drafter(),
            Lean(model.config, FanBlocks(model.config, {1: model.blocks[0]}, "")),
        )
        text = bytes(range(60, 60 + CONTEXT))
        for start, end in [
            (0, 1),
            (1, 2),
            (2, 6),
            *((i, i + 1) for i in range(6, CONTEXT)),
            (3, 4),
            (4, 5),
        ]:
            expected = plain(torch.tensor([list(text[start:end])]), start)[0, -1]
            assert torch.equal(lean.read(text[start:end], start), expected)
        with pytest.raises(ValueError, match="context"):
            lean.read(text, 0)
            lean.read(b"x", CONTEXT)


def test_a_drafter_keeps_its_guesses_as_long_as_the_text_agrees() -> None:
    with torch.inference_mode():
        lean = Lean(FUSE.config, FanBlocks(FUSE.config, {1: FUSE.blocks[0]}, ""))
        drafter, sampler = Drafter(lean, Sampler(seed=2)), Sampler(seed=2)

        def expected(text: bytes, count: int) -> bytes:
            return bytes(
                autoregressive(FUSE.drafter(), text, count, CONTEXT, sampler, torch.device("cpu"))
            )

        prompt = b"abcd"
        first = drafter.draft(prompt, 0, 6)
        assert first == expected(prompt, 6)
        assert drafter.ready(prompt + first[:2]) == 4
        assert drafter.draft(prompt + first[:2], 0, 7) == expected(prompt + first[:2], 7)
        other = prompt + first[:3] + bytes([first[3] ^ 1])
        assert drafter.ready(other) == 0
        assert drafter.draft(other, 0, 5) == expected(other, 5)
        moved = bytes(range(30))
        assert drafter.draft(moved, window_start(30, CONTEXT), 2) == expected(moved, 2)


def test_a_block_of_the_paper_cannot_draft() -> None:
    paper = random_model(tiny_config(compose="euler", objective="denoise", skip="edm"))
    with pytest.raises(ConfigError, match="autoregressive"):
        Lean(paper.config, FanBlocks(paper.config, {1: paper.blocks[0]}, ""))


def test_predicted_sweeps() -> None:
    line = Line(rtt=0.08, bits=100e6, overhead=0.001)
    assert fan_sweep(10, line, 3 * 512, Linear(0.002), Linear(0.001, 1e-4)) == pytest.approx(
        0.08 + 0.001 + 0.0012288 + 0.002 + 0.002
    )
    assert ring_sweep(1, line, 3, 512, Linear(0.002)) == pytest.approx(
        2 * (0.04 + 0.001 + 0.00004096) + 3 * 0.002 + 0.041
    )
    assert expected_bytes(0.5, 3) == 1.875
    assert expected_bytes(1.0, 3) == 4
    assert exact_seconds(0.0, 0, 1.0, 0.08) == 0.08
    assert swept_seconds(0.0, 96, 2, 0.001, lambda _: 0.1) == pytest.approx(
        (0.2 + 0.001 * (96 + 95 + 94)) / 96
    )
    assert swept_seconds(1.0, 96, 2, 0.001, lambda _: 0.1) == pytest.approx((0.1 + 0.001 * 96) / 96)


def test_a_meter_learns_the_line_of_sweeps_and_forgets_an_old_one() -> None:
    meter = SweepMeter()
    for base in (0.2, 0.08):
        for m in [1, 33, 17, 5] * 15:
            meter.add(m, base + 1e-3 * m)
        assert meter(9) == pytest.approx(base + 9e-3, rel=0.02)
        assert meter(30) > meter(2)


def drilled(sweep: float, draft: float, right: int, of: int) -> Pace:
    pace = Pace()
    for _ in range(60):
        pace.sweep.add(5, sweep)
        pace.drafted(of, draft * of)
        pace.verified(right, of)
    return pace


def test_drafts_are_long_on_slow_lines_and_off_on_fast_ones() -> None:
    assert drilled(0.085, 0.0005, 8, 16).best_draft(32) >= 12
    assert drilled(0.085, 0.0005, 8, 16).best_draft(5) == 5
    assert drilled(0.085, 0.0005, 0, 16).best_draft(32) <= 8
    assert drilled(0.001, 0.002, 8, 16).best_draft(32) == 0
    off = drilled(0.085, 0.0005, 0, 1)
    low = off.acceptance
    for _ in range(300):
        off.undrafted()
    assert low < 0.3
    assert off.acceptance > 0.8


@dataclass
class Somebody:
    name: str
    blocks: tuple[int, ...]
    rtt_ms: float
    queue: int = 0
    alive: bool = True


def test_the_nearest_living_holder_is_asked() -> None:
    near, far, busy = (
        Somebody("near", (2,), 10),
        Somebody("far", (2, 3), 50),
        Somebody("busy", (2,), 5, queue=40),
    )
    assert nearest([far, near, busy], 2) is near
    assert nearest([far, near, busy], 2, avoid={"near"}) is far
    near.alive = False
    assert nearest([far, near, busy], 2) is far
    assert nearest([far, near, busy], 4) is None


def test_a_ring_is_a_chain_of_all_blocks() -> None:
    a, b, c = Somebody("a", (1, 2), 10), Somebody("b", (3,), 10), Somebody("c", (3,), 5)
    assert chain([b, c, a], 3) == [a, c]
    c.alive = False
    assert chain([b, c, a], 3) == [a, b]
    assert chain([b, c], 3) == chain([a, b], 4) == []


def test_a_route_is_a_list_of_names() -> None:
    assert parse_route(" a:1, b:2 ,") == ("a:1", "b:2")
    with pytest.raises(ConfigError, match="twice"):
        parse_route("a:1,a:1")
