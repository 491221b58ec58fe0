"""What a coordinator refuses over HTTP: a stable code, a sentence, and nothing changed."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from backports import zstd

from blocktrain.clock import SimulatedClock
from blocktrain.errors import Conflict, Damaged, RunError, Unreachable
from blocktrain.protocol import calls, compression, tensors
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import new_identity
from blocktrain.protocol.refusals import RULES, Code
from blocktrain.protocol.transfer import sha256, split
from blocktrain.store.blobs import FolderBlobs
from blocktrain.watch.server import Listen, WatchedCoordinator, open_coordinator, serve_coordinator
from blocktrain.web import guard
from blocktrain.web.client import HttpClient, LocalClient, fetch
from support.fake_worker import (
    OPERATOR,
    TOKEN,
    FakeWorker,
    as_task,
    beginning,
    snapshot,
)

NOBODY = "0" * 64


@dataclass
class Place:
    """A coordinator behind HTTP whose clock stands still, with rounds that nobody closes."""

    coordinator: WatchedCoordinator
    clock: SimulatedClock
    url: str
    http: httpx2.Client
    client: HttpClient
    people: int = 0

    def worker(self) -> FakeWorker:
        self.people += 1
        return FakeWorker(self.client, seed=100 + self.people)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def post(self, path: str, message: m.Message | bytes, **headers: str) -> httpx2.Response:
        return self.http.post(
            path,
            content=message if isinstance(message, bytes) else m.write(message),
            headers={"Content-Type": calls.JSON, **headers},
        )

    def put(
        self,
        task: m.Task,
        index: int,
        content: bytes,
        digest: str | None = None,
        ticket: str | bytes | None = None,
    ) -> httpx2.Response:
        headers = {
            m.TICKET_HEADER: ticket or task.ticket,
            m.DIGEST_HEADER: sha256(content) if digest is None else digest,
            "Content-Type": calls.BYTES,
        }
        return self.http.put(f"/v1/uploads/{task.task}/{index}", content=content, headers=headers)  # type: ignore[arg-type]


@contextmanager
def opened(folder: Path, **policy: Any) -> Iterator[Place]:
    clock = SimulatedClock(1000.0)
    listen = Listen(token=TOKEN, operator_token=OPERATOR)
    with (
        beginning(folder, clock=clock, **policy) as coordinator,
        serve_coordinator(coordinator, listen) as url,
    ):
        http = httpx2.Client(
            base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120
        )
        client = HttpClient(url, TOKEN, timeout=120)
        yield Place(coordinator, clock, url, http, client)
        client.close()
        http.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with opened(tmp_path_factory.mktemp("refusals"), replicas=1000) as found:
        yield found


def refuse(place: Place, code: Code, call: Callable[[], httpx2.Response]) -> m.Refusal:
    """The call is refused with this code and a sentence that names the fix, and changes nothing."""
    before = snapshot(place.coordinator)
    answer = call()
    found = m.Refusal.model_validate_json(answer.content)
    assert (found.code, answer.status_code) == (code, RULES[code].status), answer.text
    assert RULES[code].sentence in found.sentence or len(found.sentence) > 20
    assert found.then == RULES[code].then and "Traceback" not in found.sentence
    assert snapshot(place.coordinator) == before
    return found


# At the door


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", "\xe9"])
@pytest.mark.parametrize(
    "path",
    ["/v1/run", "/v1/status", "/v1/ledger", f"/v1/blobs/{NOBODY}", "/v1/uploads/1", "/nowhere"],
)
def test_token(place: Place, token: str, path: str) -> None:
    headers = [(b"authorization", b"Bearer " + token.encode("latin-1"))] if token else []
    found = refuse(
        place, Code.BAD_TOKEN, lambda: httpx2.get(place.url + path, headers=headers, timeout=60)
    )
    assert "join command" in found.sentence


def test_token_is_checked_before_the_body(place: Place) -> None:
    worker = place.worker()
    for path in ("/v1/join", "/v1/tasks", "/v1/updates", "/v1/heartbeat", "/v1/kick"):
        refuse(
            place,
            Code.BAD_TOKEN,
            lambda path=path: httpx2.post(place.url + path, content=b"{", timeout=60),  # type: ignore[misc]
        )
    refuse(
        place,
        Code.BAD_TOKEN,
        lambda: httpx2.post(
            f"{place.url}/v1/join", content=m.write(worker.join_message()), timeout=60
        ),
    )
    assert httpx2.get(f"{place.url}/healthz", timeout=60).json() == {
        "ok": True,
        "ready": True,
        "finished": False,
    }


def test_only_the_operator_kicks(place: Place) -> None:
    worker = place.worker()
    worker.join()
    refuse(place, Code.BAD_TOKEN, lambda: place.post("/v1/kick", m.Kick(worker=worker.id)))
    assert isinstance(worker.ask(), m.Task)


def test_wrong_protocol_run_worker_and_fingerprint(place: Place) -> None:
    worker, stranger = place.worker(), place.worker()
    task = worker.joined()
    stranger.run, stranger.fingerprint = worker.run, worker.fingerprint
    refuse(
        place,
        Code.WRONG_PROTOCOL,
        lambda: place.post("/v1/join", place.worker().join_message(protocol=1)),
    )
    refuse(
        place,
        Code.WRONG_FINGERPRINT,
        lambda: place.post("/v1/tasks", worker.request(fingerprint=NOBODY)),
    )
    refuse(place, Code.WRONG_RUN, lambda: place.post("/v1/tasks", worker.request(run="0" * 32)))
    refuse(
        place,
        Code.WRONG_RUN,
        lambda: place.post("/v1/updates", worker.submission(task, b"x", run="0" * 32)),
    )
    refuse(place, Code.UNKNOWN_WORKER, lambda: place.post("/v1/tasks", stranger.request()))
    refuse(
        place,
        Code.UNKNOWN_WORKER,
        lambda: place.post("/v1/updates", stranger.submission(task, b"x")),
    )


def test_signatures(place: Place) -> None:
    worker, other = place.worker(), new_identity()
    task = worker.joined()
    honest: dict[str, m.Signed] = {
        "/v1/join": worker.join_message(),
        "/v1/tasks": worker.request(),
        "/v1/updates": worker.submission(task, worker.payload(task)),
        "/v1/heartbeat": worker.identity.sign(
            m.Heartbeat(
                run=worker.run,
                worker=worker.id,
                task=task.task,
                fence=task.fence,
                step=1,
                bytes=0,
                nonce="0" * 32,
            )
        ),
    }
    changed: dict[str, dict[str, Any]] = {
        "/v1/join": {"speed": 11.0},
        "/v1/tasks": {"speed": 11.0},
        "/v1/updates": {"loss_after": 0.1},
        "/v1/heartbeat": {"step": 2},
    }
    for path, message in honest.items():
        bad = [
            other.sign(message),
            message.model_copy(update={"signature": ""}),
            message.model_copy(update=changed[path]),
        ]
        bad.append(
            message.model_copy(
                update={"signature": next(x.signature for p, x in honest.items() if p != path)}
            )
        )
        for forged in bad:
            refuse(
                place,
                Code.BAD_SIGNATURE,
                lambda path=path, forged=forged: place.post(path, forged),  # type: ignore[misc]
            )


# Bodies


def test_bodies_that_are_not_read(place: Place) -> None:
    worker = place.worker()
    task = worker.joined()
    large = b'{"x":"' + b"x" * m.MAX_JSON + b'"}'
    for path in ("/v1/join", "/v1/tasks", "/v1/updates", "/v1/heartbeat"):
        refuse(place, Code.TOO_LARGE, lambda path=path: place.post(path, large))  # type: ignore[misc]
    refuse(place, Code.TOO_LARGE, lambda: place.put(task, 0, bytes(task.chunk_bytes + 1)))
    refuse(
        place,
        Code.TOO_LARGE,
        lambda: place.put(task, task.payload_limit // task.chunk_bytes + 1, b"x"),
    )
    refuse(
        place, Code.LENGTH_REQUIRED, lambda: place.http.post("/v1/join", content=iter([b"{", b"}"]))
    )
    refuse(
        place,
        Code.LENGTH_REQUIRED,
        lambda: place.http.put(
            f"/v1/uploads/{task.task}/0", content=iter([b"x"]), headers=_ticket(task)
        ),
    )
    for encoding in ("gzip", "zstd", "identity, gzip"):
        call = lambda encoding=encoding: place.post(  # noqa: E731
            "/v1/join", worker.join_message(), **{"Content-Encoding": encoding}
        )
        refuse(place, Code.WRONG_ENCODING, call)
    assert place.client.upload_state(task.task, task.ticket).have == ()


def _ticket(task: m.Task) -> dict[str, str]:
    return {m.TICKET_HEADER: task.ticket, m.DIGEST_HEADER: sha256(b"x")}


def test_messages_that_cannot_be_read(place: Place) -> None:
    worker = place.worker()
    honest = json.loads(m.write(worker.join_message()))
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 60_000,
        json.dumps({**honest, "more": 1}).encode(),
    ]
    changes: list[dict[str, Any]] = [
        {"protocol": "1"},
        {"protocol": 1.0},
        {"protocol": -1},
        {"speed": float("nan")},
        {"speed": float("inf")},
        {"speed": -1},
        {"nonce": "short"},
        {"name": "<script>"},
        {"device": "toaster"},
        {"memory": 2**60},
        {"public_key": "A" * 64},
        {"held": {"block": 0}},
    ]
    bodies += [json.dumps({**honest, **change}).encode() for change in changes]
    bodies += [json.dumps({k: v for k, v in honest.items() if k != "nonce"}).encode()]
    for body in bodies:
        refuse(place, Code.MALFORMED, lambda body=body: place.post("/v1/join", body))  # type: ignore[misc]
    for path in ("/v1/tasks", "/v1/heartbeat", "/v1/updates"):
        refuse(
            place,
            Code.MALFORMED,
            lambda path=path: place.post(path, m.write(worker.join_message())),  # type: ignore[misc]
        )


@pytest.mark.parametrize("speed", [5e-324, 1e-300, 1e-12, 1e-6, 1e9])
def test_a_speed_that_nobody_has_gives_no_lease_without_an_end(
    tmp_path: Path, speed: float
) -> None:
    with beginning(tmp_path, clock=SimulatedClock(1000.0)) as coordinator:
        client = LocalClient(coordinator)
        for worker in (FakeWorker(client, 1), FakeWorker(client, 2), FakeWorker(client, 3)):
            worker.join(speed=speed)
            worker.ask(speed=speed)
            assert client.status().state == "running"
        assert coordinator.run.state.leases, "somebody works"
        assert (
            max(lease.expires for lease in coordinator.run.state.leases.values())
            < 1000 + 10 * 86400
        )


# Chunks and payloads


def test_chunks(place: Place) -> None:
    worker, other = place.worker(), place.worker()
    task, theirs = worker.joined(), other.joined()
    refuse(place, Code.HASH_MISMATCH, lambda: place.put(task, 0, b"x", sha256(b"y")))
    refuse(place, Code.HASH_MISMATCH, lambda: place.put(task, 0, b"x", ""))
    refuse(place, Code.STALE_FENCE, lambda: place.put(task, 0, b"x", ticket=theirs.ticket))
    refuse(place, Code.STALE_FENCE, lambda: place.put(task, 0, b"x", ticket="guess"))
    refuse(place, Code.STALE_FENCE, lambda: place.put(task, 0, b"x", ticket=b"\xe9\xe8"))
    refuse(place, Code.STALE_FENCE, lambda: place.http.get(f"/v1/uploads/{task.task}"))
    refuse(
        place,
        Code.UNKNOWN_TASK,
        lambda: place.http.get("/v1/uploads/999999", headers=_ticket(task)),
    )
    assert place.client.upload_state(task.task, task.ticket).have == ()


def _encoded(task: m.Task, worker: FakeWorker, change: Callable[[tensors.Tensors], None]) -> bytes:
    """An int4 payload as no encoder here writes it."""
    weights = worker.weights(task)
    schema = tensors.schema_of(weights)
    wire: tensors.Tensors = {
        name: np.ones(shape, {"U8": "<u1", "F16": "<f2"}[dtype]) * (0x99 if dtype == "U8" else 1)
        for name, (dtype, shape) in compression.wire_schema(schema, "int4").items()
    }
    wire = {name: t.astype("<u1" if name == "values" else "<f2") for name, t in wire.items()}
    change(wire)
    return zstd.compress(tensors.pack(wire, f"delta 1 int4 -20 {tensors.schema_hash(schema)}"))


def _set(name: str, value: float) -> Callable[[tensors.Tensors], None]:
    def change(wire: tensors.Tensors) -> None:
        wire[name][3] = value

    return change


def _more(wire: tensors.Tensors) -> None:
    wire["more"] = np.zeros(3, np.float32)


def _shorter(wire: tensors.Tensors) -> None:
    wire["values"] = wire["values"][:-1]


def _other_block(worker: FakeWorker, task: m.Task) -> bytes:
    return compression.compress({"w": np.ones((3, 4), np.float32)}, None, "int4")[0]


PAYLOADS: dict[str, tuple[Code, Callable[[FakeWorker, m.Task], bytes]]] = {
    "other tensors": (Code.WRONG_SHAPE, _other_block),
    "a tensor more": (Code.WRONG_SHAPE, lambda w, t: _encoded(t, w, _more)),
    "a value less": (Code.WRONG_SHAPE, lambda w, t: _encoded(t, w, _shorter)),
    "NaN": (Code.NOT_FINITE, lambda w, t: _encoded(t, w, _set("scales", float("nan")))),
    "infinity": (Code.NOT_FINITE, lambda w, t: _encoded(t, w, _set("scales", float("inf")))),
    "a negative scale": (Code.NOT_FINITE, lambda w, t: _encoded(t, w, _set("scales", -1.0))),
    "an int4 code that does not exist": (
        Code.MALFORMED,
        lambda w, t: _encoded(t, w, _set("values", 0)),
    ),
    "zstd bomb": (Code.TOO_LARGE, lambda w, t: zstd.compress(bytes(1 << 26))),
    "no zstd": (Code.MALFORMED, lambda w, t: b"PK\x03\x04" + bytes(100)),
    "a pickle": (Code.MALFORMED, lambda w, t: zstd.compress(b"\x80\x04cos\nsystem\n(S'true'\ntR.")),
    "cut off": (Code.MALFORMED, lambda w, t: w.payload(t)[:-10]),
    "something after it": (Code.MALFORMED, lambda w, t: w.payload(t) + b"more"),
    "another compression": (
        Code.TOO_LARGE,
        lambda w, t: compression.compress(
            {n: np.zeros_like(x) for n, x in w.weights(t).items()}, None, "fp16"
        )[0],
    ),
    "weights instead of a delta": (
        Code.TOO_LARGE,
        lambda w, t: compression.compress_weights(
            {n: np.zeros_like(x) for n, x in w.weights(t).items()}
        ),
    ),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_that_are_refused_for_what_they_hold(place: Place, name: str) -> None:
    worker = place.worker()
    task = worker.joined()
    code, make = PAYLOADS[name]
    payload = make(worker, task)
    worker.upload(task, payload)
    refuse(place, code, lambda: place.post("/v1/updates", worker.submission(task, payload)))
    assert worker.send(task).receipt.accepted, "the task is still its own"


def test_payloads_that_are_not_what_was_announced(place: Place) -> None:
    worker = place.worker()
    task = worker.joined()
    payload = worker.payload(task)
    chunks = split(payload, task.chunk_bytes)
    assert len(chunks) > 5 and len(payload) % task.chunk_bytes

    def submit(**changes: Any) -> Callable[[], httpx2.Response]:
        return lambda: place.post("/v1/updates", worker.submission(task, payload, **changes))

    refuse(place, Code.MISSING_CHUNKS, submit())
    worker.upload(task, payload[: 3 * task.chunk_bytes])
    found = refuse(place, Code.MISSING_CHUNKS, submit())
    assert "3, 4, 5" in found.sentence
    worker.upload(task, payload)
    refuse(place, Code.MALFORMED, submit(chunks=len(chunks) + 1))
    refuse(
        place,
        Code.TOO_LARGE,
        submit(payload_length=task.payload_limit + 1, chunks=-(-(task.payload_limit + 1) // 1024)),
    )
    refuse(place, Code.HASH_MISMATCH, submit(payload_length=len(payload) + 1))
    worker.upload(task, payload)
    refuse(place, Code.HASH_MISMATCH, submit(payload_sha256=sha256(b"other")))
    assert worker.send(task, payload).receipt.accepted


CLAIMS: dict[str, tuple[Code, dict[str, Any]]] = {
    "more tokens": (Code.WRONG_WEIGHT, {"tokens": 65}),
    "fewer tokens": (Code.WRONG_WEIGHT, {"tokens": 1}),
    "more steps": (Code.WRONG_STEPS, {"steps": 3, "tokens": 96}),
    "fewer steps": (Code.WRONG_STEPS, {"steps": 1, "tokens": 32}),
    "a later base": (Code.WRONG_BASE, {"base": 1}),
    "no such block": (Code.UNKNOWN_BLOCK, {"block": 7}),
    "no such task": (Code.UNKNOWN_TASK, {"task": 10**6}),
    "a fence that was never given": (Code.NOT_YOUR_TASK, {"fence": 2}),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_that_do_not_fit_the_task(place: Place, name: str) -> None:
    worker = place.worker()
    task = worker.joined()
    payload = worker.payload(task)
    worker.upload(task, payload)
    code, changes = CLAIMS[name]
    refuse(
        place, code, lambda: place.post("/v1/updates", worker.submission(task, payload, **changes))
    )
    refuse(
        place,
        Code.WRONG_BASE,
        lambda: place.post("/v1/updates", worker.submission(task, payload, block=3 - task.block)),
    )
    assert worker.send(task, payload).receipt.accepted


def test_work_of_another(place: Place) -> None:
    worker, thief = place.worker(), place.worker()
    task, own = worker.joined(), thief.joined()
    payload = worker.payload(task)
    refuse(
        place,
        Code.NOT_YOUR_TASK,
        lambda: place.post("/v1/updates", thief.submission(task, payload)),
    )
    worker.send(task, payload)
    refuse(
        place, Code.NOT_FOUND, lambda: place.http.get(f"/v1/blobs/{sha256(payload)}")
    )  # not before the round has closed
    refuse(
        place,
        Code.NOT_YOUR_TASK,
        lambda: place.post("/v1/updates", thief.submission(task, payload)),
    )
    refuse(
        place,
        Code.TASK_ANSWERED,
        lambda: place.post("/v1/updates", worker.submission(task, b"something else")),
    )
    assert thief.send(own).receipt.accepted


def test_a_nonce_counts_once(place: Place) -> None:
    worker = place.worker()
    first = worker.joined()
    second = as_task(worker.send(first, nonce="ab" * 16).next)
    payload = worker.payload(second)
    worker.upload(second, payload)
    refuse(
        place,
        Code.REPLAYED,
        lambda: place.post("/v1/updates", worker.submission(second, payload, nonce="ab" * 16)),
    )
    other = place.worker()
    assert other.send(other.joined(), nonce="ab" * 16).receipt.accepted, (
        "another worker may have drawn the same"
    )
    assert worker.send(second, payload).receipt.accepted


def test_a_task_that_was_given_to_another(tmp_path: Path) -> None:
    with opened(tmp_path, replicas=1000) as place:
        _give_to_another(place)


def _give_to_another(place: Place) -> None:
    slow, quick = place.worker(), place.worker()
    task = slow.joined()
    payload = slow.payload(task)
    slow.upload(task, payload)
    place.clock.now += 100.0
    place.coordinator.tick()
    taken = as_task(quick.join().next)
    assert (taken.task, taken.fence) == (task.task, task.fence + 1)
    refuse(
        place, Code.STALE_FENCE, lambda: place.post("/v1/updates", slow.submission(task, payload))
    )
    refuse(place, Code.STALE_FENCE, lambda: place.put(task, 0, payload[:1024]))
    assert not slow.beat(task).go_on
    assert place.client.upload_state(taken.task, taken.ticket).have == (), (
        "chunks of the old lease are not its own"
    )
    assert quick.send(taken).receipt.accepted and isinstance(slow.ask(), m.Task)


# Names


PATHS = [
    "/v1/blobs/../../etc/passwd",
    "/v1/blobs/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/blobs/%2e%2e%2frun.sqlite",
    "/v1/blobs/" + "A" * 64,
    "/v1/blobs/" + "a" * 63,
    "/v1/blobs/" + "a" * 65,
    "/v1/blobs/" + "a" * 64 + "%0a",
    "/v1/blobs/" + "a" * 64 + "%00",
    "/v1/blobs/RUN",
    "/v1/blobs/",
    f"/v1/blobs/{NOBODY}",
    "/v1/uploads/../1",
    "/v1/uploads/..%2f1",
    "/coordinator.pem",
    "//etc/passwd",
]


@pytest.mark.parametrize("path", PATHS)
def test_names_that_are_paths(place: Place, path: str) -> None:
    def call() -> httpx2.Response:
        return raw(
            place,
            (
                f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                "Connection: close\r\n\r\n"
            ).encode(),
        )

    refuse(place, Code.NOT_FOUND, call)


@pytest.mark.parametrize(
    "name",
    [
        "1/..",
        "-1/0",
        "1/-1",
        "1/1e3",
        "x/0",
        "1/0x1",
        "1/%D9%A1",
        "9999999999999999/0",
        "1/ 1",
        "+1/1",
    ],
)
def test_uploads_are_named_by_numbers(place: Place, name: str) -> None:
    head = (
        f"PUT /v1/uploads/{name.replace(' ', '%20')} HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {TOKEN}\r\nContent-Length: 1\r\n"
    )
    refuse(
        place, Code.MALFORMED, lambda: raw(place, (head + "Connection: close\r\n\r\nx").encode())
    )


def test_ranges_and_pages(place: Place) -> None:
    weights = place.worker().joined().weights
    for wanted in (
        "bytes=-5",
        "bytes=5-9",
        f"bytes={weights.length}-",
        "bytes=0-,5-",
        "lines=1-",
        "bytes=x-",
    ):
        call = lambda wanted=wanted: place.http.get(  # noqa: E731
            f"/v1/blobs/{weights.sha256}", headers={"Range": wanted}
        )
        refuse(place, Code.MALFORMED, call)
    for after in ("-1", "x", "1.0", "9" * 16, "%D9%A1"):
        refuse(
            place,
            Code.MALFORMED,
            lambda after=after: place.http.get(f"/v1/ledger?after={after}"),  # type: ignore[misc]
        )


def raw(place: Place, request: bytes) -> httpx2.Response:
    """What comes back for these very bytes."""
    with closing(socket.create_connection(place.address, timeout=60)) as line:
        line.sendall(request)
        return _parsed(_rest(line))


def _rest(line: socket.socket) -> bytes:
    got = b""
    with suppress(ConnectionResetError):  # somebody hung up while we were still talking
        while piece := line.recv(65536):
            got += piece
    return got


def _parsed(answer: bytes) -> httpx2.Response:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), answer[:200]
    return httpx2.Response(int(head.split()[1]), content=body)


# Those who are slow


def trickle(line: socket.socket, content: bytes, stop: threading.Event) -> None:
    """A byte every now and then, until somebody hangs up."""
    for byte in content:
        if stop.wait(0.05):
            return
        try:
            line.sendall(bytes([byte]))
        except OSError:
            return


def trickled(place: Place, head: bytes, content: bytes) -> bytes:
    """All that comes back while a request is sent in drops."""
    with closing(socket.create_connection(place.address, timeout=60)) as line:
        line.sendall(head)
        stop = threading.Event()
        thread = threading.Thread(target=trickle, args=(line, content, stop))
        thread.start()
        try:
            return _rest(line)
        finally:
            stop.set()
            thread.join()


def test_a_body_that_comes_in_drops_is_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = place.worker().joined()
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.4)
    monkeypatch.setattr(guard, "MIN_RATE", 1 << 20)
    authorization = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    post = (
        f"POST /v1/join HTTP/1.1\r\n{authorization}Content-Type: {calls.JSON}\r\n"
        "Content-Length: 60000\r\n\r\n"
    )
    put = (
        f"PUT /v1/uploads/{task.task}/0 HTTP/1.1\r\n{authorization}"
        f"{m.TICKET_HEADER}: {task.ticket}\r\nContent-Type: {calls.BYTES}\r\n"
        "Content-Length: 1024\r\n\r\n"
    )
    for head in (post, put):
        began = time.monotonic()
        found = refuse(
            place,
            Code.TOO_SLOW,
            lambda head=head: _parsed(trickled(place, head.encode(), bytes(60000))),  # type: ignore[misc]
        )
        assert "bytes" in found.sentence and time.monotonic() - began < 30
    assert place.client.upload_state(task.task, task.ticket).have == ()


@pytest.mark.parametrize(
    "first", [b"", b"POST /v1/join HTTP/1.1\r\nHost: x\r\n"], ids=["silence", "slow headers"]
)
def test_endless_headers_close_the_connection(
    place: Place, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.4)
    before = snapshot(place.coordinator)
    began = time.monotonic()
    assert trickled(place, first, b"X-Slow: " + b"x" * 5000 if first else b"") == b""
    assert time.monotonic() - began < 30
    assert snapshot(place.coordinator) == before
    monkeypatch.undo()
    assert place.http.get("/v1/status").status_code == 200, "others are served"


def test_too_many_at_once_are_turned_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_FROM_ONE", 0)
    assert refuse(place, Code.TOO_MANY_REQUESTS, lambda: place.http.get("/v1/run")).retry_seconds
    monkeypatch.setattr(guard, "MAX_REQUESTS", 0)
    assert refuse(place, Code.BUSY, lambda: place.http.get("/v1/run")).retry_seconds
    monkeypatch.undo()
    assert place.http.get("/v1/run").status_code == 200


def test_refusals_are_counted(place: Place) -> None:
    before = place.client.status().refusals.get(Code.NOT_FOUND, 0)
    place.http.get("/nowhere")
    assert place.client.status().refusals[Code.NOT_FOUND] == before + 1


# Chunks that race with each other


def test_chunks_that_come_twice_at_once_harm_nobody(tmp_path: Path) -> None:
    """A worker sends a chunk again while the first is on its way, submits meanwhile, or attacks."""
    blobs = FolderBlobs(tmp_path)
    stop, errors = threading.Event(), list[BaseException]()

    def again(action: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                action()
        except BaseException as error:
            errors.append(error)
            stop.set()

    def submit() -> None:
        have = blobs.chunks(1, 1)
        with suppress(Conflict):
            blobs.assemble(1, 1, list(have.values()), have.get(0, NOBODY))
        blobs.drop_chunks(1, 1)

    actions: list[Callable[[], object]] = [
        submit,
        *(lambda n=n: blobs.put_chunk(1, 1, 0, bytes([n]) * 50) for n in range(3)),
    ]
    threads = [threading.Thread(target=again, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    stop.wait(2.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


# Folders


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    with beginning(tmp_path / "run") as coordinator:
        before = snapshot(coordinator)
        with pytest.raises(
            RunError, match=r"another coordinator .* is using .*: stop it, or choose another folder"
        ):
            open_coordinator(tmp_path / "run")
        assert snapshot(coordinator) == before
        worker = FakeWorker(coordinator)
        assert worker.send(worker.joined()).receipt.accepted


def test_a_swapped_folder_or_key_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with beginning(tmp_path / name):
            pass
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "blobs")
    shutil.copytree(tmp_path / "b" / "blobs", tmp_path / "c" / "blobs")
    with pytest.raises(RunError, match=r"another run.*right folder"):
        open_coordinator(tmp_path / "c")
    shutil.copy(tmp_path / "b" / "coordinator.pem", tmp_path / "a" / "coordinator.pem")
    with pytest.raises(RunError, match="not the key that this run began with"):
        open_coordinator(tmp_path / "a")
    open_coordinator(tmp_path / "b").close()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_never_used(tmp_path: Path) -> None:
    with beginning(tmp_path / "run", replicas=2) as coordinator:
        people = [FakeWorker(LocalClient(coordinator), seed) for seed in (1, 2, 3)]
        task, _, theirs = (worker.joined() for worker in people)
        assert task.block == theirs.block

        def stored(name: str) -> Path:
            return tmp_path / "run" / "blobs" / name[:2] / name[2:4] / name

        flip(stored(task.weights.sha256))
        listening = serve_coordinator(coordinator, Listen())
        with (
            listening as url,
            closing(HttpClient(url, timeout=120)) as client,
            pytest.raises(Unreachable, match="wrong bytes"),
        ):
            fetch(client, task.weights, tmp_path / "weights")
        assert list(tmp_path.glob("weights*")) == []
        flip(stored(task.weights.sha256))  # as if restored from a backup
        payload = people[0].payload(task)
        people[0].send(task, payload)
        flip(stored(sha256(payload)))
        with pytest.raises(Damaged, match="damaged on disk"):
            people[2].send(theirs)
        found = coordinator.run.store.version(task.block)
        assert found is not None and found.version == 0, "no version was made of it"
        flip(stored(sha256(payload)))
        coordinator.tick()
        assert coordinator.run.newest(task.block).version == 1
