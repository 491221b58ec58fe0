"""Golden values: what the program computes, writes and sends, to the bit, seen from outside.

This file holds still while everything behind it moves. It goes through the command line, the HTTP
API of docs/protocol.md, the files of a run folder and the OpenAI API of `serve`. The exceptions
are bytes of exact inputs; these names are looked up, and must be kept:

    blocktrain.protocol.codec, .tensors or .compression:
        compress(delta, residual, method) -> (payload, residual)
        compress_weights(weights) -> payload
        pack(tensors) -> safetensors bytes
    blocktrain.protocol.frames:
        encode(header, session, sequence, payload) -> buffers, and the headers Challenge, Welcome,
        Open, Opened, Run, Result, Close, Ping, Pong, Error with the fields of docs/protocol.md

Left out: the frame HELLO, which will say more, and the protocol number in a frame (set to zero).

Bits of floating point differ between kinds of processors, so golden/ has one file for each kind.
On a kind without a file everything that is no floating point is compared with any of the files,
and losses are compared within a tolerance. To write the file of the kind at hand, one process:

    BLOCKTRAIN_GOLDEN=record python -m pytest -p no:xdist tests/system/test_golden.py

Only do so when what is computed was meant to change, and look at the difference.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import secrets
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import safetensors.numpy
import torch
from backports import zstd
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from support.command import Command
from support.command import run as run_command

GOLDEN = Path(__file__).parent / "golden"
RECORD = os.environ.get("BLOCKTRAIN_GOLDEN") == "record"
PATIENCE = 300.0  # seconds that anything may take on a busy machine
ROUNDED = 1e-5  # the last digit of result.json
TOLERANCE = 1e-6  # of a loss on another kind of processor (avx2 against avx512: 2e-7)
PROMPT, SEED, LENGTH = "the birch ", 7, 90  # the text goes on past the window of 32
SHAPE = "--layers-per-block 1 --width 16 --heads 2 --context 32 --z-width 8 --batch 4 --seed 3"
TRAINED = "--warmup 2 --learning-rate 0.02 --fusion-learning-rate 0.02"
# Defaults when the values were recorded, of a model and of a coordinator.
EARLIER = "--optimizer adamw --fusion-share 1 --reference-learning-rate 0.002"
WHOLE = "--version-compression none --undefended"
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty")

T = TypeVar("T")
Flat = dict[str, Any]
Json = dict[str, Any]


# --- What is compared ---


def processor_kind() -> str:
    """Processors of one kind give the same bits: maker, family, instructions, and the torch."""
    path = Path("/proc/cpuinfo")
    said = path.read_text() if path.exists() else ""
    found = dict(re.findall(r"^(vendor_id|cpu family|flags|CPU implementer)\s*: (.*)$", said, re.M))
    maker = found.get("vendor_id") or found.get("CPU implementer") or platform.machine()
    flags = found.get("flags", "").split()
    wide = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16") if name in flags]
    used = torch.backends.cpu.get_cpu_capability()
    parts = [maker, found.get("cpu family", "0"), wide[-1] if wide else "plain", used]
    version = torch.__version__.split("+")[0]
    return re.sub(r"[^a-z0-9.-]+", "-", "-".join([*parts, "torch", version]).lower())


@dataclass
class Seen:
    """What one test saw: `exact` holds on every machine, `bits` on one kind, `losses` nearly."""

    exact: Flat = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    bits: Flat = field(default_factory=dict)

    def check(self, name: str) -> None:
        """Compare with the file of this kind of processor, or as far as possible with another."""
        found: Json = json.loads(json.dumps(vars(self)))  # tuples become lists, as in the file
        path = GOLDEN / f"{processor_kind()}.json"
        if RECORD:
            everything = json.loads(path.read_text()) if path.exists() else {}
            everything[name] = found
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
            return
        known = path.exists()
        files = [path] if known else sorted(GOLDEN.glob("*.json"))
        assert files, "there are no golden files at all"
        wanted: Json = json.loads(files[0].read_text())[name]
        differing = [
            f"{part} {key}: {found[part].get(key)!r} instead of {wanted[part].get(key)!r}"
            for part in ("exact", *(("losses", "bits") if known else ()))
            for key in sorted(wanted[part].keys() | found[part].keys())
            if found[part].get(key) != wanted[part].get(key)
        ]
        assert not differing, f"{name}, against {files[0].name}:\n" + "\n".join(differing)
        assert found["losses"] == pytest.approx(wanted["losses"], rel=TOLERANCE, abs=ROUNDED * 1.1)
        assert found["bits"].keys() == wanted["bits"].keys()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- Commands, in processes of their own ---


def environment(folder: Path) -> dict[str, str]:
    """The same arithmetic for every process, a cache of its own, and no network."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("BLOCKTRAIN_")}
    fixed = {
        "BLOCKTRAIN_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "PYTHONHASHSEED": "0",
    }
    return {**kept, **fixed}


def run(folder: Path, *words: str) -> bytes:
    """What a command that ends writes to stdout."""
    done = run_command(words, PATIENCE, cwd=folder, env=environment(folder))
    assert done.returncode == 0, f"{words}: {done.stderr.decode(errors='replace')[-2000:]}"
    return done.stdout


@dataclass
class Staying:
    """A command with --json that stays."""

    process: subprocess.Popen[bytes]
    out: Path

    def said(self) -> Json:
        """Its first line."""

        def line() -> str:
            assert self.process.poll() is None, self.out.with_suffix(".err").read_text()[-2000:]
            first, end, _ = self.out.read_text().partition("\n")
            return first if end else ""

        return dict(json.loads(until(line, f"the first line of {self.out.name}")))


def until(condition: Callable[[], T], what: str) -> T:
    """What the condition finds."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: this did not happen")


@contextmanager
def staying(folder: Path, name: str, *words: str) -> Iterator[Staying]:
    """As long as the block lasts."""
    out = folder / f"{name}.out"
    with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
        process = Command[bytes](
            (*words, "--listen", "127.0.0.1:0", "--json"),
            cwd=folder,
            env=environment(folder),
            stdout=stdout,
            stderr=stderr,
        )
    try:
        yield Staying(process, out)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(url: str, body: bytes | Json | None = None, method: str = "", **headers: str) -> bytes:
    """The answer to a GET, or to a POST or PUT with this body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    content = body
    if body is not None:
        named["Content-Type"] = "application/octet-stream"
    if isinstance(body, dict):
        content, named["Content-Type"] = json.dumps(body).encode(), "application/json"
    method = method or ("GET" if body is None else "POST")
    request = urllib.request.Request(url, content, named, method=method)  # type: ignore[arg-type]
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read()[:500]!r}") from None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a small corpus that can be learned."""
    pick = [WORDS[(n * n * 7 + n // 3) % len(WORDS)] for n in range(2400)]
    verbs = ("meets", "finds")
    lines = [f"the {pick[n]} {verbs[(n // 2) % 2]} the {pick[n + 1]}.\n" for n in range(0, 2400, 2)]
    (tmp_path / "words.txt").write_text("".join(lines))
    return tmp_path


# --- One machine: training, writing, serving ---


def see_training(seen: Seen, folder: Path, *words: str) -> Path:
    """Train, and look at all weights and at the result."""
    place = folder / "trained"
    where = ("--data", "words.txt", "--out", str(place), "--json")
    result = json.loads(run(folder, "train", *SHAPE.split(), *TRAINED.split(), *words, *where))
    assert result == json.loads((place / "result.json").read_text())
    see_weights(seen, place)
    for name in ("corpus", "parameters"):
        seen.exact[name] = result[name]
    seen.losses |= {f"valid_ce {name}": value for name, value in result["valid_ce"].items()}
    if result["gap"] is not None:
        seen.losses["gap"] = result["gap"]
    seen.bits["sample"] = result["sample"]["text"]
    seen.bits["ranges"] = result["ranges"]
    return place


def see_weights(seen: Seen, place: Path) -> None:
    """Every tensor of every block, of the reference, and the weights of the pool."""
    paths = [*place.glob("model/*.safetensors"), *place.glob("reference/*.safetensors")]
    for path in sorted(paths):
        for name, tensor in sorted(safetensors.numpy.load_file(path).items()):
            key = f"{path.parent.name}/{path.name} {name}"
            seen.exact[key] = f"{tensor.dtype} {list(tensor.shape)}"
            seen.bits[key] = sha256(np.ascontiguousarray(tensor).tobytes())
    pool = json.loads((place / "model" / "config.json").read_text())["pool_weights"]
    seen.exact["pool weights"] = None if pool is None else len(pool)
    seen.bits["pool weights"] = pool


Asked = dict[str, str | int]  # the fields of a request, which are also flags of `generate`
PLAIN: Asked = {"mode": "autoregressive"}


def see_texts(seen: Seen, place: Path, asked: Mapping[str, Asked]) -> dict[str, bytes]:
    """What `generate` writes."""

    def written(fields: Asked) -> bytes:
        flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        told = ["--prompt", PROMPT, "--max-tokens", str(LENGTH), "--seed", str(SEED)]
        flags += [*told, "--temperature", "0.8"]
        out = run(place.parent, "generate", str(place), *flags)
        assert out.startswith(PROMPT.encode()) and len(out) >= len(PROMPT) + LENGTH
        return out[len(PROMPT) :][:LENGTH]

    with ThreadPoolExecutor(2) as pool:
        texts = dict(zip(asked, pool.map(written, asked.values()), strict=True))
    for name, text in texts.items():
        seen.bits[f"text {name}"] = text.decode("utf-8", "backslashreplace")
    return texts


def served(place: Path, stages: tuple[str, ...], asked: Mapping[str, Asked]) -> dict[str, str]:
    """What `serve` answers, with its blocks in processes of their own."""
    with ExitStack() as stack:
        hosts = []
        for blocks in stages:
            words = ("stage", str(place), "--blocks", blocks)
            hosts.append(stack.enter_context(staying(place.parent, f"stage{blocks}", *words)))
        route = ",".join(str(host.said()["address"]) for host in hosts)
        flags = ("--route", route, "--no-degraded")
        serving = staying(place.parent, "serve", "serve", str(place), *flags)
        entry = stack.enter_context(serving).said()
        common = {"model": entry["model"], "prompt": PROMPT, "max_tokens": LENGTH, "seed": SEED}
        texts = {}
        for name, fields in asked.items():
            body = {**common, "temperature": 0.8, **fields}
            answer = json.loads(ask(f"{entry['url']}/v1/completions", body))
            assert answer["usage"]["completion_tokens"] == LENGTH
            texts[name] = str(answer["choices"][0]["text"])
        return texts


def assert_same(answers: Mapping[str, str], texts: Mapping[str, bytes]) -> None:
    """An answer is text: bytes that are none are replaced in it."""
    assert answers == {name: text.decode("utf-8", "replace") for name, text in texts.items()}


def test_a_fused_model_with_its_reference_served_as_a_fan(folder: Path) -> None:
    seen = Seen()
    words = f"--blocks 3 --steps 30 --reference {EARLIER}"
    place = see_training(seen, folder, *words.split())
    sweeps: dict[str, Asked] = {f"sweep {k}": {"mode": "sweep", "sweeps": k} for k in (1, 2)}
    texts = see_texts(seen, place, {"plain": PLAIN, **sweeps})
    asked = {"plain": PLAIN, **sweeps, "exact": Asked(mode="exact")}
    assert_same(served(place, ("1", "2"), asked), {**texts, "exact": texts["plain"]})
    seen.check("fuse")


def test_a_pool_that_writes_from_noise(folder: Path) -> None:
    seen = Seen()
    words = "--blocks 2 --steps 20 --objective denoise --compose pool --tail 8 --optimizer muon"
    place = see_training(seen, folder, *words.split())
    noise: Asked = {"mode": "sweep", "sweeps": 1, "draft": "none"}
    drafted: Asked = {"mode": "sweep", "sweeps": 2, "draft": "first-block"}
    see_texts(seen, place, {"plain": PLAIN, "noise": noise, "drafted": drafted})
    seen.check("pool")


def test_the_paper_served_as_a_ring(folder: Path) -> None:
    seen = Seen()
    words = f"--preset paper --blocks 2 --steps 20 --tail 8 --start noise {EARLIER}"
    place = see_training(seen, folder, *words.split())
    sweep: Asked = {"mode": "sweep", "draft": "none"}
    noise: dict[str, Asked] = {f"noise {k}": {**sweep, "sweeps": k} for k in (1, 2)}
    texts = see_texts(seen, place, {"plain": PLAIN, **noise})
    assert_same(served(place, ("1", "2"), {"plain": PLAIN, **noise}), texts)
    seen.check("euler")


# --- A run over HTTP ---


@contextmanager
def coordinating(folder: Path, name: str, *words: str) -> Iterator[str]:
    """The address of a coordinator of a new run in folder/name."""
    where = ("--data", "words.txt", "--out", name, "--score-bytes", "0")
    with staying(folder, name, "coordinator", *SHAPE.split(), *where, *words) as coordinator:
        url = str(coordinator.said()["url"])
        until(lambda: json.loads(ask(f"{url}/healthz"))["ready"], "a prepared run")
        yield url


def ledger(url: str) -> list[tuple[str, Json]]:
    """All entries, as (kind, body)."""
    entries: list[Json] = []
    while page := json.loads(ask(f"{url}/v1/ledger?after={len(entries)}"))["entries"]:
        entries += page
    return [(entry["kind"], json.loads(entry["body"])) for entry in entries]


def see_ledger(seen: Seen, entries: list[tuple[str, Json]]) -> None:
    """Every update and every version, in order."""
    first = entries[0][1]
    seen.bits["start"] = [[one["block"], one["weights"]["sha256"]] for one in first["blocks"]]
    updates = [body for kind, body in entries if kind == "update"]
    versions = [body for kind, body in entries if kind == "version"]
    for number, body in enumerate(updates):
        said, order = body["submission"], body["order"]
        names = ("task", "number", "block", "base", "seed", "start_step", "compression")
        told = {name: order[name] for name in (*names, "position", "shards")}
        told |= {name: said[name] for name in ("steps", "tokens", "continued")}
        pins = [[pin["block"], pin["version"]] for pin in order["features"]]
        seen.exact[f"update {number}"] = {**told, "features": pins}
        seen.bits[f"update {number}"] = [said["payload_sha256"], said["payload_length"]]
        for name in ("loss_before", "loss_after"):
            seen.losses[f"update {number} {name}"] = said[name]
    for number, body in enumerate(versions):
        shares = [round(part["share"], 12) for part in body["parts"]]
        seen.exact[f"version {number}"] = [body["block"], body["version"], sorted(shares)]
        momentum = body["momentum"] and body["momentum"]["sha256"]
        parts = [[part["share"], part["scale"]] for part in body["parts"]]
        seen.bits[f"version {number}"] = [body["weights"]["sha256"], momentum, parts]


def assert_sound(folder: Path, name: str) -> None:
    """`audit` recomputes every version."""
    found = json.loads(run(folder, "audit", name, "--json"))
    assert found["ok"] and not found["findings"]


@pytest.mark.parametrize("compression", ["int4", "none"])
def test_a_run_of_a_coordinator_and_a_worker(folder: Path, compression: str) -> None:
    """With --exclusive and one worker nothing depends on time."""
    seen = Seen()
    words = f"--blocks 3 --steps 8 --exclusive --task-steps 4 --compression {compression} {TRAINED}"
    words += f" {WHOLE} {EARLIER}"
    with coordinating(folder, "shared", *words.split()) as url:
        run(folder, "worker", url, "--cache", "worker", "--device", "cpu", "--json")
        state = json.loads(ask(f"{url}/healthz"))
        assert state["finished"]
        see_ledger(seen, ledger(url))
    assert_sound(folder, "shared")
    seen.check(f"network {compression}")


@dataclass
class Hand:
    """A worker that trains nothing: it sends what it is told to, when it is told to."""

    url: str
    letter: str
    joined: Json = field(default_factory=dict)
    next: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.key = Ed25519PrivateKey.from_private_bytes(self.letter.encode() * 32)
        self.public = self.key.public_key().public_bytes_raw()
        self.id = sha256(self.public)[:32]
        self.protocol = int(json.loads(ask(f"{self.url}/v1/run"))["protocol"])

    def call(self, path: str, kind: str, **fields: Any) -> Json:
        """A signed message, and its answer."""
        message = {**fields, "nonce": secrets.token_hex(16)}
        text = json.dumps(message, sort_keys=True, separators=(",", ":"))
        signed = self.key.sign(f"blocktrain {self.protocol} {kind}\n{text}".encode())
        return dict(json.loads(ask(self.url + path, {**message, "signature": signed.hex()})))

    def join(self) -> None:
        """Of unknown speed, so that nobody is told to wait for others."""
        own = {"protocol": self.protocol, "public_key": self.public.hex(), "name": self.letter}
        machine = {"device": "cpu", "memory": 0, "speed": 0.0, "held": None, "time": 0}
        self.joined = self.call("/v1/join", "Join", **own, **machine)
        self.next = self.joined["next"]

    def task(self) -> Json:
        """The task that it has, or asks for."""

        def given() -> Json:
            if self.next["kind"] == "task":
                return self.next
            names = {name: self.joined[name] for name in ("run", "worker", "fingerprint")}
            more = {"held": None, "speed": 0.0, "leaving": False}
            self.next = self.call("/v1/tasks", "TaskRequest", **names, **more)["next"]
            return self.next if self.next["kind"] == "task" else {}

        return until(given, f"a task for {self.letter}")

    def send(self, size: float) -> Json:
        """A change of this size in every weight, as its task wants it; the receipt."""
        task = self.task()
        base = safetensors.numpy.load(ask(f"{self.url}/v1/blobs/{task['weights']['sha256']}"))
        factor, seed = np.float32(size), task["task"]
        delta = {name: exact_numbers(t.shape, seed) * factor for name, t in base.items()}
        payload = look_up("compress")(delta, None, task["compression"])[0]
        most = task["chunk_bytes"]
        chunks = [payload[at : at + most] for at in range(0, len(payload), most)]
        for index, chunk in enumerate(chunks):
            place = f"{self.url}/v1/uploads/{task['task']}/{index}"
            ticket = {"BlockTrain_Ticket": task["ticket"], "BlockTrain_SHA256": sha256(chunk)}
            ask(place, chunk, "PUT", **ticket)
        reply = self.call(
            "/v1/updates",
            "Submission",
            **{name: self.joined[name] for name in ("run", "worker")},
            **{name: task[name] for name in ("task", "fence", "block", "base", "steps")},
            payload_sha256=sha256(payload),
            payload_length=len(payload),
            chunks=len(chunks),
            tokens=task["steps"] * 4 * 32,  # batch and context of SHAPE
            loss_before=3.0,
            loss_after=2.5,
            seconds=0.0,
            continued={"optimizer": None, "residual": None},
            lineage="6a" * 32,
            time=0,
        )
        self.next = reply["next"]
        return dict(reply["receipt"])


SCRIPT = "ab ab cb ac ab ca"  # who answers in which round: every round has two updates
SIZES = {5: 40.0, 8: 0.25}  # the update that is much too long, and one that is short


@dataclass
class Played:
    """What came of the script, and whether all went in the order of the script."""

    entries: list[tuple[str, Json]]
    receipts: list[list[Any]]
    in_order: bool


def play(folder: Path, name: str, outer: str) -> Played:
    """Rounds of two by three workers, updates that are late, and one that is clipped."""
    words = "--compose pool --blocks 1 --steps 60 --task-steps 2 --replicas 2 --min-replicas 2"
    words += (
        f" --rounds 6 --compression int8 --clip-after 2 --first-deadline 3600 {WHOLE} {EARLIER}"
    )
    words += f" --chunk-bytes 4096 --outer {outer}"
    receipts, early = [], False
    with coordinating(folder, name, *words.split()) as url:
        hands = {letter: Hand(url, letter) for letter in "abc"}
        for hand in hands.values():
            hand.join()
        number = 0
        for version, letters in enumerate(SCRIPT.split(), 1):
            for letter in letters:
                said = hands[letter].send(SIZES.get(number, 1.0))
                kept = ("accepted", "code", "task", "fence", "base", "staleness", "weight")
                receipts.append([letter, *(said[name] for name in kept)])
                number += 1

            def made(version: int = version) -> bool:
                blocks = json.loads(ask(f"{url}/v1/run"))["blocks"]
                return bool(blocks[0]["version"] >= version)

            early |= hands[letters[-1]].next["kind"] == "task"  # before others asked
            until(made, f"version {version}")
        entries = ledger(url)
    slow = {"expire", "round"} & {kind for kind, _ in entries}
    return Played(entries, receipts, not (early or slow))


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_rounds_of_several_updates(folder: Path, outer: str) -> None:
    """A round has two seconds at least: where the machine was busier than that, play it again."""
    for attempt in range(8):
        played = play(folder, f"rounds{attempt}", outer)
        if played.in_order:
            break
    seen = Seen(exact={"receipts": played.receipts})
    see_ledger(seen, played.entries)
    assert_sound(folder, f"rounds{attempt}")
    seen.check(f"rounds {outer}")


# --- Bytes of exact inputs ---


def look_up(name: str) -> Any:
    """A public function of the codec, in whichever module it is now."""
    for module in ("compression", "tensors", "codec"):
        try:
            found = getattr(importlib.import_module(f"blocktrain.protocol.{module}"), name, None)
        except ModuleNotFoundError:
            continue
        if found is not None:
            return found
    raise AssertionError(f"no module of blocktrain.protocol has {name}")


def exact_numbers(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Multiples of 2**-14 below 2**-4, the same on every machine."""
    count = int(np.prod(shape, dtype=np.int64))
    drawn = (np.arange(count, dtype=np.int64) * 7919 + seed * 104729 + 12345) % 2039
    return ((drawn - 1019).astype(np.float32) / np.float32(2**14)).reshape(shape)


TENSORS = {
    "b.weight": exact_numbers((3, 129), 1),
    "a.bias": exact_numbers((5,), 2) * np.float32(2**-20),
    "c.none": np.zeros((2, 2), np.float32),
    "d.empty": np.zeros((0, 3), np.float32),
    "e.one": np.array([[40.5]], np.float32),
}


def test_updates_as_bytes() -> None:
    seen = Seen()
    compress = look_up("compress")

    def see(name: str, payload: bytes) -> None:
        raw = zstd.decompress(payload)
        seen.exact[name] = [len(raw), sha256(raw)]
        seen.bits[name] = [len(payload), sha256(payload)]  # of one version of zstd

    for method in ("none", "fp16", "int8", "int4"):
        payload, residual = compress(TENSORS, None, method)
        see(f"{method} first", payload)
        left = [[name, sha256(residual[name].tobytes())] for name in sorted(residual)]
        seen.exact[f"{method} residual"] = left
        see(f"{method} second", compress(TENSORS, residual, method)[0])
    see("weights", look_up("compress_weights")(TENSORS))
    packed = look_up("pack")(TENSORS)
    seen.exact["packed"] = [len(packed), sha256(packed)]
    small = {"a": np.array([[0.001953125, -7.0]], np.float32)}
    small["b"] = np.array([1.0, -0.5, 0.25], np.float32)
    seen.exact["of the document"] = zstd.decompress(compress(small, None, "int8")[0]).hex()
    seen.check("codec")


def test_frames_as_bytes() -> None:
    frames: Any = importlib.import_module("blocktrain.protocol.frames")
    welcome = {"proof": bytes(32), "kind": "blocks", "blocks": (2, 3), "width": 128}
    welcome |= {"context": 129, "z_width": 64, "fingerprint": "ab" * 32, "model": "cd" * 32}
    opened = {"topology": "ring", "wire": "fp16", "width": 64, "most": 128}
    result = {"epoch": 3, "start": 44, "count": 1, "queue": 2, "microseconds": 1500}
    headers: list[tuple[str, Json, list[bytes]]] = [
        ("Challenge", {"nonce": bytes(range(32))}, []),
        ("Welcome", welcome, []),
        ("Open", {"topology": "fan", "wire": "fp32", "width": 96, "most": 128}, []),
        ("Open", {**opened, "next": "127.0.0.1:8481", "blocks": (2,)}, []),
        ("Opened", {"blocks": (2, 3), "width": 128}, []),
        ("Run", {"epoch": 3, "start": 40, "count": 5, "wanted": 1}, [b"hello"]),
        ("Run", {"epoch": 1 << 40, "start": 0, "count": 2, "tail": 300}, [bytes(16), b"ab"]),
        ("Result", result, [np.array([1.5, -2.0], "<f4").tobytes()]),
        ("Close", {}, []),
        ("Ping", {"stamp": (1 << 53) - 1}, []),
        ("Pong", {"stamp": 7, "queue": 70000}, []),
        ("Error", {"code": "too_large", "sentence": "no"}, []),
    ]
    seen = Seen()
    for number, (kind, fields, payload) in enumerate(headers):
        header = getattr(frames, kind)(**fields)
        sent = b"".join(frames.encode(header, 0x1122334455667788, 9 + number, payload))
        seen.exact[f"{number} {kind}"] = (sent[:4] + b"\0\0" + sent[6:]).hex()
    seen.check("frames")
