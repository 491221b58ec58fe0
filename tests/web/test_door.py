"""Every HTTP server keeps out web pages from elsewhere, also without a secret. Real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from blocktrain.errors import ConfigError
from blocktrain.protocol import calls
from blocktrain.protocol import messages as m
from blocktrain.protocol.messages import Refusal, StageNotice
from blocktrain.protocol.refusals import Code
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.watch.stream import find_log, replay_app
from blocktrain.web.door import make_door
from blocktrain.web.server import AppServer, Where
from support.browser import a_log, as_lines
from support.fake_worker import TOKEN, FakeWorker, beginning
from support.waiting import PATIENCE

REBOUND = {"Host": "rebound.example:8470"}
Ask = Callable[..., httpx2.Response]


@contextmanager
def asking(url: str) -> Iterator[Ask]:
    with httpx2.Client(base_url=url, timeout=PATIENCE) as client:
        yield client.request


@contextmanager
def coordinator(folder: Path, listen: Listen) -> Iterator[Ask]:
    with (
        beginning(folder) as running,
        serve_coordinator(running, listen) as url,
        asking(url) as ask,
    ):
        yield ask


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Of a coordinator on loopback without a token."""
    with coordinator(tmp_path_factory.mktemp("door"), Listen()) as found:
        yield found


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Of the page of a log."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "events.jsonl").write_text(as_lines(a_log(2, 2, blocks=1)))
    server = AppServer(replay_app(find_log(folder)), Where())
    server.start()
    with asking(server.url) as found:
        yield found
    server.stop()


def code(answer: httpx2.Response) -> str:
    return "" if answer.status_code < 400 else Refusal.model_validate_json(answer.content).code


PATHS = ["/", "/healthz", "/metrics", "/v1/status", "/v1/run", "/v1/stages", "/nowhere"]


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_was_pointed_here_reads_nothing(ask: Ask, path: str) -> None:
    """A11: a page under a name that was pointed here (DNS rebinding) reads a coordinator."""
    answer = ask("GET", path, headers=REBOUND)
    assert (answer.status_code, code(answer)) == (421, Code.WRONG_HOST)
    assert "--allow-host" in answer.text


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:1",
        "[::1]:8470",
        "192.0.2.7",
        "LocalHost.:9",
        "a.localhost",
        socket.gethostname(),
    ],
)
def test_addresses_and_own_names_are_right(ask: Ask, host: str) -> None:
    assert ask("GET", "/v1/status", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/replay", "/v1/events"])
def test_a_replay_has_the_same_door(replay: Ask, path: str) -> None:
    assert code(replay("GET", path, headers=REBOUND)) == Code.WRONG_HOST
    assert code(replay("GET", path, headers={"Origin": "http://a.example"})) == Code.WRONG_ORIGIN
    assert replay("GET", path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://a.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_pages_from_elsewhere_are_refused(ask: Ask, headers: dict[str, str]) -> None:
    """A11: a page from elsewhere announces a stage and reads the status (CSRF)."""
    notice = m.write(StageNotice(address="192.0.2.1:1", model="ab" * 32, issued=1))
    sent = {"Content-Type": calls.JSON, **headers}
    assert code(ask("POST", "/v1/stages", content=notice, headers=sent)) == Code.WRONG_ORIGIN
    assert code(ask("GET", "/v1/status", headers=headers)) == Code.WRONG_ORIGIN
    assert ask("GET", "/v1/stages").json() == {"stages": []}


def test_its_own_page_and_links_pass(ask: Ask) -> None:
    own = {"Host": "localhost:8470", "Origin": "http://localhost:8470"}
    assert ask("GET", "/v1/status", headers=own).status_code == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask("GET", "/", headers=link).status_code == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_says_what_it_is(ask: Ask, kind: str) -> None:
    """A11: a page joins a worker with a type that it can send without asking, as a form does."""
    headers = {"Content-Type": kind} if kind else {}
    body = m.write(FakeWorker(None, 9).join_message())  # type: ignore[arg-type]
    assert code(ask("POST", "/v1/join", content=body, headers=headers)) == Code.WRONG_TYPE
    assert ask("GET", "/v1/status").json()["workers"] == []


def test_with_a_token_any_name_is_fine_until_names_are_allowed(tmp_path: Path) -> None:
    """Workers use DNS names, and a page under a false name does not know the token."""
    headers = {"Authorization": f"Bearer {TOKEN}", **REBOUND}
    with coordinator(tmp_path / "any", Listen(token=TOKEN)) as ask:
        assert ask("GET", "/v1/status", headers=headers).status_code == 200
        assert code(ask("GET", "/v1/status", headers=REBOUND)) == Code.BAD_TOKEN
    listen = Listen(token=TOKEN, allow_host=("run.example.org",))
    with coordinator(tmp_path / "some", listen) as ask:
        assert code(ask("GET", "/v1/status", headers=headers)) == Code.WRONG_HOST
        named = {**headers, "Host": "Run.Example.org:443"}
        assert ask("GET", "/v1/status", headers=named).status_code == 200


def test_a_tokenless_server_answers_to_allowed_names() -> None:
    door = make_door("0.0.0.0", ["run.example.org:8470"], secret=False)
    assert "run.example.org" in door.names and not door.any_name
    with pytest.raises(ConfigError, match="--allow-host"):
        make_door("0.0.0.0", [""], secret=False)
