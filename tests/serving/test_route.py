"""Choosing stages, and stages found through a coordinator: listed, dialled, used, forgotten."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2
import pytest

from blocktrain.cli.serve import StageFlags
from blocktrain.clock import SimulatedClock
from blocktrain.coordinator.http import StageRegistry
from blocktrain.errors import ConfigError, Unreachable
from blocktrain.learning.generate import Sampler
from blocktrain.learning.generate import write as write_locally
from blocktrain.protocol.messages import (
    MAX_STAGES,
    STAGE_EXPIRY_SECONDS,
    StageNotice,
    read,
)
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.runs.served import RunModel
from blocktrain.serving.blocks import serve_blocks
from blocktrain.serving.entry import route
from blocktrain.serving.entry.answer import Request
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.entry.route import chain, nearest, parse_route
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MODEL, tmp_path_factory.mktemp("route") / "small")


def notice(address: str = "127.0.0.1:8481", model: str = SHA) -> StageNotice:
    return StageNotice(address=address, model=model)


def test_recently_announced_stages_are_listed() -> None:
    clock = SimulatedClock()
    stages = StageRegistry(clock)
    stages.announce_stage(notice())
    stages.announce_stage(notice(model="cd" * 32))  # it was started again, with another model
    assert stages.stages().stages == (notice(model="cd" * 32),)
    clock.now += STAGE_EXPIRY_SECONDS - 1
    stages.announce_stage(notice("[::1]:8482"))
    clock.now += 2
    assert stages.stages().stages == (notice("[::1]:8482"),)
    for port in range(1, MAX_STAGES):
        stages.announce_stage(notice(f"host-{port}.example:{port}"))
    stages.announce_stage(notice("[::1]:8482"))  # it is listed: it may go on
    with pytest.raises(Refused) as full:
        stages.announce_stage(notice())
    assert full.value.code == Code.BUSY


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:port", "http://host:1/", "a b:1", "a:1\n", "a:1,b:2", "x" * 260 + ":1"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(Refused) as refused:
        read(
            StageNotice,
            StageNotice.model_construct(address=address, model=SHA).model_dump_json().encode(),
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
        serve_coordinator(coordinator, Listen(token=TOKEN)) as url,
    ):
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
                *HERE,
                cwd=tmp_path,
            ) as stage,
            closing(HttpClient(url, TOKEN)) as client,
        ):
            message = notice(stage.said["address"], stage.said["model"])
            until(lambda: client.stages().stages == (message,), "its announcement")
            with started(
                "serve", str(run), "--route", url, "--token", TOKEN, *HERE, cwd=tmp_path
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
