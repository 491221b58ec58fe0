"""`blocktrain doctor` names the fix.

Against real coordinators, other services on their ports, wrong clocks, full disks, damaged files.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme

from blocktrain.config import make_config
from blocktrain.footprint import worker_memory
from blocktrain.units import amount
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.web.client import HttpClient
from blocktrain.worker.doctor import diagnosis, doctor, probes
from blocktrain.worker.doctor.diagnosis import CheckResult, CoordinatorAddress, HttpAnswer
from blocktrain.worker.doctor.doctor import DoctorOptions, examine
from support.command import environment
from support.fake_worker import TOKEN, begin, beginning, prepared
from support.waiting import PATIENCE

LINE = ["address", "port", "tls", "coordinator"]
RUN = ["token", "protocol", "fingerprint", "signature", "clock", "round_trip", "download", "upload"]
WITH_URL = ["python", "torch", "device", *LINE, *RUN, "memory", "disk", "corpus", "speed"]


PATIENT_DOCTOR = """
from blocktrain.worker.doctor import doctor, probes
doctor.LIMIT, probes.TIMEOUT = 200.0, 60.0
from blocktrain.cli.app import main
main()
"""


def found(folder: Path, url: str = "", **more: Any) -> dict[str, CheckResult]:
    """All checks by name; the worker's folder does not exist before its first start."""
    return {
        check.name: check
        for check in examine(DoctorOptions(folder / "cache", url, **{"device": "cpu", **more}))
    }


def command(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`blocktrain doctor` with the right token, in a process that has time."""
    words = [sys.executable, "-c", PATIENT_DOCTOR, "doctor", *arguments]
    env = environment(folder, BLOCKTRAIN_TOKEN=TOKEN, **more)
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


def failures(checks: dict[str, CheckResult]) -> list[str]:
    assert all(check.fix for check in checks.values() if check.state in ("warning", "failed"))
    return [name for name, check in checks.items() if check.state == "failed"]


def require_failure(checks: dict[str, CheckResult], name: str, says: str, fix: str) -> None:
    """This and nothing else fails, in these words."""
    assert failures(checks) == [name], [
        check for check in checks.values() if check.state == "failed"
    ]
    assert re.search(says, checks[name].found), checks[name]
    assert re.search(fix, checks[name].fix), checks[name]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of a test may be busy with something else."""
    monkeypatch.setattr(doctor, "LIMIT", 200.0)
    monkeypatch.setattr(probes, "TIMEOUT", 60.0)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a coordinator that wants a token."""
    with (
        beginning(tmp_path_factory.mktemp("run")) as coordinator,
        serve_coordinator(coordinator, Listen(token=TOKEN)) as url,
    ):
        yield url


@contextmanager
def coordinator_process(folder: Path, before: str) -> Iterator[str]:
    """A coordinator in a process of its own that first does something to itself; its address."""
    begin(folder / "run").close()  # prepared: the process needs no torch
    script = f"{before}\nfrom blocktrain.cli.app import main\nmain()"
    arguments = ["coordinator", "--out", str(folder / "run"), "--listen", "127.0.0.1:0", "--json"]
    with (folder / "err").open("w") as errors:
        command = [sys.executable, "-c", script, *arguments]
        process = subprocess.Popen(
            command, env=environment(folder), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "err").read_text()
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        process.communicate(timeout=180)


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def answering(
    status: int, headers: dict[str, str], body: bytes = b""
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def rewriting(url: str, change: Callable[[bytes], bytes]) -> type[BaseHTTPRequestHandler]:
    """Between a worker and a coordinator: passes calls on, and changes the manifest."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {
                name: self.headers[name]
                for name in ("Authorization", "Range")
                if name in self.headers
            }
            answer = httpx2.get(url + self.path, headers=headers, timeout=PATIENCE)
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(change(answer.content) if self.path == "/v1/run" else answer.content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def listening(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """A port where somebody says something, or nothing, to whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    return  # the test is over
                with suppress(OSError):  # who came has left
                    speak(kept[-1])

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in kept:
                connection.close()


# Nothing is wrong


def test_a_machine_that_can_join(here: str, tmp_path: Path) -> None:
    checks = found(tmp_path, here, token=TOKEN, data=str(prepared() / "corpus"))
    assert list(checks) == [*WITH_URL[:-1], "data", "speed"]
    assert {name for name, check in checks.items() if check.state != "ok"} == {"upload"}
    assert "a step of block 1: tasks of 2 steps" in checks["speed"].found
    assert "a worker fetches those that its tasks name" in checks["corpus"].found
    assert not (tmp_path / "cache").exists()  # it leaves nothing behind
    assert len(HttpClient(here, TOKEN).status().workers) == 0


def test_without_an_address_only_this_machine(tmp_path: Path) -> None:
    checks = found(tmp_path, data="words.txt")
    assert list(checks) == ["python", "torch", "device", "memory", "disk", "data"]
    assert not failures(checks) and checks["data"].state == "skipped"


def test_the_command_as_json(here: str, tmp_path: Path) -> None:
    good = command(tmp_path, here, "--json")
    assert good.returncode == 0, good.stdout + good.stderr
    value = json.loads(good.stdout)
    assert value["ok"] is True and [check["name"] for check in value["checks"]] == WITH_URL
    assert all(set(check) == {"name", "state", "found", "fix"} for check in value["checks"])


# The line


def test_coordinator_is_down(tmp_path: Path) -> None:
    with (
        beginning(tmp_path / "run") as coordinator,
        serve_coordinator(coordinator, Listen()) as url,
    ):
        pass
    checks = found(tmp_path, url)
    require_failure(
        checks,
        "port",
        f"nothing listens on port {url.rsplit(':')[-1]}",
        "start the coordinator there, or use the address",
    )
    assert {checks[name].found for name in ("tls", "token", "clock", "speed")} == {
        "cannot be checked while `port` fails"
    }
    assert checks["memory"].state == checks["disk"].state == "ok"


def test_wrong_port_of_another_service(tmp_path: Path) -> None:
    with http_server(SimpleHTTPRequestHandler) as url:
        checks = found(tmp_path, url)
    says = f"another service answers on port {url.rsplit(':')[-1]} .HTTP 404, SimpleHTTP"
    require_failure(
        checks,
        "coordinator",
        says,
        "the join command that the coordinator printed: host or port is another",
    )
    with listening(greet) as url:
        require_failure(
            found(tmp_path, url), "coordinator", "another service .*not HTTP", "join command"
        )


def greet(connection: socket.socket) -> None:
    """As a server of another protocol does."""
    with connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        connection.recv(1000)


def test_servers_in_front(tmp_path: Path) -> None:
    with http_server(answering(502, {})) as url:
        require_failure(
            found(tmp_path, url),
            "coordinator",
            "a server before it answers 502",
            "start the coordinator behind",
        )
    with http_server(answering(308, {"Location": "https://elsewhere.invalid/"})) as url:
        require_failure(
            found(tmp_path, url), "coordinator", "another address", "try https://elsewhere.invalid/"
        )


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TIMEOUT", 0.5)
    with listening(lambda _: None) as url:
        require_failure(
            found(tmp_path, url),
            "coordinator",
            "takes connections, but has not answered",
            "may be overloaded or hang",
        )
        checks = found(tmp_path, url.replace("http:", "https:"))
        require_failure(checks, "tls", "does not speak TLS", f"use {url}")


def test_a_check_that_hangs_ends_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIMIT", 0.5)
    with listening(lambda _: None) as url:
        checks = found(tmp_path, url)
    assert list(checks) == WITH_URL
    (stuck,) = failures(
        checks
    )  # tls waits for an answer; on a busy machine one before it may take as long
    require_failure(checks, stuck, "has not ended in time", "hangs or is too slow")
    assert WITH_URL.index(stuck) <= WITH_URL.index("tls")
    assert {checks[name].found for name in WITH_URL[WITH_URL.index(stuck) + 1 :]} == {
        f"`{stuck}` took all the time"
    }
    assert (
        diagnosis.judge_timeout("speed").state == "warning"
    )  # a slow machine is no reason not to join


def test_addresses_that_lead_nowhere(tmp_path: Path) -> None:
    require_failure(
        found(tmp_path, "http://nowhere.invalid:8470"),
        "address",
        "nowhere.invalid has no address",
        "check its spelling",
    )
    require_failure(
        found(tmp_path, "127.0.0.1:8470"),
        "address",
        "is not the address of a coordinator",
        "looks like http://host:port",
    )
    place = CoordinatorAddress.parse("http://far.example:8470")
    assert "firewall" in diagnosis.judge_port(place, TimeoutError()).fix
    assert "online" in diagnosis.judge_port(place, OSError(113, "No route to host")).fix


# TLS


@contextmanager
def secure(
    folder: Path, authority: trustme.CA, certificate: trustme.LeafCert
) -> Iterator[tuple[str, Path]]:
    """A coordinator by https; its address and the file that --ca names."""
    files = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    parts = (authority.cert_pem, certificate.cert_chain_pems[0], certificate.private_key_pem)
    for path, part in zip(files, parts, strict=True):
        part.write_to_path(str(path))
    with (
        beginning(folder / "run") as coordinator,
        serve_coordinator(coordinator, Listen(certificate=files[1], key=files[2])) as url,
    ):
        yield url, files[0]


def test_certificates_of_their_own_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    with secure(tmp_path, authority, authority.issue_cert("127.0.0.1")) as (url, ca):
        checks = found(tmp_path, url, ca=ca)
        assert not failures(checks) and re.search(
            r"TLSv1.3, .* is trusted until \d{4}-", checks["tls"].found
        )
        checks = found(tmp_path, url)
        require_failure(
            checks, "tls", "is not accepted: unable to get local issuer", "--ca FILE.pem"
        )
        assert checks["token"].state == "skipped"  # it is not shown to strangers
        trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
        require_failure(
            found(tmp_path, url, ca=tmp_path / "other.pem"),
            "tls",
            "not accepted",
            "other.pem has not signed it",
        )
        require_failure(
            found(tmp_path, url, ca=tmp_path / "none.pem"),
            "address",
            "cannot use the certificate",
            "name a PEM file",
        )
        require_failure(
            found(tmp_path, url.replace("https", "http")),
            "tls",
            "speaks TLS, and the address says http",
            f"use {url}",
        )


def test_certificates_of_another_time_or_name(tmp_path: Path) -> None:
    authority, now = trustme.CA(), datetime.now(UTC)
    for name, days, says, fix in (
        ("127.0.0.1", -1, "certificate has expired", "renew the coordinator's certificate"),
        (
            "elsewhere.example",
            90,
            "IP address mismatch",
            "use the name that the certificate was made for",
        ),
        ("127.0.0.1", 3, "", ""),
    ):
        certificate = authority.issue_cert(
            name, not_before=now - timedelta(days=30), not_after=now + timedelta(days=days)
        )
        folder = tmp_path / f"{name}{days}"
        folder.mkdir()
        with secure(folder, authority, certificate) as (url, ca):
            checks = found(folder, url, ca=ca)
        if says:
            require_failure(checks, "tls", says, fix)
        else:
            assert (
                not failures(checks)
                and checks["tls"].state == "warning"
                and "renew" in checks["tls"].fix
            )


def test_https_against_http(here: str, tmp_path: Path) -> None:
    checks = found(tmp_path, here.replace("http:", "https:"), token=TOKEN)
    require_failure(
        checks, "tls", "does not speak TLS", f"use {here}, or start the coordinator with --tls"
    )


def test_a_token_that_travels_readable() -> None:
    place = CoordinatorAddress.parse("http://far.example")
    assert diagnosis.judge_plain(place, secret=True, near=place.near).state == "warning"
    assert diagnosis.judge_plain(place, secret=False, near=place.near).state == "ok"
    assert (
        CoordinatorAddress.parse("https://[::1]:9/train/").url() == "https://[::1]:9/train"
        and CoordinatorAddress.parse("http://[::1]:9").near
    )


# The run


def test_wrong_token(here: str, tmp_path: Path) -> None:
    missing, wrong = found(tmp_path, here), found(tmp_path, here, token="guess")
    require_failure(missing, "token", "wants a token", "--token SECRET .* join command")
    require_failure(wrong, "token", "does not know this token", "--token SECRET .* join command")
    assert wrong["clock"].state == wrong["round_trip"].state == "ok"  # they need none
    assert wrong["speed"].found == "cannot be checked while `token` fails"


def test_an_old_protocol_number(here: str, tmp_path: Path) -> None:
    older = rewriting(here, lambda body: body.replace(b'"protocol":3', b'"protocol":0'))
    with http_server(older) as url:
        checks = found(tmp_path, url, token=TOKEN)
    says = "the coordinator speaks protocol 0, this version 3"
    require_failure(
        checks,
        "protocol",
        says,
        "update blocktrain on the coordinator's machine, or install its older version here",
    )
    assert (
        checks["signature"].state == "skipped"
        and checks["fingerprint"].state == checks["speed"].state == "ok"
    )


def test_a_manifest_that_only_a_newer_version_can_read(here: str, tmp_path: Path) -> None:
    newer = rewriting(
        here, lambda body: body.replace(b'"protocol":3', b'"protocol":7,"colour":"green"')
    )
    with http_server(newer) as url:
        checks = found(tmp_path, url, token=TOKEN)
    require_failure(checks, "protocol", "speaks protocol 7", "update blocktrain on this machine")
    assert (
        checks["corpus"].state == "skipped" and checks["clock"].state == "ok"
    )  # by the date of an answer


def test_answers_that_were_changed_on_the_way(here: str, tmp_path: Path) -> None:
    with http_server(
        rewriting(here, lambda body: body.replace(b'"finished":false', b'"finished":true'))
    ) as url:
        require_failure(
            found(tmp_path, url, token=TOKEN),
            "signature",
            "not signed by the key",
            "connect to the coordinator itself",
        )
    with http_server(
        rewriting(here, lambda body: body.replace(b'"width":16', b'"width":32'))
    ) as url:
        checks = found(tmp_path, url, token=TOKEN)
    assert failures(checks) == ["fingerprint", "signature"]
    assert "install the coordinator's version" in checks["fingerprint"].fix


def test_another_coordinator_of_the_same_run(here: str, tmp_path: Path) -> None:
    known = tmp_path / "cache" / "runs" / HttpClient(here, TOKEN).manifest().run / "coordinator.key"
    known.parent.mkdir(parents=True)
    known.write_text("ab" * 32)
    require_failure(
        found(tmp_path, here, token=TOKEN), "signature", re.escape(str(known)), "delete that file"
    )


def test_a_run_that_is_not_there_yet_and_one_that_is_over(tmp_path: Path) -> None:
    from blocktrain.watch.server import open_coordinator

    coordinator = open_coordinator(tmp_path / "empty")
    try:
        with serve_coordinator(coordinator, Listen()) as url:
            checks = found(tmp_path, url)
    finally:
        coordinator.close()
    assert not failures(checks) and checks["coordinator"].found == "it is still preparing the run"
    assert checks["fingerprint"].found == "there is no run yet"
    over = HttpAnswer(200, {}, b'{"ok": true, "ready": true, "finished": true}', 0.0, 0.0)
    assert (
        "blocktrain pull"
        in diagnosis.judge_health(CoordinatorAddress.parse("http://here"), over).fix
    )


def test_clock_is_off_by_an_hour(tmp_path: Path) -> None:
    with coordinator_process(
        tmp_path, "import time\nnow = time.time\ntime.time = lambda: now() + 3600"
    ) as url:
        checks = found(tmp_path, url)
    require_failure(
        checks,
        "clock",
        "this clock is 60 min behind the coordinator's",
        "timedatectl set-ntp true.*expire by it",
    )
    assert "60 min ahead of" in diagnosis.judge_clock(-3600.0, 0.1).found


def test_what_a_clock_is_judged_by() -> None:
    assert [
        diagnosis.judge_clock(skew, 0.1).state for skew in (0.0, -59.0, 61.0, -299.0, 301.0)
    ] == ["ok"] * 2 + ["warning"] * 2 + ["failed"]
    answer = HttpAnswer(200, {"date": "Thu, 01 Jan 2026 00:00:10 GMT"}, b"", 1767225600.0, 2.0)
    assert diagnosis.clock_skew(answer, 1767225601_000) == 0.0
    assert diagnosis.clock_skew(answer, None) == 9.5  # in the middle of that second
    assert diagnosis.clock_skew(HttpAnswer(200, {"date": "noon"}, b"", 0.0, 0.0), None) is None


# This machine


def test_too_little_memory_for_a_block(here: str, tmp_path: Path) -> None:
    checks = found(tmp_path, here, token=TOKEN, memory="100kB")
    require_failure(
        checks,
        "memory",
        "100 kB allowed by --memory.*training block 1 takes about",
        "allow more with --memory",
    )
    assert checks["speed"].found == "cannot be checked while `memory` fails"
    require_failure(
        found(tmp_path, memory="much"),
        "memory",
        "'much' is not an amount of bytes",
        "write it like 8GB",
    )


def test_memory_of_the_largest_block() -> None:
    config = make_config({"blocks": 4})
    needed = {"block 1": worker_memory(config, 1), "the fusion block": worker_memory(config, 4)}
    between = (needed["block 1"] + needed["the fusion block"]) // 2
    assert (
        "training the fusion block"
        in diagnosis.judge_memory(between, between, needed, is_option=True).found
    )
    assert diagnosis.judge_memory(between, between, needed, is_option=False).fix.startswith(
        "use a machine with more memory"
    )
    assert diagnosis.judge_memory(10**12, between, needed, is_option=False).state == "warning"
    assert diagnosis.judge_memory(10**12, 10**12, needed, is_option=False).state == "ok"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    require_failure(
        found(tmp_path),
        "disk",
        f"cannot write into {tmp_path / 'cache'}: Not a directory",
        "make it writable, or .*--cache",
    )


def test_a_write_that_the_kernel_refuses(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        checks = found(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    require_failure(
        checks,
        "disk",
        "cannot write into .*: File too large",
        "free space on that disk, or .*--cache",
    )


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mount"), reason="needs root to mount a small disk"
)
def test_full_disk(here: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)],
        check=False,
        capture_output=True,
    ).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        checks = found(disk, here, token=TOKEN)
        require_failure(
            checks,
            "disk",
            "524 kB free .* this run needs about",
            r"free \d+ kB on that disk, or .*--cache",
        )
        (disk / "rest").write_bytes(bytes(512 << 10))
        require_failure(
            found(disk),
            "disk",
            "No space left on device",
            "free space on that disk, or name another folder with --cache",
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_a_disk_is_judged_by(tmp_path: Path) -> None:
    assert diagnosis.judge_disk(tmp_path, 10**10, 0).state == "ok"
    assert diagnosis.judge_disk(tmp_path, 10**8, 0).state == "warning"
    assert diagnosis.judge_disk(tmp_path, 10**8, 10**8).state == "ok"
    assert diagnosis.judge_disk(tmp_path, 10**8, 10**9).fix.startswith("free 900 MB on that disk")


def test_a_damaged_copy_of_the_corpus(here: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "shards"
    shutil.copytree(prepared() / "corpus" / "shards", folder)
    right = found(tmp_path, here, token=TOKEN)["corpus"].found
    assert "3 are in the cache, the last one has its hash" in right
    copy = max(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    with copy.open("r+b") as file:
        file.write(b"?")
    checks = found(tmp_path, here, token=TOKEN)
    require_failure(
        checks,
        "corpus",
        "in the cache is damaged",
        f"delete {copy}; the worker then fetches it again",
    )


def test_a_corpus_with_another_hash(here: str, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("some other text\n" * 500)
    checks = found(tmp_path, here, token=TOKEN, data=str(tmp_path / "mine.txt"))
    require_failure(
        checks,
        "data",
        "is not the corpus of the run .words.: its shards have other hashes",
        "start a coordinator with --data",
    )
    checks = found(tmp_path, here, token=TOKEN, data="no-such-file")
    require_failure(checks, "data", "no corpus 'no-such-file'", "correct that")


def test_a_torch_that_does_not_load(here: str, tmp_path: Path) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    source = Path(doctor.__file__).parents[3]
    said = command(tmp_path, here, PYTHONPATH=f"{tmp_path / 'broken'}{os.pathsep}{source}")
    assert said.returncode == 2 and said.stderr.endswith(
        "blocktrain: a check failed; the lines above say how to fix it\n"
    )
    assert re.search(
        r"^failed   torch        cannot be imported .*\n {22}install torch again",
        said.stdout,
        re.MULTILINE,
    )
    assert re.search(
        r"^ok       round_trip   [0-9.]+ ms", said.stdout, re.MULTILINE
    )  # one failure does not hide the others
    paths = f"{tmp_path / 'broken'}{os.pathsep}{source}"
    done = command(tmp_path, here, "--json", PYTHONPATH=paths)
    assert done.returncode == 2 and json.loads(done.stdout)["ok"] is False, done.stderr
    checks = {check["name"]: CheckResult(**check) for check in json.loads(done.stdout)["checks"]}
    require_failure(checks, "torch", "cannot be imported .*libcudart.so.12", "install torch again")
    assert {name for name, check in checks.items() if check.state == "skipped"} == {
        "device",
        "memory",
        "speed",
        "upload",
    }


def test_versions_and_devices(tmp_path: Path) -> None:
    assert (
        diagnosis.judge_python((3, 10, 4)).state == "failed"
        and diagnosis.judge_python((3, 13, 0)).state == "ok"
    )
    assert [diagnosis.judge_torch(v).state for v in ("2.5.1", "2.6.0+cpu", "2.13.0", "3.0.0")] == [
        "failed",
        "ok",
        "ok",
        "failed",
    ]
    require_failure(
        found(tmp_path, device="cuda:7"), "device", "sees no CUDA device", "use --device cpu"
    )


def test_what_figures_are_judged_by() -> None:
    assert diagnosis.judge_round_trip([0.08, 0.09, 5.0]) == CheckResult(
        "round_trip", "ok", "90.0 ms (median of 3)"
    )
    assert diagnosis.judge_round_trip([3.0]).state == "warning"
    assert (
        diagnosis.judge_download(16 * 10**6, 2.0, 80 * 10**6).found
        == "8 MB/s; a shard of 80 MB takes 10 s"
    )
    assert diagnosis.judge_download(10**6, 2.0, 10**9).state == "warning"
    assert diagnosis.judge_download(10**4, 2.0, 10**9).state == "failed"
    assert "too few bytes" in diagnosis.judge_download(6 * 10**4, 0.01, 6 * 10**4).found
    assert (
        diagnosis.judge_speed(0.1, 20.0, None, 60.0).found
        == "100 ms a step of block 1: about 200 steps, 20 s each"
    )
    assert "even one step takes longer" in diagnosis.judge_speed(30.0, 20.0, None, 60.0).fix
    assert "a round lasts 60 s" in diagnosis.judge_speed(1.0, 20.0, 100, 60.0).fix
    assert "does not say" in diagnosis.judge_speed(1.0, 0.0, None, 0.0).found
    assert [amount(n) for n in (5, 999.6, 123456, 2.5e9, 7e13)] == [
        "5 B",
        "1 kB",
        "123 kB",
        "2.5 GB",
        "70 TB",
    ]
