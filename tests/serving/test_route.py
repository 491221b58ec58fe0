"""Choosing stages, and stages found through a coordinator: listed, dialled, used, forgotten."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2
import pytest

from blocktrain.cli.serve import RouteFlags, StageFlags, _stage_finder
from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.http import StageRegistry
from blocktrain.errors import ConfigError, Unreachable
from blocktrain.learning.generate import Sampler
from blocktrain.learning.generate import write as write_locally
from blocktrain.protocol.handshake import prove_notice
from blocktrain.protocol.messages import (
    MAX_STAGES,
    STAGE_EXPIRY_SECONDS,
    StageList,
    StageNotice,
    read,
)
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import serve_blocks
from blocktrain.serving.entry import route
from blocktrain.serving.entry.answer import Request
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.route import chain, nearest
from blocktrain.serving.line.address import parse_route
from blocktrain.serving.stage.stage import Stage
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.web.client import HttpClient
from conftest import random_model, tiny_config
from support.fake_worker import TOKEN, beginning
from support.serving import saved, started
from support.waiting import PATIENCE, until, until_async

MODEL = random_model(tiny_config(blocks=4))
HERE = ("--listen", "127.0.0.1:0")
SHA = "ab" * 32
KEY = b"a key that all stages of the run know"
WITH_KEY = ("--key", "stage.key")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MODEL, tmp_path_factory.mktemp("route") / "small")


def notice(
    address: str = "127.0.0.1:8481", model: str = SHA, issued: float = 0.0, key: bytes = KEY
) -> StageNotice:
    """Of a stage, at this time (0: now)."""
    issued = issued or time.time()
    return prove_notice(key, StageNotice(address=address, model=model, issued=int(1000 * issued)))


def test_recently_announced_stages_are_listed() -> None:
    clock = SimulatedClock()
    stages = StageRegistry(KEY, clock)

    def announce(address: str = "127.0.0.1:8481", model: str = SHA) -> None:
        clock.now += 0.001
        stages.announce_stage(notice(address, model, clock.time()))

    def listed() -> list[tuple[str, str]]:
        return [(stage.address, stage.model) for stage in stages.stages().stages]

    announce()
    announce(model="cd" * 32)  # it was started again, with another model
    assert listed() == [("127.0.0.1:8481", "cd" * 32)]
    clock.now += STAGE_EXPIRY_SECONDS - 1
    announce("[::1]:8482")
    clock.now += 2
    assert listed() == [("[::1]:8482", SHA)]
    for port in range(1, MAX_STAGES):
        announce(f"host-{port}.example:{port}")
    announce("[::1]:8482")  # it is listed: it may go on
    with pytest.raises(Refused) as full:
        announce()
    assert full.value.code == Code.BUSY


def test_only_who_knows_the_stage_key_announces_a_stage_and_each_notice_counts_once() -> None:
    """A9: a member announces a stage of its own."""
    clock = SimulatedClock()
    stages, now = StageRegistry(KEY, clock), clock.time()
    honest = notice(issued=now)
    forged = (
        notice(issued=now, key=b"a guessed key of some length"),
        notice(issued=now, key=b""),
        honest.model_copy(update={"proof": ""}),
        honest.model_copy(update={"address": "192.0.2.1:1"}),
        honest.model_copy(update={"model": "cd" * 32}),
        honest.model_copy(update={"issued": honest.issued + 1}),
    )
    for message in forged:
        with pytest.raises(Refused) as refused:
            stages.announce_stage(message)
        assert refused.value.code == Code.WRONG_STAGE_KEY
    nobody = StageRegistry(b"", clock)
    with pytest.raises(Refused) as refused:
        nobody.announce_stage(notice(issued=now, key=b""))
    assert refused.value.code == Code.WRONG_STAGE_KEY, "without a stage key there are no stages"
    stages.announce_stage(honest)
    for seconds, message in (
        (0.0, honest),
        (STAGE_EXPIRY_SECONDS + 1, honest),  # captured, and sent again when the stage is gone
        (0.0, notice(issued=now + 7200)),
        (7200.0, honest),
        (0.0, notice("192.0.2.1:1", issued=now)),
    ):
        clock.now += seconds
        with pytest.raises(Refused) as refused:
            stages.announce_stage(message)
        assert refused.value.code == Code.REPLAYED
    assert stages.stages().stages == ()


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:port", "http://host:1/", "a b:1", "a:1\n", "a:1,b:2", "x" * 260 + ":1"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(Refused) as refused:
        read(
            StageNotice,
            notice().model_copy(update={"address": address}).model_dump_json().encode(),
        )
    assert refused.value.code == Code.MALFORMED


async def write(entry: Entry) -> tuple[bytes, int]:
    pieces = [piece async for piece in entry.generate(Request(b"the ", 8))]
    return b"".join(piece.text for piece in pieces), pieces[-1].stats.wire_bytes


def test_announced_stages_are_used_and_expired_ones_forgotten(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(route, "GHOST_SECONDS", 0.2)
    expected = bytes(write_locally(MODEL, b"the ", 8, Sampler()))
    listed: list[str] | None = []
    holding = serve_blocks(RunModel(run), (2, 3))

    async def find(model: str) -> list[str]:
        assert model == holding.facts.model
        if listed is None:
            raise Unreachable("the coordinator is away")
        return listed

    async def play() -> None:
        nonlocal listed
        stage, entry = Stage(holding), Entry(RunModel(run), find)
        await stage.start()
        await entry.start()
        assert entry.status()["hosts"] == [] and await write(entry) == (expected, 0)
        listed = ["nowhere:99999", stage.address]
        await until_async(lambda: [host["alive"] for host in entry.status()["hosts"]] == [True])
        listed = None
        text, wire_bytes = await write(entry)
        assert text == expected and wire_bytes > 0
        await stage.aclose()
        await until_async(lambda: [host["alive"] for host in entry.status()["hosts"]] == [False])
        listed = []
        await until_async(lambda: entry.status()["hosts"] == [])
        assert await write(entry) == (expected, 0)
        await entry.aclose()

    asyncio.run(asyncio.wait_for(play(), 2 * PATIENCE))


def test_a_coordinator_tells_serve_where_the_stages_are(run: Path, tmp_path: Path) -> None:
    with (
        beginning(tmp_path / "run") as coordinator,
        serve_coordinator(coordinator, Listen(token=TOKEN, stage_key=KEY)) as url,
    ):
        (tmp_path / "stage.key").write_bytes(KEY)
        (tmp_path / "stage.key").chmod(0o600)
        with closing(HttpClient(url, "another")) as stranger:
            for call in (stranger.stages, partial(stranger.announce_stage, notice())):
                with pytest.raises(Refused, match="token"):
                    call()
        with (
            started(
                "stage",
                str(run),
                "--blocks",
                "2-3",
                "--announce",
                url,
                "--token",
                TOKEN,
                *WITH_KEY,
                *HERE,
                cwd=tmp_path,
            ) as stage,
            closing(HttpClient(url, TOKEN)) as client,
        ):
            with pytest.raises(Refused) as refused:  # a member that has no stage key
                client.announce_stage(notice(key=b"a guessed key of some length"))
            assert refused.value.code == Code.WRONG_STAGE_KEY
            until(lambda: len(client.stages().stages) == 1, "its announcement")
            assert client.stages().stages[0].address == stage.said["address"]
            with started(
                "serve", str(run), "--route", url, "--token", TOKEN, *WITH_KEY, *HERE, cwd=tmp_path
            ) as entry:
                (host,) = entry.status()["hosts"]
                assert (host["name"], host["alive"], host["blocks"]) == (
                    stage.said["address"],
                    True,
                    [2, 3],
                )
                body = {"model": "small", "prompt": "the ", "max_tokens": 8}
                answer = httpx2.post(
                    f"{entry.url}/v1/completions", json=body, timeout=PATIENCE
                ).json()
                assert answer["blocktrain"]["wire_bytes"] > 0
            assert stage.interrupt() == 0


def test_serve_asks_only_stages_that_know_the_key(run: Path, tmp_path: Path) -> None:
    """A9: a coordinator that lies, or a mirror of it, lists a stage of its own."""
    key = tmp_path / "stage.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    model = RunModel(run).model
    listed = [
        notice("192.0.2.1:1", model, key=b"another key of some length"),
        notice("192.0.2.2:1", "cd" * 32),
        notice("192.0.2.3:1", model),
    ]

    class Lying(HttpClient):
        def stages(self) -> StageList:
            return StageList(stages=tuple(listed))

    find = _stage_finder(Lying("http://127.0.0.1:1"), KEY)
    assert asyncio.run(find(model)) == ["192.0.2.3:1"]  # type: ignore[arg-type]
    for flags, sentence in (
        (RouteFlags("http://127.0.0.1:8470"), "a coordinator can list stages of anybody"),
        (RouteFlags("127.0.0.1:1,192.0.2.1:8481"), "192.0.2.1:8481 is on another machine"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            flags.secret()
    assert RouteFlags("127.0.0.1:1").secret() == b""
    assert RouteFlags("192.0.2.1:1", key=key).secret() == KEY
    with pytest.raises(ConfigError, match=r"--announce needs --key FILE: the file stage\.key"):
        StageFlags("127.0.0.1:0", announce="http://127.0.0.1:8470").parse()
    for plaintext in (False, True):
        guard = StageFlags("127.0.0.1:0", key, plaintext=plaintext).guard()
        assert (guard.tls is None) == (guard.next_tls is None) == plaintext


def test_a_stage_announces_an_address_that_can_be_dialled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="others cannot connect"):
        StageFlags("0.0.0.0:8481", tmp_path / "key", announce="http://127.0.0.1:8470").parse()


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
