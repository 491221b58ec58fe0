"""`blocktrain generate`: every mode, many prompts, and the text that `serve` answers with."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from blocktrain.cli.app import app
from blocktrain.cli.generate import TextFlags, generate
from blocktrain.config import TOKENIZERS
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import Model
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.tokenizer import ByteTokenizer, register
from blocktrain.serving.entry.answer import Request
from conftest import random_model, tiny_config
from support.answers import ask
from support.serving import saved


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(tiny_config(blocks=4))


@pytest.fixture(scope="module")
def run(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("runs") / "small")


def expected(model: Model, prompt: bytes, flags: TextFlags) -> bytes:
    sampler = Sampler(flags.seed, flags.temperature, flags.top_p)
    return bytes(write(model, prompt, flags.max_tokens, sampler))


@pytest.mark.parametrize("mode", ["exact", "autoregressive"])
def test_the_text_is_the_served_one(
    run: Path, model: Model, capfdbinary: pytest.CaptureFixture[bytes], mode: Any
) -> None:
    flags = TextFlags(mode=mode, top_p=0.7, seed=5, max_tokens=30)
    generate(run, prompt="the ", flags=flags)
    text = capfdbinary.readouterr().out
    assert text == b"the " + expected(model, b"the ", flags) + b"\n"
    request = Request(b"the ", 30, mode=mode, seed=5, temperature=0.8, top_p=0.7)
    assert text == b"the " + ask(run, request, (2, 3)) + b"\n"
    assert text != b"the " + expected(model, b"the ", TextFlags(seed=5, max_tokens=30)) + b"\n"


class EndingBytes(ByteTokenizer):
    """Bytes, one of which ends a text."""

    name, end_of_text = "ending", 0


@pytest.mark.parametrize("mode", ["exact", "autoregressive", "sweep"])
def test_a_text_may_end_before_its_length(
    tmp_path: Path, model: Model, capfdbinary: pytest.CaptureFixture[bytes], mode: Any
) -> None:
    flags = TextFlags(mode=mode, seed=5, max_tokens=30, sweeps=99 if mode == "sweep" else 1)
    whole = expected(model, b"the ", flags)
    tokenizer = EndingBytes()
    tokenizer.end_of_text = end = next(byte for byte in whole[9:] if byte not in b"the ")
    register(tokenizer)
    try:
        run = saved(random_model(tiny_config(blocks=4, tokenizer="ending")), tmp_path / "ending")
        text = whole[: whole.index(end)]
        generate(run, prompt="the ", flags=flags, json_=True)
        answer = json.loads(capfdbinary.readouterr().out)
        assert (answer["text"], answer["finish_reason"]) == (text.decode(errors="replace"), "stop")
        assert answer["completion_tokens"] == len(text)
        request = Request(b"the ", 30, mode=mode, seed=5, temperature=0.8, sweeps=flags.sweeps)
        assert ask(run, request, (2, 3)) == text
    finally:
        TOKENIZERS.pop("ending")  # other tests list the names


def test_exact_needs_a_fan(tmp_path: Path) -> None:
    model = random_model(tiny_config(compose="euler", objective="denoise"))
    with pytest.raises(ConfigError, match="mode exact needs"):
        generate(saved(model, tmp_path / "euler"), flags=TextFlags(mode="exact"))


@pytest.mark.parametrize(
    "lines",
    [
        b"the \n\n  two words\r\n{not json\n",
        b'{"prompt": "the "}\n{"prompt": "  two words", "id": 3}\n\n{"prompt": "{not json"}',
    ],
)
@pytest.mark.parametrize("stdin", [False, True])
def test_many_prompts(
    run: Path,
    model: Model,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    lines: bytes,
    stdin: bool,
) -> None:
    (tmp_path / "prompts").write_bytes(lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    where = "-" if stdin else str(tmp_path / "prompts")
    flags = TextFlags(max_tokens=9, seed=2)
    texts = [b"the ", b"  two words", b"{not json"]
    generate(run, prompts=where, flags=flags, json_=True)
    answers = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [answer["prompt"].encode() for answer in answers] == texts
    for text, answer in zip(texts, answers, strict=True):
        assert answer["text"] == expected(model, text, flags).decode(errors="replace")
        assert (answer["finish_reason"], answer["completion_tokens"]) == ("length", 9)
        assert answer["prompt_tokens"] == len(text)
    if not stdin:
        generate(run, prompts=where, flags=flags)
        whole = b"\n\n".join(text + expected(model, text, flags) for text in texts)
        assert capfdbinary.readouterr().out == whole + b"\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\n \n", "has no prompts"),
        (b'{"prompt": "a"}\nb\n', "line 2 is not a JSON object"),
        (b'{"prompt": "a"}\n{"prompt": 3}\n', "line 2 is not a JSON object"),
        (b"a" * (1 << 20) + b"b", "at most 1048576 bytes"),
    ],
)
def test_files_that_hold_no_prompts(
    run: Path, tmp_path: Path, content: bytes, sentence: str
) -> None:
    (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        generate(run, prompts=str(tmp_path / "prompts"), flags=TextFlags(max_tokens=1))


def test_a_hyphen_is_stdin_on_the_command_line_too() -> None:
    _, bound, _ = app.parse_args(["generate", "run", "--prompts", "-", "--json"])
    assert bound.arguments["prompts"] == "-" and bound.arguments["json_"] is True


def test_wrong_flags(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read --prompts"):
        generate(run, prompts=str(tmp_path))
    with pytest.raises(ConfigError, match="not both"):
        generate(run, prompt="a", prompts="-")
    with pytest.raises(ConfigError, match="for --mode sweep"):
        generate(run, flags=TextFlags(mode="exact", sweeps=2))
    with pytest.raises(ConfigError, match="more than 0"):
        generate(run, flags=TextFlags(top_p=0))
