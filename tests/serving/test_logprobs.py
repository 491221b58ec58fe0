"""Log-probabilities of texts: the model's own numbers, from one process or from stages."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.learning.compose import Model
from blocktrain.learning.generate import (
    Sampler,
    TokenScore,
    prompt_steps,
    window_start,
    write,
)
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import serve_blocks
from blocktrain.serving.entry.answer import Piece, Request, Stats
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.openai_messages import TextChoice, token_name
from blocktrain.serving.stage.stage import Stage
from conftest import random_model, tiny_config
from support.serving import saved
from support.stages import run_folder

TEXT = b"the heath leaves the delta by the inlet.\nthe ridge finds the grove by the marsh."
CONTEXT = 32


def expected(model: Model, ids: list[int] | bytes) -> list[float]:
    """Log-probabilities of all ids but the first, each in the window in which it is written."""
    logprobs = []
    for known in range(1, len(ids)):
        begin = window_start(known, model.config.context)
        logits = model.scorer()(torch.tensor([list(ids[begin:known])]), 0)[0, -1]
        logprobs.append(logits.double().log_softmax(-1)[ids[known]].item())
    return logprobs


@given(st.integers(1, 90), st.sampled_from([2, 8, 16]), st.integers(1, 40))
def test_every_token_is_scored_once_in_its_own_window(size: int, context: int, most: int) -> None:
    ids, known = tuple(range(size)), 1
    for step in prompt_steps(ids, context, most):
        count = len(step.window) - step.start
        begin = step.window[0]
        assert step.window == ids[begin : known + count - 1] and 1 <= count <= most
        for token in range(known, known + count):
            assert begin == window_start(token, context)
        known += count
    assert known == max(size, 1)


# -- an entry


def ask(
    folder: Path, request: Request, *groups: tuple[int, ...], **source: Any
) -> list[TokenScore]:
    """All scores of an answer, with a stage for each group of blocks."""

    async def answer() -> list[TokenScore]:
        async with AsyncExitStack() as stack:
            addresses = []
            for blocks in groups:
                stage = Stage(serve_blocks(RunModel(folder, **source), blocks))
                stack.push_async_callback(stage.aclose)
                await stage.start()
                addresses.append(stage.address)
            entry = Entry(RunModel(folder, **source), addresses)
            stack.push_async_callback(entry.aclose)
            await entry.start()
            return [score async for piece in entry.generate(request) for score in piece.scores]

    return asyncio.run(asyncio.wait_for(answer(), 120))


@pytest.mark.parametrize("mode", ["exact", "autoregressive"])
def test_stages_give_the_numbers_of_one_process(run: Path, model: Model, mode: Any) -> None:
    request = Request(TEXT, 20, mode=mode, seed=3, logprobs=2, score_prompt=True)
    alone, spread = ask(run, request), ask(run, request, (2,), (3,))
    assert alone == spread
    written = bytes(write(model, TEXT, 20, Sampler(3)))
    assert bytes(score.token for score in alone) == TEXT + written
    assert alone[0] == TokenScore(TEXT[0])
    numbers = [score.logprob for score in alone[1:]]
    assert numbers == pytest.approx(expected(model, TEXT + written), abs=1e-5)
    for score in alone[1:]:
        assert len(score.top) == 2 and score.top[0][1] >= score.top[1][1]
        assert score.logprob is not None and score.logprob <= score.top[0][1]


@pytest.mark.parametrize("reference", [False, True])
def test_rings_score_too(tmp_path: Path, reference: bool) -> None:
    settings = {} if reference else {"compose": "euler", "objective": "denoise"}
    folder = tmp_path / "ring"
    run_folder(folder, tiny_config(**settings))
    request = Request(TEXT, 3, mode="autoregressive", logprobs=1, score_prompt=True)
    alone = ask(folder, request, reference=reference)
    assert alone == ask(folder, request, (1,), (2, 3), reference=reference)
    assert bytes(score.token for score in alone[: len(TEXT)]) == TEXT
    assert all(score.logprob is not None and score.logprob < 0 for score in alone[1:])


def test_a_large_vocabulary_is_scored_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(random_model(tiny_config(blocks=4)), tmp_path / "parts")
    request = Request(TEXT, 0, logprobs=0, score_prompt=True)
    whole = ask(folder, request)
    monkeypatch.setattr("blocktrain.serving.entry.answer.SCORED_VALUES", 3 * 256)
    assert ask(folder, request) == whole


# -- the API


def test_echo_with_logprobs_scores_a_prompt(api: openai.OpenAI, model: Model) -> None:
    """As evaluation harnesses ask."""
    answer = api.completions.create(
        model="small", prompt=TEXT.decode(), max_tokens=0, echo=True, logprobs=3
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (TEXT.decode(), "length")
    scores = choice.logprobs
    assert scores is not None and scores.tokens is not None and scores.token_logprobs is not None
    assert "".join(scores.tokens) == TEXT.decode()
    assert scores.text_offset == list(range(len(TEXT)))
    assert scores.token_logprobs[0] is None and scores.top_logprobs is not None
    assert scores.top_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(expected(model, TEXT), abs=1e-5)
    for token, logprob, top in list(
        zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True)
    )[1:]:
        assert 3 <= len(top) <= 4 and top[token] == logprob
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens == len(TEXT)


def test_logprobs_of_what_is_written(api: openai.OpenAI, model: Model) -> None:
    request: dict[str, Any] = {"model": "small", "prompt": "the ", "max_tokens": 24, "seed": 4}
    plain = api.completions.create(**request).choices[0].text
    choice = api.completions.create(**request, logprobs=0).choices[0]
    assert choice.text == plain and choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == plain
    both = b"the " + plain.encode()
    assert choice.logprobs.token_logprobs == pytest.approx(expected(model, both)[3:], abs=1e-5)
    assert choice.logprobs.text_offset == list(range(24))
    chunks = list(api.completions.create(**request, logprobs=0, stream=True, echo=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the " + plain
    streamed = [
        logprob
        for chunk in chunks
        if chunk.choices[0].logprobs
        for logprob in chunk.choices[0].logprobs.token_logprobs or []
    ]
    assert streamed[1:] == pytest.approx(expected(model, both), abs=1e-5)


def test_a_stream_has_the_scores_of_parts_of_characters_too(api: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "small", "prompt": "é", "max_tokens": 200, "seed": 3}
    request |= {"temperature": 2, "logprobs": 1}
    whole = api.completions.create(**request).choices[0].logprobs
    assert whole is not None and any(name.startswith("bytes:") for name in whole.tokens or [])
    chunks = [chunk.choices[0] for chunk in api.completions.create(**request, stream=True)]
    for field in ("tokens", "token_logprobs", "text_offset"):
        parts = [part for c in chunks if c.logprobs for part in getattr(c.logprobs, field)]
        assert parts == getattr(whole, field)


def test_a_token_begins_where_its_own_text_does() -> None:
    choice = TextChoice(0, [b"a\xe2", b" ", b"\xe2", b"\x82", b"\xacb"].__getitem__, scored=True)
    scores = tuple(map(TokenScore, range(5)))
    fragment = choice.take(Piece(b"a\xe2 \xe2\x82\xacb", "length", Stats("exact"), scores))
    assert fragment.text == "a\ufffd €b" and fragment.scores is not None
    assert [placed.offset for placed in fragment.scores] == [0, 2, 3, 3, 3]


def test_logprobs_end_before_a_stop(api: openai.OpenAI, model: Model) -> None:
    whole = bytes(write(model, b"the ", 60, Sampler(2, 0.5))).decode()
    word = whole[9:12]
    choice = api.completions.create(
        model="small",
        prompt="the ",
        max_tokens=60,
        seed=2,
        temperature=0.5,
        stop=word,
        logprobs=1,
    ).choices[0]
    assert choice.logprobs is not None and choice.finish_reason == "stop"
    assert "".join(choice.logprobs.tokens or []) == choice.text == whole[: whole.index(word)]


def test_a_list_of_prompts_is_answered_like_each_alone(api: openai.OpenAI) -> None:
    texts = ["the ", "a longer one by the ", TEXT.decode()] * 4  # more than are at work at once
    how: dict[str, Any] = {"model": "small", "max_tokens": 8, "seed": 5, "n": 2}
    each = [api.completions.create(prompt=text, **how) for text in texts[:3]]
    expected_texts = [choice.text for answer in each * 4 for choice in answer.choices]
    together = api.completions.create(prompt=texts, **how)
    assert [choice.text for choice in together.choices] == expected_texts
    assert [choice.index for choice in together.choices] == list(range(24))
    assert together.usage is not None and together.usage.completion_tokens == 24 * 8
    assert together.usage.prompt_tokens == sum(map(len, texts))
    for ids in ([list(text.encode()) for text in texts], None):
        prompt: Any = texts if ids is None else ids
        streamed = [""] * 24
        for chunk in api.completions.create(prompt=prompt, stream=True, **how):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == expected_texts
    one = api.completions.create(prompt=list(b"the "), echo=True, **how)
    assert [choice.text for choice in one.choices] == [
        "the " + choice.text for choice in each[0].choices
    ]


def test_sweeps_have_no_logprobs(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="need mode exact"):
        api.completions.create(model="small", prompt="a", logprobs=1, extra_body={"mode": "sweep"})


def test_parts_of_characters_have_names() -> None:
    assert token_name("é".encode()) == "é"
    assert token_name("é".encode()[:1]) == "bytes:\\xc3"
