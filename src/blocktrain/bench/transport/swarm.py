"""Many workers in one process: real keys, messages and payloads, no training. Calls are timed.

The client is as small as HTTP/1.1 allows, so that the coordinator is measured and not its load.
Every worker has its own connection and source address, like workers on other machines.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from blocktrain.errors import BlockTrainError
from blocktrain.protocol import calls, compression, tensors
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity, identity_from_seed, new_nonce, verify
from blocktrain.protocol.ledger import lineage
from blocktrain.protocol.transfer import Plan, sha256, split

SPEED = 10.0  # steps per second that every worker claims to make
PACES = (0.75, 1.25)  # of the usual time of a task: machines differ
TIMEOUT = 30.0  # seconds after which a call has failed
PATIENCE = 30.0  # seconds that the last calls have to end
ON_TIME = (
    "too_stale",
    "stale_fence",
    "block_finished",
)  # refusals of an update that came when its round was long over

R = TypeVar("R", bound=m.Message)


@dataclass(frozen=True)
class Load:
    """The load on a coordinator: how many workers, and how often they call."""

    host: str
    port: int
    workers: int
    seconds: float
    seed: int = 0
    heartbeat: float = 10.0
    task: float = 60.0
    churn: float = 0.01  # share of workers that leave and join in the time of a heartbeat

    @property
    def ramp_seconds(self) -> float:
        """Seconds until all have joined. A task's time, so that tasks do not all end at once."""
        return self.task


@dataclass
class Notes:
    """Observations: (moment, seconds) of every call by name, and errors."""

    calls: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # updates that came too late to count
    late: int = 0  # updates that counted although their round was over
    waits: int = 0  # answers without a task
    updates: int = 0
    joins: int = 0
    leaves: int = 0


class Failed(BlockTrainError):
    """An answer that is not the expected one."""


class HttpLine:
    """One keep-alive connection from one address; calls one after the other."""

    def __init__(self, load: Load, notes: Notes, address: str) -> None:
        self._load, self._notes, self._address = load, notes, address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, name: str, head: str, body: bytes = b"") -> bytes:
        """Send a request and time its answer; `head` is the first line and special headers."""
        try:
            async with asyncio.timeout(TIMEOUT):
                reader, writer = self._streams or await self._open()
                began = time.monotonic()
                writer.write(
                    f"{head}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                status, content = await _answer(reader)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise Failed(f"{name}: {type(error).__name__} {error}") from None
        self._notes.calls.setdefault(name, []).append((began, time.monotonic() - began))
        if status != 200:
            raise Failed(f"{name}: {status} {_code(content)}")
        return content

    async def get(self, name: str, kind: type[R], path: str, headers: str = "") -> R:
        """A message by GET."""
        return m.read(kind, await self.call(name, f"GET {path} HTTP/1.1{headers}"), m.MAX_REPLY)

    async def post(self, name: str, kind: type[R], path: str, message: m.Message) -> R:
        """A message for a message."""
        return m.read(
            kind,
            await self.call(
                name, f"POST {path} HTTP/1.1\r\nContent-Type: {calls.JSON}", m.write(message)
            ),
            m.MAX_REPLY,
        )

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._streams = await asyncio.open_connection(
            self._load.host, self._load.port, local_addr=(self._address, 0), limit=1 << 22
        )
        return self._streams

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


def _code(content: bytes) -> str:
    try:
        return m.read(m.Refusal, content).code.value
    except BlockTrainError:
        return content[:60].decode(errors="replace")


@dataclass
class Shared:
    """What all workers of the process have in common."""

    load: Load
    notes: Notes
    schemas: dict[int, tensors.Schema] = field(default_factory=dict)  # by block: fetched once

    async def payload(self, line: HttpLine, task: m.Task, draw: np.random.Generator) -> bytes:
        """A small random change of the task's block, as a worker would send it."""
        if task.block not in self.schemas:
            content = await line.call("blob", f"GET /v1/blobs/{task.weights.sha256} HTTP/1.1")
            self.schemas[task.block] = tensors.schema_of(tensors.unpack(content))
        delta = {
            n: draw.standard_normal(s.shape).astype(np.float32) * np.float32(1e-3)
            for n, s in self.schemas[task.block].items()
        }
        return compression.compress(delta, None, task.compression)[0]


def join_message(me: Identity) -> m.Join:
    """A signed join of an ordinary machine."""
    message = m.Join(
        protocol=m.PROTOCOL,
        public_key=me.public_key,
        name="simulated",
        device="cpu",
        memory=1 << 30,
        speed=SPEED,
        nonce=new_nonce(),
        time=_now_ms(),
    )
    return me.sign(message)


def task_request(me: Identity, reply: m.JoinReply, *, leaving: bool = False) -> m.TaskRequest:
    """Signed."""
    message = m.TaskRequest(
        run=reply.run,
        worker=me.worker,
        fingerprint=reply.fingerprint,
        speed=SPEED,
        leaving=leaving,
        nonce=new_nonce(),
    )
    return me.sign(message)


def submission(
    me: Identity, reply: m.JoinReply, task: m.Task, payload: bytes, seconds: float
) -> m.Submission:
    """A signed submission that claims this many seconds of training."""
    message = m.Submission(
        run=reply.run,
        worker=me.worker,
        task=task.task,
        fence=task.fence,
        block=task.block,
        base=task.base,
        payload_sha256=sha256(payload),
        payload_length=len(payload),
        chunks=Plan(len(payload), task.chunk_bytes).chunks,
        steps=task.steps,
        tokens=task.steps * int(reply.config["batch"]) * int(reply.config["context"]),
        loss_before=3.0,
        loss_after=2.5,
        seconds=seconds,
        continued=m.Lineage(),
        lineage=lineage(None, task.order, m.Lineage()),
        nonce=new_nonce(),
        time=_now_ms(),
    )
    return me.sign(message)


class SimulatedWorker:
    """Joins, takes tasks, sends heartbeats, and an update when the time of the task is over."""

    def __init__(self, shared: Shared, number: int) -> None:
        self._load, self._notes, self._shared = shared.load, shared.notes, shared
        self._me: Identity = identity_from_seed(
            sha256(f"{self._load.seed}/{number}".encode()).encode()[:32]
        )
        self._draw = np.random.default_rng([self._load.seed, number])
        self._line = HttpLine(
            self._load,
            self._notes,
            f"127.{1 + (number >> 16)}.{(number >> 8) & 255}.{number & 255}",
        )
        self._join_reply: m.JoinReply | None = None
        self._pace = float(self._draw.uniform(*PACES))
        self._stop = asyncio.Event()
        self._says_goodbye = number % 2 == 0  # the others leave without a message

    def go(self) -> None:
        """Leave at the next opportunity."""
        self._notes.leaves += 1
        self._stop.set()

    async def live(self) -> None:
        """From joining to leaving. After an error it asks for another task, like a real worker."""
        todo: m.Task | m.Wait | None = None
        while not self._stop.is_set():
            try:
                if self._join_reply is None:
                    todo = await self._join()
                elif todo is None:
                    todo = await self._ask()
                if isinstance(todo, m.Wait) and todo.code == "finished":
                    raise Failed(f"the run is over: {todo.reason}")
                if isinstance(todo, m.Wait):
                    self._notes.waits += 1
                    await self._rest(todo.seconds)
                    todo = None
                else:
                    todo = await self._work(todo)
            except BlockTrainError as error:
                self._notes.errors[str(error)] += 1
                todo = None
                await self._rest(1.0)
        await self._leave()

    async def _join(self) -> m.Task | m.Wait:
        self._join_reply = await self._line.post(
            "join", m.JoinReply, "/v1/join", join_message(self._me)
        )
        self._notes.joins += 1
        return self._join_reply.next

    async def _ask(self, *, leaving: bool = False) -> m.Task | m.Wait:
        name, request = (
            "leave" if leaving else "next_task",
            task_request(self._me, self._reply, leaving=leaving),
        )
        return (await self._line.post(name, m.TaskReply, "/v1/tasks", request)).next

    async def _work(self, task: m.Task) -> m.Task | m.Wait | None:
        """Train for as long as a task takes, then send the update."""
        began = time.monotonic()
        whole = self._load.task * self._pace
        ends = began + whole
        while (seconds := ends - time.monotonic()) > 0:
            if not await self._rest(min(seconds, self._load.heartbeat)):
                return None
            step = int(task.steps * min(1.0, (time.monotonic() - began) / whole))
            if (
                time.monotonic() < ends
                and not (await self._beat(task, min(step, task.steps - 1))).go_on
            ):
                self._notes.refusals["told to stop"] += 1
                return None
        await self._beat(
            task, task.steps
        )  # trained: the next task may be handed out while this one is uploaded
        ahead = await self._ask()
        following = await self._send(task, time.monotonic() - began)
        return ahead if isinstance(ahead, m.Task) else following

    async def _beat(self, task: m.Task, step: int) -> m.HeartbeatReply:
        message = m.Heartbeat(
            run=self._reply.run,
            worker=self._me.worker,
            task=task.task,
            fence=task.fence,
            step=step,
            loss=2.0,
            bytes=0,
            nonce=new_nonce(),
        )
        return await self._line.post(
            "heartbeat", m.HeartbeatReply, "/v1/heartbeat", self._me.sign(message)
        )

    async def _send(self, task: m.Task, seconds: float) -> m.Task | m.Wait | None:
        payload = await self._shared.payload(self._line, task, self._draw)
        ticket = f"\r\n{m.TICKET_HEADER}: {task.ticket}"
        have = (
            await self._line.get("upload_state", m.UploadState, f"/v1/uploads/{task.task}", ticket)
        ).have
        for index, chunk in enumerate(split(payload, task.chunk_bytes)):
            if index not in have:
                head = (
                    f"PUT /v1/uploads/{task.task}/{index} HTTP/1.1{ticket}\r\n"
                    f"{m.DIGEST_HEADER}: {sha256(chunk)}\r\nContent-Type: {calls.BYTES}"
                )
                await self._line.call("upload", head, chunk)
        message = submission(self._me, self._reply, task, payload, seconds)
        try:
            reply = await self._line.post("submit", m.SubmitReply, "/v1/updates", message)
        except Failed as error:
            if str(error).endswith(ON_TIME):
                self._notes.refusals[str(error)] += 1
                return None
            raise
        verify(reply.receipt, self._reply.coordinator)
        self._notes.updates += 1
        self._notes.late += reply.receipt.staleness > 1
        return reply.next

    async def _leave(self) -> None:
        if self._says_goodbye and self._join_reply is not None:
            try:
                await self._ask(leaving=True)
            except BlockTrainError as error:
                self._notes.errors[str(error)] += 1
        self._line.close()

    async def _rest(self, seconds: float) -> bool:
        """Wait; False if the worker was stopped meanwhile."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return True
        return False

    @property
    def _reply(self) -> m.JoinReply:
        if self._join_reply is None:
            raise Failed("not joined")
        return self._join_reply


async def run_swarm(load: Load) -> Notes:
    """Start all workers, let some leave and join for `seconds`, then stop all of them."""
    shared = Shared(load, Notes())
    draws = random.Random(load.seed)
    workers: dict[asyncio.Task[None], SimulatedWorker] = {}

    def on_end(task: asyncio.Task[None]) -> None:
        del workers[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            shared.notes.errors[f"the load itself: {error!r}"] += 1

    def start(number: int) -> None:
        worker = SimulatedWorker(shared, number)
        task = asyncio.create_task(worker.live())
        workers[task] = worker
        task.add_done_callback(on_end)

    async def churn() -> None:
        for number in range(load.workers, 1 << 22):
            await asyncio.sleep(load.heartbeat / max(1e-9, load.churn * load.workers))
            draws.choice(list(workers.values())).go()
            start(number)

    began = time.monotonic()
    for number in range(load.workers):
        start(number)
        await asyncio.sleep(
            max(0.0, began + (number + 1) / load.workers * load.ramp_seconds - time.monotonic())
        )
    beside = [asyncio.create_task(work) for work in (churn(), _watch(shared))]
    await asyncio.sleep(load.seconds)
    await _cancel([*beside, *workers])
    return shared.notes


async def _watch(shared: Shared) -> None:
    """Poll the run as the screen of an operator does."""
    line = HttpLine(shared.load, shared.notes, "127.0.0.2")

    async def attempt(what: Callable[[], Awaitable[object]]) -> None:
        try:
            await what()
        except BlockTrainError as error:
            shared.notes.errors[str(error)] += 1

    while True:
        await attempt(
            lambda: line.call("status", "GET /v1/status HTTP/1.1")
        )  # not read: checking a thousand workers would delay them all
        await asyncio.sleep(0.5)
        await attempt(lambda: line.get("run", m.Manifest, "/v1/run"))
        await asyncio.sleep(0.5)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=PATIENCE)


def _now_ms() -> int:
    return int(time.time() * 1000)


def swarm_process(connection: Connection, load: Load) -> None:
    """Main function of a load process: report ready, wait for the start, run, send the notes."""
    gc.disable()  # the pauses would be taken for the coordinator's
    connection.send("here")
    connection.recv()
    connection.send(asyncio.run(run_swarm(load)))
