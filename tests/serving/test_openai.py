"""OpenAI's own client against `blocktrain serve`, alone and in front of two stages."""

from __future__ import annotations

import json
import re
import runpy
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from blocktrain.errors import IdentityError
from blocktrain.learning.compose import Model
from blocktrain.learning.generate import Sampler, write
from blocktrain.serving.entry.answer import Piece, Stats
from blocktrain.serving.openai_messages import TextChoice
from blocktrain.web.guard import read_keys
from support.command import blocktrain
from support.serving import Process, openai_client, started
from support.waiting import PATIENCE, until

KEY = "a-key-for-the-tests"
TEMPERATURE = 0.8  # of `blocktrain generate` and of the API, unless they are told
LONG = {"max_tokens": 8192, "extra_body": {"mode": "autoregressive"}}
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def with_key(run: Path) -> Iterator[Process]:
    """With a key, one place and nowhere to wait."""
    keys = run.parent / "api.keys"
    keys.write_text(f"# of the tests\n\n{KEY}\n")
    options = ("--api-keys", str(keys), "--max-requests", "1", "--queue", "0")
    with started("serve", str(run), "--listen", "127.0.0.1:0", *options, cwd=run.parent) as process:
        yield process


def local_text(
    model: Model, prompt: bytes, count: int, seed: int, temperature: float = TEMPERATURE
) -> str:
    """What `blocktrain generate` writes."""
    sampler = Sampler(seed, temperature)
    return bytes(write(model, prompt, count, sampler)).decode(errors="replace")


def test_the_model_is_listed(served: Process) -> None:
    with openai_client(served) as api:
        assert [model.id for model in api.models.list()] == ["small"]
        assert api.models.retrieve("small").owned_by == "blocktrain"
        with pytest.raises(openai.NotFoundError, match="only 'small'"):
            api.models.retrieve("large")
        with pytest.raises(openai.NotFoundError, match="no POST /v1/embeddings"):
            api.embeddings.create(model="small", input="hello")


@pytest.mark.parametrize("mode", ["exact", "autoregressive"])
@pytest.mark.parametrize(
    ("prompt", "count"), [("the ", 24), ("the ridge meets the ocean by the ", 70)]
)
def test_the_text_is_that_of_generate(
    served: Process, model: Model, mode: str, prompt: str, count: int
) -> None:
    with openai_client(served) as api:
        answer = api.completions.create(
            model="small",
            prompt=prompt,
            max_tokens=count,
            seed=7,
            temperature=0.7,
            extra_body={"mode": mode},
        )
    assert answer.choices[0].text == local_text(model, prompt.encode(), count, 7, 0.7)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), count)
    details = answer.model_extra["blocktrain"] if answer.model_extra else {}
    assert (
        details["mode"] == mode
        and details["seed"] == 7
        and details["degraded"] == []
        and details["failovers"] == 0
    )
    assert 1 <= details["sweeps"] <= count


def test_sweeps_are_those_of_generate(served: Process, model: Model) -> None:
    sampler = Sampler(3, TEMPERATURE)
    text = bytes(write(model, b"the ", 24, sampler, mode="sweep", sweeps=2))
    extra = {"mode": "sweep", "sweeps": 2}
    with openai_client(served) as api:
        answer = api.completions.create(
            model="small", prompt="the ", max_tokens=24, seed=3, extra_body=extra
        )
    assert answer.choices[0].text == text.decode(errors="replace")
    assert answer.model_extra is not None and answer.model_extra["blocktrain"]["sweeps"] <= 2


def test_a_stream_is_the_same_text_in_pieces(served: Process, model: Model) -> None:
    with openai_client(served) as api:
        request = {
            "model": "small",
            "prompt": "the ",
            "max_tokens": 40,
            "seed": 11,
            "stream_options": {"include_usage": True},
        }
        chunks = list(api.completions.create(stream=True, **request))  # type: ignore[call-overload]
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == local_text(model, b"the ", 40, 11)
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + [
        "length"
    ]
    assert last.choices == [] and last.usage.completion_tokens == 40
    details = [chunk.model_extra["blocktrain"] for chunk in pieces]
    assert [t["sweeps"] for t in details] == sorted(t["sweeps"] for t in details)
    assert (
        "accepted_per_sweep" not in details[0]
        and sum(details[-1]["accepted_per_sweep"]) == details[-1]["accepted"]
    )
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_choices_have_following_seeds(served: Process, model: Model) -> None:
    expected_texts = [local_text(model, b"the ", 16, seed) for seed in (5, 6, 7)]
    with openai_client(served) as api:
        answer = api.completions.create(model="small", prompt=["the "], max_tokens=16, seed=5, n=3)
        assert [choice.text for choice in answer.choices] == expected_texts
        assert answer.usage is not None and answer.usage.completion_tokens == 48
        texts = ["", "", ""]
        for chunk in api.completions.create(
            model="small", prompt="the ", max_tokens=16, seed=5, n=3, stream=True
        ):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected_texts


def test_a_stop_ends_the_text_before_itself(served: Process, model: Model) -> None:
    whole = local_text(model, b"the ", 60, 2, 0.5)
    word = whole[9:12]
    with openai_client(served) as api:
        answer = api.completions.create(
            model="small",
            prompt="the ",
            max_tokens=60,
            seed=2,
            temperature=0.5,
            stop=["\u2603", word],
        )
    assert answer.choices[0].text == whole[: whole.index(word)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_is_chosen_and_reported(served: Process, model: Model) -> None:
    with openai_client(served) as api:
        answer = api.completions.create(model="small", prompt="the ", max_tokens=12)
    assert answer.model_extra is not None
    assert answer.choices[0].text == local_text(
        model, b"the ", 12, answer.model_extra["blocktrain"]["seed"]
    )


def test_a_prompt_beyond_the_context_keeps_its_tail_and_says_so(
    served: Process, model: Model
) -> None:
    prompt = "the heath leaves the delta by the inlet.\n" * 3
    with openai_client(served) as api:
        answer = api.completions.create(model="small", prompt=prompt, max_tokens=20, seed=1)
    assert answer.choices[0].text == local_text(model, prompt.encode(), 20, 1)
    assert answer.usage is not None and answer.usage.model_extra is not None
    assert 0 < answer.usage.model_extra["prompt_bytes_cut"] < len(prompt)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 2]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"prompt": "a" * 140_000, "echo": True, "logprobs": 1}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 8193}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"n": 9}, "n"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"user": 1}, "user"),
    ({"mode": "fast"}, "mode"),
    ({"sweeps": 0}, "sweeps"),
    ({"sweeps": 65}, "sweeps"),
    ({"draft": "last-block"}, "draft"),
    ({"allow_degraded": "no"}, "allow_degraded"),
    ({"echo": 1}, "echo"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"logit_bias": {"50": 1}}, "logit_bias"),
    ({"top_k": 5}, "top_k"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_is_wrong_is_named(served: Process, fields: dict[str, Any], param: str) -> None:
    with openai_client(served) as api, pytest.raises(openai.BadRequestError) as error:
        api.completions.create(model="small", prompt="a", extra_body=fields)
    assert (
        error.value.param == param
        and error.value.type == "invalid_request_error"
        and error.value.code
    )
    assert param in error.value.message


def test_defaults_that_ask_for_nothing_are_fine(served: Process) -> None:
    harmless: dict[str, Any] = {
        "echo": False,
        "logprobs": None,
        "best_of": 2,
        "n": 2,
        "presence_penalty": 0,
        "logit_bias": {},
        "suffix": None,
    }
    harmless |= {
        "temperature": None,
        "stop": None,
        "stream_options": None,
        "frequency_penalty": 0.0,
        "user": "somebody",
    }
    with openai_client(served) as api:
        answer = api.completions.create(
            model="small", prompt="the ", max_tokens=4, extra_body=harmless
        )
    assert len(answer.choices) == 2


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({}, b"{", 400, "invalid_json"),
        ({}, b"[]", 400, "invalid_json"),
        ({}, b'{"model":"small","prompt":"\\ud800"}', 400, "invalid_json"),
        ({}, b'{"model":"small","temperature":NaN}', 400, "invalid_json"),
        ({}, b"[" * 100_000, 400, "invalid_json"),
        ({}, b'{"prompt":"a"}', 400, "invalid_value"),
        ({"Content-Type": "text/plain"}, b"{}", 415, "wrong_type"),
        ({"Content-Encoding": "gzip"}, b"{}", 415, "wrong_encoding"),
        ({"Host": "pages.example"}, b"{}", 421, "wrong_host"),
        ({"Origin": "http://pages.example"}, b"{}", 403, "wrong_origin"),
        ({"Content-Length": str((1 << 20) + 1)}, b"", 413, "too_large"),
    ],
)
def test_bodies_that_are_none(
    served: Process, headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    all_headers = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **headers,
    }
    answer = raw(served, all_headers, body)
    assert (
        f" {status} " in answer.splitlines()[0]
        and json.loads(answer.split("\r\n\r\n")[1])["error"]["code"] == code
    )


def test_a_body_without_a_length_is_refused(served: Process) -> None:
    answer = httpx2.post(
        f"{served.url}/v1/completions",
        content=iter([b"{}"]),
        headers={"Content-Type": "application/json"},
        timeout=PATIENCE,
    )
    assert answer.status_code == 411


def connect(process: Process) -> socket.socket:
    host, port = process.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def raw(process: Process, headers: dict[str, str], body: bytes) -> str:
    """One answer, whatever the request is."""
    with closing(connect(process)) as line:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        line.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
        received = b""
        while b"}" not in received:
            part = line.recv(65536)
            assert part, received
            received += part
    return received.decode()


def test_without_a_key_nobody_gets_in(with_key: Process) -> None:
    for path in ("/v1/models", "/v1/status", "/metrics", "/tokenizer_info"):
        assert httpx2.get(with_key.url + path, timeout=PATIENCE).status_code == 401
    for path in ("/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = httpx2.post(with_key.url + path, json={}, timeout=PATIENCE)
        assert answer.status_code == 401
    for path in ("/healthz", "/", "/page/page.js"):
        assert httpx2.get(with_key.url + path, timeout=PATIENCE).status_code == 200
    answer = httpx2.post(
        f"{with_key.url}/v1/completions", json={"model": "small"}, timeout=PATIENCE
    )
    assert "wants an API key" in answer.json()["error"]["message"]
    with (
        openai_client(with_key, "another-key-of-mine") as api,
        pytest.raises(openai.AuthenticationError, match="not an API key"),
    ):
        api.completions.create(model="small", prompt="a")
    with openai_client(with_key, KEY) as api:
        assert api.completions.create(model="small", prompt="a", max_tokens=4).choices[0].text


def test_a_disconnect_cancels_the_answer(with_key: Process) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    with openai_client(with_key, KEY) as api:
        for _ in range(2):
            with api.completions.create(model="small", prompt="a", stream=True, **LONG) as stream:  # type: ignore[call-overload]
                next(iter(stream))
            until(lambda: with_key.status(**key)["requests"]["running"] == 0)
    with closing(connect(with_key)) as line:
        body = json.dumps({"model": "small", "max_tokens": 8192, "mode": "autoregressive"}).encode()
        head = f"Host: a\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        line.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        until(lambda: with_key.status(**key)["requests"]["running"] == 1)
    until(lambda: with_key.status(**key)["requests"]["running"] == 0)
    assert with_key.status(**key)["sessions"] == 0
    assert metric(with_key, "blocktrain_cancelled_total", **key) == 3


def metric(process: Process, name: str, **headers: str) -> float:
    text = httpx2.get(f"{process.url}/metrics", headers=headers, timeout=PATIENCE).text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return sum(sample.value for sample in samples if sample.name == name)


def test_a_full_queue_answers_with_retry_after(with_key: Process) -> None:
    with openai_client(with_key, KEY) as api:
        with api.completions.create(model="small", prompt="a", stream=True, **LONG) as stream:  # type: ignore[call-overload]
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="try again in") as error:
                api.completions.create(model="small", prompt="a")
            assert (
                1 <= int(error.value.response.headers["retry-after"]) <= 60
                and error.value.code == "busy"
            )
        patient = api.with_options(max_retries=4)
        assert (
            patient.completions.create(model="small", prompt="a", max_tokens=4)
            .choices[0]
            .finish_reason
            == "length"
        )


def test_metrics_add_up(served: Process) -> None:
    names = (
        "text_bytes_total",
        "sweeps_total",
        "drafted_total",
        "accepted_total",
        "answers_total",
        "first_byte_seconds_count",
    )
    before = {name: metric(served, f"blocktrain_{name}") for name in names}
    with openai_client(served) as api:
        answer = api.completions.create(model="small", prompt="the ", max_tokens=30, seed=4, n=2)
    assert answer.model_extra is not None
    details = answer.model_extra["blocktrain"]
    gained = {name: metric(served, f"blocktrain_{name}") - before[name] for name in names}
    assert (
        gained["text_bytes_total"] == 60
        and gained["answers_total"] == gained["first_byte_seconds_count"] == 2
    )
    assert [gained[f"{name}_total"] for name in ("sweeps", "drafted", "accepted")] == [
        details[n] for n in ("sweeps", "drafted", "accepted")
    ]


def test_three_processes_write_what_one_does(run: Path) -> None:
    """Also when one is killed: the answer says that a block is missing, or is refused."""
    here = ("--listen", "127.0.0.1:0")
    alone = blocktrain(
        "generate",
        str(run),
        "--prompt",
        "the ",
        "--max-tokens",
        "50",
        "--seed",
        "9",
        cwd=run.parent,
    )
    with (
        started("stage", str(run), "--blocks", "1-2", *here, cwd=run.parent) as one,
        started("stage", str(run), "--blocks", "3", *here, cwd=run.parent) as other,
    ):
        route = f"{one.said['address']},{other.said['address']}"
        with (
            started("serve", str(run), "--route", route, *here, cwd=run.parent) as entry,
            openai_client(entry) as api,
        ):
            stream = api.completions.create(
                model="small", prompt="the ", max_tokens=50, seed=9, stream=True
            )
            assert f"the {''.join(chunk.choices[0].text for chunk in stream)}\n" == alone.stdout
            hosts = {host["name"]: host for host in entry.status()["hosts"]}
            assert all(hosts[name]["alive"] for name in route.split(","))
            assert ready(entry) == (
                200,
                {"state": "ready", "status": "ready", "missing_blocks": []},
            )
            _kill(api, other)
            raw = api.completions.with_raw_response.create(
                model="small", prompt="the ", max_tokens=20, seed=9
            )
            assert raw.headers["x-blocktrain-degraded"] == "block 3"
            answer = raw.parse()
            assert answer.model_extra is not None and answer.model_extra["blocktrain"][
                "degraded"
            ] == [3]
            assert metric(entry, "blocktrain_host_alive") == 1
            assert httpx2.get(f"{entry.url}/healthz", timeout=PATIENCE).json() == {
                "ok": True,
                "model": "small",
                "missing_blocks": [3],
            }
            expected = {"state": "degraded", "status": "degraded: block 3", "missing_blocks": [3]}
            assert ready(entry) == (200, expected)
            assert entry.status()["missing_blocks"] == [3]
            assert stream_header(entry) == "block 3"
            assert entry.interrupt() == 0
    log = (run.parent / "serve.err").read_text()
    assert f"lost stage {other.said['address']} (block 3)" in log
    assert "degraded: no stage holds block 3" in log


def ready(entry: Process) -> tuple[int, dict[str, Any]]:
    answer = httpx2.get(f"{entry.url}/readyz", timeout=PATIENCE)
    return answer.status_code, answer.json()


def stream_header(entry: Process) -> str:
    body = {"model": "small", "prompt": "the ", "max_tokens": 4, "stream": True}
    answer = httpx2.post(f"{entry.url}/v1/completions", json=body, timeout=PATIENCE)
    return str(answer.headers["x-blocktrain-degraded"])


def test_an_unreachable_stage_is_named_at_the_start(run: Path, tmp_path: Path) -> None:
    here = ("--listen", "127.0.0.1:0")
    with started("serve", str(run), "--route", "127.0.0.1:9", *here, cwd=tmp_path) as entry:
        assert ready(entry)[1]["state"] == "ready"  # the entry computes the blocks itself
    assert "no stage answers at 127.0.0.1:9" in (tmp_path / "serve.err").read_text()


def _kill(api: openai.OpenAI, stage: Process) -> None:
    """In the middle of a stream, and before another answer: neither may do without its block."""
    whole = {"mode": "autoregressive", "allow_degraded": False}
    with (
        api.completions.create(
            model="small", prompt="the ", max_tokens=8192, stream=True, extra_body=whole
        ) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        next(iter(stream))
        stage.process.kill()
        other = pool.submit(
            api.completions.create, model="small", prompt="the ", max_tokens=8192, extra_body=whole
        )
        with pytest.raises(openai.APIError, match="block 3"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="block 3") as error:
            other.result()
        assert error.value.status_code == 503 and error.value.response.headers["retry-after"] == "1"


def test_the_snippet_of_the_readme_works(
    served: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = (block for block in blocks if "import OpenAI" in block)
    code = code.replace("http://127.0.0.1:8480", served.url).replace('"001-stdlib"', '"small"')
    assert served.url in code and '"small"' in code
    (tmp_path / "snippet.py").write_text(code)
    runpy.run_path(str(tmp_path / "snippet.py"))
    assert len(capsys.readouterr().out) > 20


def test_strangers_need_keys(run: Path, tmp_path: Path) -> None:
    refused = blocktrain("serve", str(run), "--listen", "0.0.0.0:0", cwd=tmp_path)
    assert refused.returncode == 2 and "--api-keys FILE" in refused.stderr
    nothing = blocktrain("serve", str(tmp_path), cwd=tmp_path)
    assert (
        nothing.returncode == 2
        and "not a run folder" in nothing.stderr
        and "Traceback" not in nothing.stderr
    )


@pytest.mark.parametrize(
    "content", ["", "# nothing\n", "short\n", "a key with a space in it\n", "ключ-ключ-ключ-ключ\n"]
)
def test_a_file_without_good_keys_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(IdentityError, match="keys"):
        read_keys(tmp_path / "keys")
    with pytest.raises(IdentityError, match="cannot read"):
        read_keys(tmp_path / "none")


def stats(**changes: Any) -> Stats:
    zero = {
        "mode": "exact",
        "sweeps": 0,
        "drafted": 0,
        "accepted": 0,
        "accepted_per_sweep": [],
        "wire_bytes": 0,
        "degraded": (),
    }
    zero |= {
        "failovers": 0,
        "near_ties": 0,
        "prompt_bytes_cut": 0,
        "first_byte_ms": 0.0,
        "seconds": 0.0,
    }
    return Stats(**{**zero, **changes})


@given(
    st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_characters_come_whole_however_the_bytes_are_cut(content: bytes, cuts: list[int]) -> None:
    places = sorted({min(cut, len(content)) for cut in cuts})
    parts = [content[a:b] for a, b in zip([0, *places], [*places, len(content)], strict=True)]
    writing = TextChoice(0)
    texts = [writing.take(Piece(part, None, stats())).text for part in parts]
    texts.append(writing.take(Piece(b"", "length", stats())).text)
    assert "".join(texts) == writing.text == content.decode(errors="replace")
    assert writing.bytes == len(content)
    if content.decode(errors="ignore").encode() == content:
        assert "\ufffd" not in writing.text or "\ufffd" in content.decode()
