"""What `blocktrain doctor` says: each result, whether it is good, and how to fix it. Pure."""

from __future__ import annotations

import errno
import ipaddress
import json
import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.protocol.messages import PROTOCOL, Refusal
from blocktrain.protocol.refusals import Code
from blocktrain.units import amount

CheckState = Literal["ok", "warning", "failed", "skipped"]

PYTHON = (3, 11)
TORCH = (2, 6)
CLOCK_WARNS, CLOCK_FAILS = 60.0, 300.0  # seconds
LITTLE_SPACE = 10**9  # bytes, for a run that is not known
SLOW_ANSWER = 2.0  # seconds of a round trip
SLOWEST = 16 << 10  # bytes a second: the coordinator hangs up on slower readers
LONG_FETCH = 120.0  # seconds for a shard of the corpus
ENOUGH_TO_TIME = 1 << 18  # bytes
SOON = 7  # days
AS_PRINTED = "use the address of the join command that the coordinator printed"
ANOTHER_FOLDER = "name another folder with --cache (or BLOCKTRAIN_CACHE)"
_NOT_VALID_YET, _EXPIRED, _WRONG_HOST = 9, 10, (62, 64)  # OpenSSL's X509_V_ERR codes


@dataclass(frozen=True)
class CheckResult:
    """One line: the check, its state, what was found, and how to fix it if it is not good."""

    name: str
    state: CheckState
    found: str
    fix: str = ""

    @property
    def good(self) -> bool:
        """Whether checks that depend on it make sense."""
        return self.state in ("ok", "warning")


@dataclass(frozen=True)
class CoordinatorAddress:
    """The parts of a coordinator's URL."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> CoordinatorAddress:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is not the address of a coordinator; it looks like http://host:port"
            )
        return cls(
            parts.scheme,
            parts.hostname,
            port or (443 if parts.scheme == "https" else 80),
            parts.path.rstrip("/"),
        )

    @property
    def near(self) -> bool:
        """Whether it is this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def url(self, scheme: str = "") -> str:
        """The address, with another scheme if one is named."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme or self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP answer: when it was requested by this machine's clock, and how long it took."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    sent: float
    seconds: float

    @property
    def value(self) -> Any:
        """The body as JSON, or None if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def code(self) -> Code | None:
        """The code of a coordinator's refusal."""
        try:
            return Refusal.model_validate_json(self.body).code
        except ValidationError:
            return None


def from_error(name: str, error: BlockTrainError) -> CheckResult:
    """Our errors read: what is wrong; what to do."""
    problem, _, fix = str(error).partition("; ")
    return CheckResult(name, "failed", problem, fix or "correct that and ask again")


def judge_timeout(name: str) -> CheckResult:
    """A check that ran out of time."""
    if name in ("corpus", "data", "speed"):  # slow on a busy machine; a worker can join anyway
        return CheckResult(
            name,
            "warning",
            "has not ended in time: not judged",
            "end what keeps this machine busy and ask again; a worker can join",
        )
    return CheckResult(
        name,
        "failed",
        "has not ended in time",
        "what it looks at hangs or is too slow: look there first, then ask again",
    )


def judge_python(version: tuple[int, int, int]) -> CheckResult:
    """The interpreter."""
    finding = ".".join(map(str, version))
    if version[:2] < PYTHON:
        return CheckResult(
            "python",
            "failed",
            finding,
            f"install Python {'.'.join(map(str, PYTHON))} or newer and blocktrain in it",
        )
    return CheckResult("python", "ok", finding)


def judge_torch(version: str) -> CheckResult:
    """A torch that could be imported."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not TORCH <= numbers < (3, 0):
        return CheckResult(
            "torch",
            "failed",
            version,
            "install a torch from 2.6 on and below 3; the README says which one for which machine",
        )
    return CheckResult("torch", "ok", version)


def judge_memory(
    allowed: int, free: int, needed: dict[str, int], *, is_option: bool
) -> CheckResult:
    """Whether the largest block of the run fits. `is_option`: the limit comes from --memory."""
    limit = "allowed by --memory" if is_option else "in this machine"
    finding = f"{amount(allowed)} {limit}, {amount(free)} free"
    if not needed:
        return CheckResult("memory", "ok", finding)
    name, most = max(needed.items(), key=lambda item: item[1])
    finding += f"; training {name} takes about {amount(most)}"
    if allowed < most:
        more = "allow more with --memory" if is_option else "use a machine with more memory"
        return CheckResult(
            "memory",
            "failed",
            finding,
            f"{more}, or join a run with smaller blocks (width, context, batch, layers_per_block)",
        )
    if free < most:
        return CheckResult(
            "memory", "warning", finding, "end other programs: training would be slow or be killed"
        )
    return CheckResult("memory", "ok", finding)


def judge_disk(folder: Path, free: int, needed: int) -> CheckResult:
    """Whether a worker's files fit on the disk. 0 needed: the run is not known."""
    wants = f"; this run needs about {amount(needed)} there" if needed else ""
    finding = f"{amount(free)} free for {folder}{wants}"
    if free < needed:
        return CheckResult(
            "disk",
            "failed",
            finding,
            f"free {amount(needed - free)} on that disk, or {ANOTHER_FOLDER}",
        )
    if not needed and free < LITTLE_SPACE:
        return CheckResult(
            "disk",
            "warning",
            finding,
            f"a corpus and a block may need more: free some, or {ANOTHER_FOLDER}",
        )
    return CheckResult("disk", "ok", finding)


def judge_unwritable(folder: Path, error: OSError) -> CheckResult:
    """A folder that a file could not be written into."""
    finding = f"cannot write into {folder}: {error.strerror or error}"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return CheckResult(
        "disk",
        "failed",
        finding,
        f"{'free space on that disk' if full else 'make it writable'}, or {ANOTHER_FOLDER}",
    )


def judge_unknown_host(address: CoordinatorAddress, error: OSError) -> CheckResult:
    """A name without an address."""
    return CheckResult(
        "address",
        "failed",
        f"the name {address.host} has no address ({error.strerror or error})",
        f"check its spelling and that this machine is online; {AS_PRINTED}",
    )


def judge_port(address: CoordinatorAddress, error: OSError) -> CheckResult:
    """An address where no connection could be made."""
    where = f"port {address.port} of {address.host}"
    if isinstance(error, ConnectionRefusedError):
        finding = f"nothing listens on {where}"
        fix = (
            f"start the coordinator there, or {AS_PRINTED}; "
            "with --listen 127.0.0.1 only its own machine can reach it"
        )
    elif isinstance(error, TimeoutError):
        finding = f"no answer from {where}"
        fix = (
            "is that machine on, and is the port open? "
            "Open it in its firewall or router, or forward it"
        )
    else:
        finding = f"no way to {where} ({error.strerror or error})"
        fix = "is this machine online, and in the same network or VPN as the coordinator?"
    return CheckResult("port", "failed", finding, fix)


def judge_certificate(
    address: CoordinatorAddress, certificate: dict[str, Any], version: str, now: float
) -> CheckResult:
    """A certificate that is trusted."""
    ends = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    until = datetime.fromtimestamp(ends, UTC).date()
    finding = f"{version}, the certificate of {address.host} is trusted until {until}"
    if ends - now < SOON * 86400:
        return CheckResult(
            "tls",
            "warning",
            finding,
            "renew the coordinator's certificate and start it again with --tls",
        )
    return CheckResult("tls", "ok", finding)


def judge_tls_error(address: CoordinatorAddress, error: Exception, ca: Path | None) -> CheckResult:
    """No connection by TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _judge_trust(address, error, ca)
    if isinstance(error, ssl.SSLError | TimeoutError | ConnectionError | EOFError):
        return CheckResult(
            "tls",
            "failed",
            f"port {address.port} does not speak TLS",
            f"use {address.url('http')}, or start the coordinator with --tls",
        )
    return CheckResult("tls", "failed", str(error), AS_PRINTED)


def _judge_trust(
    address: CoordinatorAddress, error: ssl.SSLCertVerificationError, ca: Path | None
) -> CheckResult:
    finding = f"the certificate of {address.host} is not accepted: {error.verify_message}"
    if error.verify_code == _EXPIRED:
        fix = (
            "renew the coordinator's certificate and start it again with --tls; "
            "if it has not expired, this machine's clock is wrong"
        )
    elif error.verify_code == _NOT_VALID_YET:
        fix = "set this machine's clock: to it the certificate lies in the future"
    elif error.verify_code in _WRONG_HOST:
        fix = f"use the name that the certificate was made for, or make one for {address.host}"
    elif ca is not None:
        fix = f"{ca} has not signed it: take the --ca file from the coordinator's operator"
    else:
        fix = (
            "name the certificate that it was signed with: --ca FILE.pem, "
            "from the coordinator's operator"
        )
    return CheckResult("tls", "failed", finding, fix)


def judge_tls_missing(address: CoordinatorAddress) -> CheckResult:
    """The address says http, the other side speaks TLS."""
    return CheckResult(
        "tls",
        "failed",
        f"port {address.port} speaks TLS, and the address says http",
        f"use {address.url('https')}",
    )


def judge_plain(address: CoordinatorAddress, *, secret: bool, near: bool) -> CheckResult:
    """Both sides speak plain http."""
    if secret and not near:
        return CheckResult(
            "tls",
            "warning",
            "not used: the token can be read on its way",
            "start the coordinator with --tls, or use a VPN",
        )
    return CheckResult("tls", "ok", f"not used, {address.url()} is plain http")


def judge_health(address: CoordinatorAddress, answer: HttpAnswer) -> CheckResult:
    """The answer to GET /healthz."""
    value = answer.value
    if (
        answer.status == 200
        and isinstance(value, dict)
        and value.get("ok") is True
        and "ready" in value
    ):
        if value.get("finished"):
            fix = (
                "a worker would leave at once: fetch the model with `blocktrain pull`, "
                "or start another run"
            )
            return CheckResult("coordinator", "warning", "its run is finished", fix)
        if not value["ready"]:
            return CheckResult(
                "coordinator",
                "warning",
                "it is still preparing the run",
                "ask again in a minute; workers wait by themselves",
            )
        return CheckResult("coordinator", "ok", f"answers on {address.url()}")
    if "location" in answer.headers:
        return CheckResult(
            "coordinator",
            "failed",
            f"{address.url()} answers with another address",
            f"try {answer.headers['location'][:200]}",
        )
    if answer.status in (502, 503, 504):
        finding = f"a server before it answers {answer.status}"
        return CheckResult(
            "coordinator",
            "failed",
            finding,
            "start the coordinator behind that server, and check where the server sends to",
        )
    who = re.sub(r"[^ -~]", "?", answer.headers.get("server", ""))[:60]
    return judge_stranger(address, f"HTTP {answer.status}{', ' if who else ''}{who}")


def judge_stranger(address: CoordinatorAddress, what: str) -> CheckResult:
    """Something answers, but it is not a coordinator."""
    finding = f"another service answers on port {address.port} ({what})"
    return CheckResult(
        "coordinator", "failed", finding, f"{AS_PRINTED}: host or port is another one"
    )


def judge_silent(address: CoordinatorAddress, seconds: float) -> CheckResult:
    """A connection, but no answer."""
    finding = f"port {address.port} takes connections, but has not answered within {seconds:.0f} s"
    return CheckResult(
        "coordinator",
        "failed",
        finding,
        f"{AS_PRINTED}; if it is the right one, look at that machine: it may be overloaded or hang",
    )


def judge_token(answer: HttpAnswer, *, has_token: bool) -> CheckResult:
    """The answer to GET /v1/run."""
    if answer.status == 200:
        return CheckResult("token", "ok", "accepted" if has_token else "none is needed")
    if answer.code is Code.BAD_TOKEN:
        finding = (
            "the coordinator does not know this token"
            if has_token
            else "the coordinator wants a token"
        )
        fix = (
            "give --token SECRET (or BLOCKTRAIN_TOKEN) exactly as in the join command "
            "that the coordinator printed"
        )
        return CheckResult("token", "failed", finding, fix)
    if answer.code is Code.BUSY:
        return CheckResult(
            "token",
            "warning",
            "accepted, but there is no run yet",
            "ask again in a minute: the run is being prepared",
        )
    answer_code = answer.code or f"HTTP {answer.status}"
    fix = (
        "install the coordinator's version of blocktrain here, "
        "and check that nothing in between changes requests"
    )
    return CheckResult("token", "failed", f"GET /v1/run was answered with {answer_code}", fix)


def judge_protocol(number: object) -> CheckResult:
    """The number in a manifest, even if nothing else of it can be read."""
    if not isinstance(number, int):
        return CheckResult(
            "protocol",
            "failed",
            "the run's manifest has no protocol number",
            f"another service answers there: {AS_PRINTED}",
        )
    finding = f"the coordinator speaks protocol {number}, this version {PROTOCOL}"
    if number < PROTOCOL:
        return CheckResult(
            "protocol",
            "failed",
            finding,
            "update blocktrain on the coordinator's machine, or install its older version here",
        )
    if number > PROTOCOL:
        return CheckResult(
            "protocol",
            "failed",
            finding,
            "update blocktrain on this machine to the coordinator's version",
        )
    return CheckResult("protocol", "ok", f"{number}, on both sides")


def clock_skew(answer: HttpAnswer, issued: int | None) -> float | None:
    """Seconds that the coordinator's clock is ahead of this one.

    By the time in the manifest if there is one, else by the Date header of the answer.
    """
    middle = answer.sent + answer.seconds / 2
    if issued is not None:
        return issued / 1000 - middle
    try:
        return parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5 - middle
    except (KeyError, ValueError):
        return None


def judge_clock(skew: float, uncertain: float) -> CheckResult:
    """How far this clock is from the coordinator's."""
    if abs(skew) <= CLOCK_WARNS:
        return CheckResult(
            "clock", "ok", f"{abs(skew):.1f} s from the coordinator's (to within {uncertain:.2g} s)"
        )
    finding = (
        f"this clock is {_span(abs(skew))} {'behind' if skew > 0 else 'ahead of'} the coordinator's"
    )
    fix = (
        "set the clock that is wrong (Linux: `sudo timedatectl set-ntp true`): certificates and "
        "signed manifests expire by it, and times in logs and in the ledger would not match"
    )
    return CheckResult("clock", "failed" if abs(skew) > CLOCK_FAILS else "warning", finding, fix)


def judge_round_trip(times: list[float]) -> CheckResult:
    """How long small calls take on an open connection."""
    finding = f"{median(times) * 1000:.1f} ms (median of {len(times)})"
    if median(times) > SLOW_ANSWER:
        return CheckResult(
            "round_trip",
            "warning",
            finding,
            "the connection or the coordinator is overloaded: tasks begin and end late",
        )
    return CheckResult("round_trip", "ok", finding)


def judge_download(received: int, seconds: float, shard: int) -> CheckResult:
    """How fast bytes come, and how long a shard of the corpus takes."""
    if received < ENOUGH_TO_TIME and seconds < 1:
        return CheckResult(
            "download",
            "ok",
            f"{amount(received)} in {seconds * 1000:.0f} ms: too few bytes to tell a rate",
        )
    rate = received / max(seconds, 1e-9)
    finding = f"{amount(rate)}/s; a shard of {amount(shard)} takes {_span(shard / max(rate, 1))}"
    if rate < SLOWEST:
        return CheckResult(
            "download",
            "failed",
            finding,
            f"use a faster connection: below {amount(SLOWEST)}/s the coordinator hangs up",
        )
    if shard / rate > LONG_FETCH:
        return CheckResult(
            "download",
            "warning",
            finding,
            "tasks may wait for their text: use a faster connection",
        )
    return CheckResult("download", "ok", finding)


def judge_speed(
    step: float, task_seconds: float, task_steps: int | None, round_seconds: float
) -> CheckResult:
    """How long a task takes at `step` seconds a step. 0 seconds: not known."""
    finding = f"{step * 1000:.3g} ms a step of block 1"
    if not task_seconds and task_steps is None:
        return CheckResult(
            "speed", "ok", f"{finding}; the coordinator does not say how long a task is"
        )
    steps = task_steps or max(1, int(task_seconds / step))
    finding += (
        f": {'tasks of' if task_steps else 'about'} {steps} steps, {_span(steps * step)} each"
    )
    late = "its updates come late and count less or not at all"
    if round_seconds and steps * step > round_seconds:
        fix = (
            "use a faster device, or ask for a run with smaller blocks or tasks: "
            f"a round lasts {_span(round_seconds)}, {late}"
        )
        return CheckResult("speed", "warning", finding, fix)
    if task_steps is None and step > task_seconds:
        fix = (
            f"use a faster device, or ask for a longer --task-seconds than {_span(task_seconds)}: "
            f"even one step takes longer, {late}"
        )
        return CheckResult("speed", "warning", finding, fix)
    return CheckResult("speed", "ok", finding)


def _span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
