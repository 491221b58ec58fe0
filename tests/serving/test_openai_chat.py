"""OpenAI's chat client against `blocktrain serve`, and the template between them."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from blocktrain.config import Origin
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import Model
from blocktrain.learning.generate import Sampler, write
from blocktrain.learning.tokenizer import load_tokenizer
from blocktrain.runs.folder import create_run, seal
from blocktrain.runs.served import chat_template as template_of
from blocktrain.serving import chat_template
from blocktrain.serving.chat_template import ChatPrompt, ChatTemplate, default_template
from blocktrain.serving.openai_chat import read_chat
from blocktrain.serving.openai_messages import ApiError
from blocktrain.serving.openapi import OPERATIONS
from blocktrain.serving.tokenizer_messages import tokenize, tokenizer_info
from support.command import blocktrain
from support.conformance import try_operations
from support.serving import Process, openai_client, saved, started
from support.tokenizer_files import byte_level
from support.waiting import PATIENCE

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serve.md"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Write about land. "},
    {
        "role": "user",
        "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "sea"}],
    },
    {"role": "assistant", "content": " the ocean."},
    {"role": "user", "content": "the ridge"},
]
PROMPT = "Write about land.\n\nUser: the sea\nAssistant: the ocean.\nUser: the ridge\nAssistant:"


def expected(model: Model, count: int, seed: int, prompt: str = PROMPT) -> str:
    """What the model writes after the prompt, up to the first stop of the default template."""
    text = bytes(write(model, prompt.encode(), count, Sampler(seed, 0.8))).decode(errors="replace")
    return text.partition("\nUser:")[0].partition("\nAssistant:")[0]


def test_an_answer_continues_the_rendered_chat(api: openai.OpenAI, model: Model) -> None:
    answer = api.chat.completions.create(
        model="small", messages=MESSAGES, max_completion_tokens=30, seed=7
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == expected(model, 30, 7)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 30)


def test_a_chat_streams(api: openai.OpenAI, model: Model) -> None:
    chunks = list(
        api.chat.completions.create(
            model="small",
            messages=MESSAGES,
            max_tokens=24,
            seed=3,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = chunks
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 48
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in parts if chunk.choices[0].index == index]
        assert [bool(choice.delta.role) for choice in own] == [True] + [False] * (len(own) - 1)
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == expected(model, 24, 3 + index)
        assert [choice.finish_reason for choice in own[-2:]][-1] == "length"
    whole = expected(model, 24, 3)  # the client's own collector wants an end that is no limit
    with api.chat.completions.stream(
        model="small", messages=MESSAGES, max_tokens=24, seed=3, stop=whole[9:12]
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole[: whole.index(whole[9:12])]


def test_a_stop_and_logprobs_of_a_chat(api: openai.OpenAI, model: Model) -> None:
    whole = expected(model, 40, 2)
    word = whole[12:14]
    answer = api.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=40,
        seed=2,
        stop=word,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = answer.choices
    assert choice.message.content == whole[: whole.index(word)] and choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    for one in choice.logprobs.content:
        assert one.bytes == list(one.token.encode()) and len(one.top_logprobs) == 2
        assert one.logprob <= one.top_logprobs[0].logprob


def test_the_snippet_of_the_guide_works(
    served: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    match = re.search(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert match is not None
    code = match[1].replace("http://127.0.0.1:8480", served.url).replace('"001-stdlib"', '"small"')
    assert served.url in code and '"small"' in code
    (tmp_path / "snippet.py").write_text(code)
    runpy.run_path(str(tmp_path / "snippet.py"))
    assert len(capsys.readouterr().out) > 5


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [MESSAGES[0], {"role": "user", "content": None}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 8193}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_is_wrong_with_a_chat_is_named(
    api: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        api.chat.completions.create(model="small", messages=MESSAGES, extra_body=fields)
    assert error.value.param == param and param in error.value.message


def test_lengths_are_refused_in_words() -> None:
    for messages, model, sentence in (
        ([], "small", "^messages must have at least 1 item$"),
        ([MESSAGES[0]] * 1025, "small", "^messages must have at most 1024 items$"),
        (MESSAGES, "", "^model must have at least 1 character$"),
    ):
        with pytest.raises(ApiError, match=sentence):
            read_chat(json.dumps({"model": model, "messages": messages}).encode())


def test_fields_that_ask_for_nothing_are_fine(api: openai.OpenAI) -> None:
    harmless = {"tools": [], "response_format": {"type": "text"}, "store": False, "logprobs": False}
    answer = api.chat.completions.create(
        model="small",
        messages=[{"role": "developer", "content": "short"}, {"role": "user", "content": "a"}],
        max_tokens=2,
        extra_body=harmless,
    )
    assert answer.choices[0].message.content is not None


def test_a_get_is_refused_like_everything_else(served: Process) -> None:
    answer = httpx2.get(f"{served.url}/v1/chat/completions", timeout=PATIENCE)
    assert answer.status_code == 405 and "no GET /v1/chat" in answer.json()["error"]["message"]


# -- the tokenizer


def test_the_tokenizer_can_be_asked(served: Process) -> None:
    def ask(path: str, body: Any) -> Any:
        return httpx2.post(f"{served.url}{path}", json=body, timeout=PATIENCE).json()

    text = "naïve 東京\n"
    tokens = ask("/tokenize", {"prompt": text, "model": "small", "add_special_tokens": False})
    assert tokens == {"count": 14, "max_model_len": 32, "tokens": list(text.encode())}
    assert ask("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": text}
    assert ask("/tokenize", {"prompt": ""})["tokens"] == []
    assert (
        "tokens has the token id 256" in ask("/detokenize", {"tokens": [256]})["error"]["message"]
    )
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        assert ask(path, body)["error"]["param"] == param
    info = httpx2.get(f"{served.url}/tokenizer_info", timeout=PATIENCE).json()
    assert (info["bos_token"], info["eos_token"], info["vocab_size"]) == ("\n", None, 256)


def test_the_end_of_a_text_has_a_name() -> None:
    tokenizer = load_tokenizer(byte_level(300))
    assert tokenizer_info(tokenizer, 8, "")["bos_token"] == "<|endoftext|>"
    ids = tokenize(b'{"prompt": "<|endoftext|>"}', tokenizer, 8)["tokens"]
    assert ids == [tokenizer.end_of_text] == [tokenizer.first_token]
    assert len(tokenize(b'{"prompt": "a<|endoftext|>"}', tokenizer, 8)["tokens"]) > 2


# -- templates


def test_the_default_template_is_kept_with_the_model(run: Path, served: Process) -> None:
    kept = (run / "model" / "chat_template.jinja").read_text()
    assert kept == default_template().source
    info = httpx2.get(f"{served.url}/tokenizer_info", timeout=PATIENCE).json()
    assert info["chat_template"] == kept


def test_a_template_of_the_model_is_used_and_serve_may_name_another(
    run: Path, model: Model, tmp_path: Path
) -> None:
    folder = saved(model, tmp_path / "other")
    (folder / "model" / "chat_template.jinja").write_text("{{ messages[-1].content }}:")
    assert template_of(folder).render([{"role": "user", "content": "the sea"}]).text == "the sea:"
    (folder / "model" / "chat_template.jinja").unlink()
    assert template_of(folder).source == default_template().source
    (tmp_path / "broken.jinja").write_text("{% for %}")
    refused = blocktrain(
        "serve", str(folder), "--chat-template", str(tmp_path / "broken.jinja"), cwd=tmp_path
    )
    assert refused.returncode == 2 and "broken.jinja is not a Jinja template" in refused.stderr
    named = tmp_path / "named.jinja"
    named.write_text("{{ bos_token }}{{ messages[0].content }} the")
    with (
        started(
            "serve",
            str(folder),
            "--chat-template",
            str(named),
            "--listen",
            "127.0.0.1:0",
            cwd=tmp_path,
        ) as process,
        openai_client(process) as api,
    ):
        answer = api.chat.completions.create(
            model="other", messages=[{"role": "user", "content": "by"}], max_tokens=12, seed=1
        )
    assert answer.choices[0].message.content == expected(model, 12, 1, "by the")


def test_a_run_that_goes_on_keeps_the_template(run: Path, model: Model, tmp_path: Path) -> None:
    parent = saved(model, tmp_path / "parent")
    (parent / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    origin = Origin(folder=str(parent))
    child = create_run(tmp_path / "child", model.config, "tiny", origin=origin)
    seal(child, model.config, "tiny", None)
    assert child.chat_template.read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refuses"),
        ("{{ messages[9].content.x }}", "refuses"),
        ("{{ 1 / 0 }}", "refuses"),
        ("{% for i in range(99999999) %}a{% endfor %}", "refuses"),
        ("{% for i in range(9999) %}{{ messages[0].content * 9999 }}{% endfor %}", "to an end"),
        ("{% set stop = 'User' %}", "list of at most"),
        ("{% include '/etc/passwd' %}", "refuses"),
    ],
)
def test_a_template_can_do_no_harm(source: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


def test_a_template_that_takes_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="to an end"):
        ChatTemplate("{% for i in range(99) %}a{% endfor %}").render([])


def test_files_that_are_no_templates(tmp_path: Path) -> None:
    for name, content in (("large", b"a" * (1 << 18) + b"b"), ("binary", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            chat_template.read_template(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        chat_template.read_template(tmp_path)


def test_templates_of_the_hub_work() -> None:
    """Control flow, filters and functions that they use."""
    source = (
        "{% set ns = namespace(system='') %}{% for message in messages %}"
        "{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}"
        "{% continue %}{% endif %}<|{{ message['role'] }}|>{{ message['content'] | tojson }}"
        "{% endfor %}{{ strftime_now('%Y')[:0] }}{{ eos_token }}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ ns.system }}"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "{{ 1 }}"}]
    assert ChatTemplate(source).render(messages, "END") == ChatPrompt(
        '<|user|>"{{ 1 }}"END<|assistant|>s', ()
    )


def test_answers_are_as_they_are_described(served: Process) -> None:
    described = httpx2.get(f"{served.url}/openapi.json", timeout=PATIENCE).json()
    schemas = described["components"]["schemas"]
    for kind, most in (("Completion", "max_tokens"), ("ChatCompletion", "max_completion_tokens")):
        schemas[kind]["properties"] |= {most: {"enum": [1, 2]}, "n": {"enum": [1, 2]}}
        schemas[kind]["required"] += [most]  # short texts are enough
    seen = try_operations(described, served.url, {})
    assert seen.keys() == {operation.name for operation in OPERATIONS}
    assert all(200 in statuses for name, statuses in seen.items() if name != "model")
    assert 400 in seen["completions"] and 400 in seen["chat_completions"]
