"""What `serve` does to clients that are slow, too many, or gone: real sockets, short deadlines."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme

from blocktrain.errors import ConfigError
from blocktrain.runs.served import RunModel
from blocktrain.serving import request_queue
from blocktrain.serving.entry.entry import Entry
from blocktrain.serving.openai_api import ServingRules, build_app
from blocktrain.serving.request_queue import RequestQueue
from blocktrain.web import guard, sse
from blocktrain.web.guard import keys_of
from blocktrain.web.server import AppServer, Where
from support.waiting import PATIENCE

LONG = {"model": "small", "max_tokens": 8192, "mode": "autoregressive"}
SHORT = {"model": "small", "max_tokens": 4, "mode": "autoregressive"}
KEYS = ("the-key-of-a-greedy-client", "the-key-of-a-modest-client")
Scenario = Callable[[httpx2.AsyncClient, AppServer], Awaitable[None]]


def serving(
    run: Path,
    scenario: Scenario,
    rules: ServingRules | None = None,
    listen: Where | None = None,
    **options: Any,
) -> None:
    """A scenario with a server around it."""

    async def play() -> None:
        entry = Entry(RunModel(run))
        await entry.start()
        server = AppServer(build_app(entry, rules or ServingRules("small")), listen or Where())
        running = asyncio.create_task(server.serve())
        try:
            async with (
                asyncio.timeout(PATIENCE),
                httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE, **options) as client,
            ):
                await scenario(client, server)
        finally:
            server.stop()
            await running
            await entry.aclose()

    asyncio.run(play())


async def until(
    client: httpx2.AsyncClient,
    condition: Callable[[dict[str, Any]], bool],
    headers: dict[str, str] | None = None,
) -> None:
    while not condition((await client.get("/v1/status", headers=headers)).json()):
        await asyncio.sleep(0.01)


async def line(server: AppServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.rpartition("//")[2].split(":")
    return await asyncio.open_connection(host, int(port))


def head(length: int) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


def test_slow_headers_are_cut_off_and_block_nobody(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "HEADER_SECONDS", 3.0)

    async def scenario(client: httpx2.AsyncClient, server: AppServer) -> None:
        slow = [await line(server) for _ in range(300)]
        for _, writer in slow:
            writer.write(b"POST /v1/completions HT")
        assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
        assert await asyncio.gather(*(_end(reader) for reader, _ in slow)) == [b""] * len(slow)

    serving(run, scenario)


async def _end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def test_a_slow_body_is_refused_and_blocks_nobody(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        guard, "BODY_SECONDS", 4.0
    )  # all of them are there before the first is given up
    monkeypatch.setattr(guard, "MAX_FROM_ONE", 20)

    async def scenario(client: httpx2.AsyncClient, server: AppServer) -> None:
        slow = [await line(server) for _ in range(21)]
        for _, writer in slow:
            writer.write(head(100) + b"{")
        answers = await asyncio.gather(*(_end(reader) for reader, _ in slow))
        codes = sorted(
            json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] for answer in answers
        )
        assert codes == ["busy"] + ["too_slow"] * 20
        assert (await client.post("/v1/completions", json=SHORT)).status_code == 200

    serving(run, scenario)


def test_some_wait_and_the_next_is_refused(run: Path) -> None:
    async def scenario(client: httpx2.AsyncClient, _: AppServer) -> None:
        async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first:
            pieces = first.aiter_bytes()
            await anext(pieces)
            second = asyncio.create_task(client.post("/v1/completions", json=SHORT))
            await until(client, lambda status: status["requests"]["waiting"] == 1)
            third = await client.post("/v1/completions", json=SHORT)
            assert third.status_code == 429 and int(third.headers["retry-after"]) >= 1
            assert not second.done()
        assert (await second).status_code == 200
        await until(client, lambda status: status["requests"]["running"] == status["sessions"] == 0)

    serving(run, scenario, ServingRules("small", max_requests=1, queue=1))


def test_a_client_that_disconnects_leaves_the_queue(run: Path) -> None:
    async def scenario(client: httpx2.AsyncClient, server: AppServer) -> None:
        async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first:
            pieces = first.aiter_bytes()
            await anext(pieces)
            body = json.dumps(SHORT).encode()
            _, writer = await line(server)
            writer.write(head(len(body)) + body)
            await until(client, lambda status: status["requests"]["waiting"] == 1)
            writer.close()
            await until(client, lambda status: status["requests"]["waiting"] == 0)
            assert (await client.get("/v1/status")).json()["requests"]["running"] == 1

    serving(run, scenario, ServingRules("small", max_requests=1, queue=1))


def test_nobody_waits_for_ever(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "QUEUE_SECONDS", 0.3)

    async def scenario(client: httpx2.AsyncClient, _: AppServer) -> None:
        async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first:
            pieces = first.aiter_bytes()
            await anext(pieces)
            assert (await client.post("/v1/completions", json=SHORT)).json()["error"][
                "code"
            ] == "busy"

    serving(run, scenario, ServingRules("small", max_requests=1, queue=1))


def test_places_are_shared_between_clients(run: Path) -> None:
    """A14: long requests of one client take all places, and the whole queue."""
    greedy, modest = ({"Authorization": f"Bearer {key}"} for key in KEYS)

    async def scenario(client: httpx2.AsyncClient, server: AppServer) -> None:
        long = [
            asyncio.create_task(client.post("/v1/completions", json=LONG, headers=greedy))
            for _ in range(6)
        ]
        await until(client, lambda status: status["requests"]["waiting"] == 4, greedy)
        for _ in "abc":
            answer = await client.post("/v1/completions", json=SHORT, headers=modest)
            assert answer.status_code == 200, answer.text
            assert sum(task.done() for task in long) <= 1, "only the last of the queue made room"
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)

    rules = ServingRules("small", keys_of(*KEYS), max_requests=2, queue=4)
    serving(run, scenario, rules, limits=httpx2.Limits(max_connections=20))


def test_clients_take_turns_at_a_single_place(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "TURN_SECONDS", 0.2)
    greedy, modest = ({"Authorization": f"Bearer {key}"} for key in KEYS)

    async def scenario(client: httpx2.AsyncClient, _: AppServer) -> None:
        body = {**LONG, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body, headers=greedy) as long:
            pieces = long.aiter_bytes()
            await anext(pieces)
            answer = await client.post("/v1/completions", json=SHORT, headers=modest)
            assert answer.status_code == 200
            assert await anext(pieces), "it goes on"

    rules = ServingRules("small", keys_of(*KEYS), max_requests=1, queue=4)
    serving(run, scenario, rules)


def test_a_client_that_leaves_while_it_is_paused_takes_no_place() -> None:
    async def play() -> None:
        queue = RequestQueue(1, 4)

        async def paused() -> None:
            async with queue.slot("greedy") as slot:
                while True:
                    async for _ in slot.take_turns():
                        pass
                    await asyncio.sleep(0)

        greedy = asyncio.create_task(paused())
        await asyncio.sleep(0)
        assert queue.running == 1
        async with queue.slot("modest"):
            assert (queue.running, queue.waiting) == (1, 0), "the other one is paused"
            greedy.cancel()
            await asyncio.wait([greedy])
        assert (queue.running, queue.waiting) == (0, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_queue, "TURN_SECONDS", 0.0)
        asyncio.run(play())


def test_a_silent_stream_says_that_it_is_alive(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "ALIVE_SECONDS", 0.0005)

    async def scenario(client: httpx2.AsyncClient, _: AppServer) -> None:
        text = (await client.post("/v1/completions", json={**SHORT, "stream": True})).text
        assert ": alive\n\n" in text and text.endswith("data: [DONE]\n\n")

    serving(run, scenario)


def test_https(run: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def scenario(client: httpx2.AsyncClient, server: AppServer) -> None:
        assert server.url.startswith("https://")
        assert (await client.post("/v1/completions", json=SHORT)).status_code == 200

    listen = Where(certificate=tmp_path / "both.pem", key=tmp_path / "both.pem")
    serving(run, scenario, listen=listen, verify=trusting)
    with pytest.raises(ConfigError, match="certificate"):
        AppServer(None, Where(certificate=run / "config.toml", key=run / "config.toml"))
