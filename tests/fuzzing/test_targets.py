"""Every parser reads what it should, and refuses everything else in a sentence, in bounds."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import ConfigError
from blocktrain.fuzzing import campaign
from blocktrain.fuzzing.campaign import TARGETS, named_targets, replay
from blocktrain.fuzzing.mutate import LARGEST, mutate
from blocktrain.fuzzing.target import FuzzTarget, ParserOutcome, try_input
from blocktrain.protocol.calls import CALLS
from blocktrain.protocol.ledger import BODIES
from support.command import blocktrain

DEEP, DIGITS = "[" * 3000, "9" * 5000
# What a parser did not survive once: its target, and the input.
CRASHERS: dict[str, tuple[str, bytes]] = {
    "a delta to version 0": (
        "ledger-version",
        json.dumps(
            {
                "block": 1,
                "version": 0,
                "parent": "b" * 64,
                "weights": {"sha256": "b" * 64, "length": 1},
                "momentum": None,
                "delta": {"sha256": "b" * 64, "length": 1},
                "parts": [],
                "outer": "average",
                "outer_learning_rate": 0.0,
                "outer_momentum": 0.0,
                "reason": "",
                "applied": [],
                "tokens": 0,
                "norms": [],
            }
        ).encode(),
    ),
    "a body of another depth": ("ledger-run", f'{{"protocol": {DEEP}{"]" * 3000}}}'.encode()),
    "a template with a long number": ("chat-template", b"{{ %s }}" % DIGITS.encode()),
    "a template with a huge power": ("chat-template", b"{{ 9 ** 9 ** 9 }}"),
    "a template with a huge text": ("chat-template", b"{{ 'a' * 3000000000 }}"),
    "a template with a wide format": ("chat-template", b"{{ '%3000000000d' % 1 }}"),
    "deep settings": ("settings-file", f"a = {DEEP}".encode()),
    "settings with a long number": ("settings-file", f"a = {DIGITS}".encode()),
    "a deep fleet": ("fleet-file", f"a = {DEEP}".encode()),
    "more memory than there are numbers": (
        "fleet-file",
        b'[[machine]]\nname = "a"\nmemory = "1e999GB"\n',
    ),
    "a mixture with a long number": ("mixture-file", f"a = {DIGITS}".encode()),
    "a deep mixture": ("mixture-file", f"a = {DEEP}".encode()),
    "a mixture of a long path": ("mixture-file", b'[[source]]\ndata = "%s"\n' % (b"x" * 5000)),
    "a deep event": ("event-log", b'{"seq": 1, "kind": "step", "more": %s' % DEEP.encode()),
    "a deep note of a worker": ("last-block", DEEP.encode()),
    "a deep line": ("corpus-lines", b'{"text": %s' % DEEP.encode()),
    "a shard that takes minutes": (
        "corpus-index",
        b'{"name": "", "id_bytes": 1, "sources": [{"name": "", "weight": 1.0, "shards": [%s]}],'
        b' "calibration": [%s], "valid": [%s]}'
        % ((b'{"sha256": "%s", "tokens": 4294967296, "bytes": 1}' % (b"a" * 64),) * 3),
    ),
    "shards that hold texts of two sources": (
        "corpus-index",
        b'{"name": "", "id_bytes": 1, "sources": [%s, %s], "calibration": [%s], "valid": [%s]}'
        % (
            *(
                b'{"name": "", "weight": 1.0, "shards": [%s], "valid_tokens": 250}' % shard
                for shard in [b'{"sha256": "%s", "tokens": 500, "bytes": 1}' % (b"a" * 64)] * 2
            ),
            *[b'{"sha256": "%s", "tokens": 500, "bytes": 1}' % (b"a" * 64)] * 2,
        ),
    ),
}


@cache
def seeds_of(name: str) -> tuple[bytes, ...]:
    return tuple(TARGETS[name].seeds())


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_reads_or_refuses_whatever_comes(name: str) -> None:
    target = TARGETS[name]
    readings = [try_input(target, seed) for seed in seeds_of(name)]
    assert any(reading.read for reading in readings)
    assert not [reading.problem for reading in readings if reading.problem]

    @settings(max_examples=24)
    @given(st.sampled_from(seeds_of(name)), st.randoms(use_true_random=False))
    def feed(seed: bytes, draw: random.Random) -> None:
        content = mutate(seed, draw)
        problem = try_input(target, content).problem
        assert not problem, f"{name}: {problem}\n{content[:2000]!r}"

    feed()
    for noise in (b"", b"\0", b"\xff" * 300, DEEP.encode(), DIGITS.encode()):
        assert not try_input(target, noise).problem, f"{name}: {noise[:20]!r}"


@pytest.mark.parametrize("what", CRASHERS)
def test_what_a_parser_did_not_survive_once(what: str) -> None:
    name, content = CRASHERS[what]
    assert not try_input(TARGETS[name], content).problem


def test_every_message_is_a_target() -> None:
    names = [call.name.replace("_", "-") for call in CALLS if call.request is not None]
    replies = [call.name.replace("_", "-") for call in CALLS if call.reply is not None]
    wanted = [f"call-{name}" for name in names] + [f"answer-{name}" for name in replies]
    assert {*wanted, *(f"ledger-{kind}" for kind in BODIES)} <= TARGETS.keys()
    assert len(TARGETS) <= 256  # the first byte of an input for atheris says which


def test_a_changed_input_is_another_one_and_not_longer_than_the_limit() -> None:
    draw, seed = random.Random(0), b'{"a": [1, 2.5, "text"], "b": null}'
    changed = {mutate(seed, draw) for _ in range(2000)}
    assert len(changed) > 1000
    assert max(map(len, changed)) <= LARGEST
    assert any(b"NaN" in content for content in changed)


# The command


def broken(error: type[BaseException]) -> FuzzTarget:
    """A parser with a bug: it does not expect a NUL byte."""

    def read(content: bytes) -> None:
        if b"\0" in content:
            raise error("a byte that nobody expected")

    return FuzzTarget("broken", read, lambda: [b"abc"])


@pytest.mark.parametrize("error", [KeyError, RecursionError, BaseException])
def test_a_bug_is_found_kept_once_and_played_again(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "broken", broken(error))
    result = campaign.fuzz(named_targets(["broken", "stage-key-file"]), 0.5, 3, tmp_path)
    (crasher,) = result.crashers
    assert error.__name__ in crasher.problem
    assert [path.suffix for path in tmp_path.iterdir()] == [".input"]
    assert result.tried.keys() == {"broken", "stage-key-file"}
    target, reading = replay(Path(crasher.file))
    assert target.name == "broken" and reading.problem == crasher.problem
    monkeypatch.setitem(TARGETS, "broken", TARGETS["tensors"])
    assert not replay(Path(crasher.file))[1].problem, "it is mended"


def test_time_and_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    small = FuzzTarget("small", lambda _: None, list[bytes])
    assert try_input(small, b"") == ParserOutcome(True)
    monkeypatch.setattr("blocktrain.fuzzing.target.MOST_MEMORY", -1.0)
    assert "MB of memory" in try_input(small, b"").problem
    monkeypatch.setattr("blocktrain.fuzzing.target.MOST_SECONDS", -1.0)
    assert "processor time" in try_input(small, b"").problem


def test_the_command_fuzzes_and_replays(tmp_path: Path) -> None:
    words = ["fuzz", "frames", "tensors", "--minutes", "0.01", "--json"]
    found = json.loads(blocktrain(*words, cwd=tmp_path).stdout)
    assert found["ok"] and found["tried"].keys() == {"frames", "tensors"}
    (tmp_path / "frames-0.input").write_bytes(b"BTF1")
    done = blocktrain("fuzz", "--replay", "frames-0.input", cwd=tmp_path)
    assert "frames: read, as it should be" in done.stderr
    with pytest.raises(ConfigError, match="known: answer-manifest"):
        named_targets(["nothing"])
