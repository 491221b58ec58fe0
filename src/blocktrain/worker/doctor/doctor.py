"""`blocktrain doctor`: why a worker does not join. The order of the checks and their dependencies.

`probes` measures, `diagnosis` judges. One failure does not hide the others: only the checks that
depend on it are skipped.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue

import httpx2
from rich.console import Console
from rich.text import Text

from blocktrain.clock import Clock, SystemClock
from blocktrain.config import Config, make_config
from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.footprint import worker_memory
from blocktrain.learning.shards import CorpusIndex, read_index, same_tokens
from blocktrain.learning.tokenizer import load_tokenizer, tokenizer_of
from blocktrain.protocol.identity import verify
from blocktrain.protocol.messages import MAX_REPLY, PROTOCOL, Blob, Manifest, read
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.status import Status
from blocktrain.protocol.transfer import sha256
from blocktrain.terminal import console
from blocktrain.units import amount, parse_bytes
from blocktrain.worker.doctor import diagnosis, probes
from blocktrain.worker.doctor.diagnosis import CheckResult, CoordinatorAddress, HttpAnswer

LOADING = 120.0  # seconds for python and torch: a cold disk or a busy machine may need them
LIMIT = 20.0  # seconds for all the rest
# Files of the size of a block's weights: moments and residual twice, the weights and the update.
STATE_FILES = 8
SHARDS = 4  # of the corpus that are there at once, if the cache may not grow
_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_INSTALL = "install the coordinator's version of blocktrain here"


@dataclass(frozen=True)
class DoctorOptions:
    """What a worker would be started with."""

    cache: Path
    url: str = ""  # empty: only this machine
    token: str = ""
    device: str = "auto"
    memory: str = ""
    ca: Path | None = None
    data: str = ""  # a corpus on this machine to compare with the run's
    data_folder: Path | None = None


class _Skip(Exception):
    """A check that makes no sense after an earlier result; says why."""


class _Checklist:
    """The results so far, and a method for every check."""

    def __init__(self, options: DoctorOptions, clock: Clock) -> None:
        self.options, self._clock = options, clock
        self.results: dict[str, CheckResult] = {}
        self.train_device = "cpu"
        self.probe: probes.CoordinatorProbe | None = None
        self.health: HttpAnswer | httpx2.HTTPError | None = None
        self.answer: HttpAnswer | None = None  # to GET /v1/run
        self.manifest: Manifest | None = None
        self.config: Config | None = None
        self._known_index: CorpusIndex | None = None

    def checks(self) -> dict[str, Callable[[], CheckResult]]:
        """Every check by its name, in order."""
        first = [self.python, self.torch, self.device]
        connection = [self.address, self.port, self.tls, self.coordinator]
        run = [self.token, self.protocol, self.fingerprint, self.signature]
        transfer = [self.clock, self.round_trip, self.download, self.upload]
        remote = [*connection, *run, *transfer] if self.options.url else []
        text = [
            *([self.corpus] if self.options.url else []),
            *([self.data] if self.options.data else []),
        ]
        last = [self.speed] if self.options.url else []
        return {
            check.__name__: check
            for check in [*first, *remote, self.memory, self.disk, *text, *last]
        }

    def run(self, queue: Queue[CheckResult]) -> None:
        """All checks, one after another."""
        for name, check in self.checks().items():
            try:
                result = check()
            except _Skip as why:
                result = CheckResult(name, "skipped", str(why))
            except BlockTrainError as error:
                result = diagnosis.from_error(name, error)
            except httpx2.HTTPError as error:
                result = CheckResult(
                    name,
                    "failed",
                    f"the connection broke ({str(error) or type(error).__name__})",
                    "try again; the connection is not stable",
                )
            except Exception as error:  # any error: the other checks go on
                result = CheckResult(
                    name,
                    "failed",
                    f"{type(error).__name__}: {error}"[:300],
                    "fix this first: a worker would fail in the same way",
                )
            self.results[name] = result
            queue.put(result)
        if self.probe is not None:
            self.probe.close()

    def _require(self, *names: str) -> None:
        for name in names:
            if self.results[name].state == "skipped":
                raise _Skip(self.results[name].found)
            if self.results[name].state == "failed":
                raise _Skip(f"cannot be checked while `{name}` fails")

    def _require_connection(self, *names: str) -> probes.CoordinatorProbe:
        self._require("address", *names)
        if self.probe is None:
            raise _Skip("there is no connection")
        return self.probe

    def _manifest(self) -> Manifest:
        self._require("token")
        if self.manifest is None:
            self._require("protocol")
            raise _Skip("the run's manifest cannot be read")
        return self.manifest

    # This machine

    def python(self) -> CheckResult:
        """The interpreter."""
        return diagnosis.judge_python(sys.version_info[:3])

    def torch(self) -> CheckResult:
        """It can be imported, in a version that we support."""
        try:
            import torch
        except Exception as error:  # a torch that does not fit the machine fails in many ways
            fix = "install torch again; the README says which one for which machine"
            return CheckResult(
                "torch",
                "failed",
                f"cannot be imported ({type(error).__name__}: {error})"[:300],
                fix,
            )
        return diagnosis.judge_torch(torch.__version__)

    def device(self) -> CheckResult:
        """It computes."""
        self._require("torch")
        try:
            self.train_device, what = probes.find_device(self.options.device)
        except RuntimeError as error:
            problem = (
                f"--device {self.options.device} cannot compute ({str(error).splitlines()[0]})"[
                    :300
                ]
            )
            return CheckResult(
                "device",
                "failed",
                problem,
                "use --device cpu, or install a torch made for this device",
            )
        return CheckResult("device", "ok", f"{self.train_device} ({what})")

    def memory(self) -> CheckResult:
        """Enough for any block of the run, if it is known."""
        self._require("torch")

        needed = {}
        if self.config is not None:
            config = self.config.replace(device=self.train_device)
            needed["block 1"] = worker_memory(config, 1)
            if config.fusion is not None:
                needed["the fusion block"] = worker_memory(config, config.fusion)
        has, free = probes.memory_of(self.train_device)
        option = self.options.memory
        return diagnosis.judge_memory(
            parse_bytes(option) if option else has, free, needed, is_option=bool(option)
        )

    def disk(self) -> CheckResult:
        """The cache can be written, and holds what the run needs."""
        folder = self.options.cache
        try:
            free = probes.free_space(folder)
        except OSError as error:
            return diagnosis.judge_unwritable(folder, error)
        needed = 0
        if self.manifest is not None:
            weights = [block.weights.length for block in self.manifest.blocks]
            needed = sum(weights) + STATE_FILES * max(weights)
        if (index := self._known_index) is not None:
            needed += SHARDS * max(index.file_bytes(shard) for shard in index.shards)
        return diagnosis.judge_disk(folder, free, needed)

    # The connection

    def address(self) -> CheckResult:
        """It is a valid URL, and its host resolves."""
        address = CoordinatorAddress.parse(self.options.url)
        self.probe = probes.CoordinatorProbe(
            address, self.options.token, self.options.ca, self._clock
        )
        if self.probe.proxy:
            return CheckResult(
                "address",
                "ok",
                f"{address.host} port {address.port}, by the proxy that the environment names",
            )
        try:
            addresses = self.probe.addresses()
        except OSError as error:
            return diagnosis.judge_unknown_host(address, error)
        return CheckResult(
            "address",
            "ok",
            f"{address.host} port {address.port}"
            + (f" is {', '.join(addresses)}" if addresses != [address.host] else ""),
        )

    def port(self) -> CheckResult:
        """The port accepts connections."""
        probe = self._require_connection()
        if probe.proxy:
            return CheckResult("port", "ok", "the proxy connects")
        try:
            return CheckResult("port", "ok", f"{probe.connect()} takes connections")
        except OSError as error:
            return diagnosis.judge_port(probe.address, error)

    def tls(self) -> CheckResult:
        """Both sides speak it, and the certificate is trusted; or neither does."""
        probe = self._require_connection("port")
        address = probe.address
        if address.scheme == "https":
            if probe.proxy:
                return CheckResult("tls", "ok", "through the proxy, with the first answer")
            try:
                return diagnosis.judge_certificate(address, *probe.handshake(), self._clock.time())
            except OSError as error:
                return diagnosis.judge_tls_error(address, error, self.options.ca)
        try:
            self.health = probe.get("/healthz")
        except httpx2.HTTPError as error:
            self.health = error
        bad = (
            not isinstance(self.health, HttpAnswer)
            or not diagnosis.judge_health(address, self.health).good
        )
        if bad and not probe.proxy and probe.speaks_tls():
            return diagnosis.judge_tls_missing(address)
        return diagnosis.judge_plain(address, secret=bool(self.options.token), near=address.near)

    def coordinator(self) -> CheckResult:
        """The service that answers is a coordinator."""
        probe = self._require_connection("tls")
        try:
            health = self.health or probe.get("/healthz")
            if isinstance(health, httpx2.HTTPError):
                raise health
        except httpx2.TimeoutException:
            return diagnosis.judge_silent(probe.address, probes.TIMEOUT)
        except httpx2.ProxyError as error:
            fix = "set HTTP_PROXY, HTTPS_PROXY and NO_PROXY so that it can be reached"
            return CheckResult(
                "coordinator", "failed", f"the proxy does not let this through ({error})", fix
            )
        except httpx2.HTTPError as error:
            return diagnosis.judge_stranger(
                probe.address, f"not HTTP: {str(error) or type(error).__name__}"
            )
        self.health = health
        return diagnosis.judge_health(probe.address, health)

    # The run

    def token(self) -> CheckResult:
        """The coordinator tells about its run."""
        self.answer = self._require_connection("coordinator").get("/v1/run")
        return diagnosis.judge_token(self.answer, has_token=bool(self.options.token))

    def protocol(self) -> CheckResult:
        """Both sides speak the same one. Another version's manifest is read as far as possible."""
        self._require("token")
        if self.answer is None or self.answer.status != 200:
            raise _Skip("there is no run yet")
        value = self.answer.value
        result = diagnosis.judge_protocol(
            value.get("protocol") if isinstance(value, dict) else None
        )
        try:
            self.manifest = read(Manifest, self.answer.body, MAX_REPLY)
        except Refused as error:
            if result.good:
                return CheckResult(
                    "protocol",
                    "failed",
                    f"the run's manifest cannot be read ({error.detail})"[:300],
                    _INSTALL,
                )
        return result

    def fingerprint(self) -> CheckResult:
        """The settings mean the same here."""
        manifest = self._manifest()
        try:
            config = make_config(dict(manifest.config))
        except ConfigError as error:
            return CheckResult(
                "fingerprint",
                "failed",
                f"this version cannot read the run's settings ({error})"[:300],
                _INSTALL,
            )
        if config.fingerprint != manifest.fingerprint:
            mine, theirs = config.fingerprint[:12], manifest.fingerprint[:12]
            problem = f"the run's settings mean something else here ({mine}, not {theirs})"
            return CheckResult("fingerprint", "failed", problem, _INSTALL)
        self.config = config
        return CheckResult(
            "fingerprint", "ok", f"{config.fingerprint[:12]}, run {manifest.run[:12]}"
        )

    def signature(self) -> CheckResult:
        """The manifest is the coordinator's, whose key is the one that this machine knows."""
        manifest = self._manifest()
        if manifest.protocol != PROTOCOL:
            raise _Skip("signatures of another protocol are made otherwise")
        try:
            verify(manifest, manifest.coordinator)
        except Refused:
            fix = (
                "something in between changes answers: "
                "connect to the coordinator itself, by https if possible"
            )
            return CheckResult(
                "signature", "failed", "the manifest was not signed by the key that it names", fix
            )
        known = self.options.cache / "runs" / manifest.run / "coordinator.key"
        if known.exists() and known.read_text(encoding="ascii") != manifest.coordinator:
            problem = (
                f"this is not the coordinator that the run began with: {known} has another key"
            )
            return CheckResult(
                "signature",
                "failed",
                problem,
                "ask its operator; if the change is right, delete that file",
            )
        return CheckResult(
            "signature",
            "ok",
            f"by the key {manifest.coordinator[:12]}" + (", known here" if known.exists() else ""),
        )

    def clock(self) -> CheckResult:
        """Not far from the coordinator's."""
        self._require_connection("coordinator")
        answer = self.answer if self.manifest else self.health
        issued = self.manifest.issued if self.manifest else None
        skew = diagnosis.clock_skew(answer, issued) if isinstance(answer, HttpAnswer) else None
        if skew is None or not isinstance(answer, HttpAnswer):
            raise _Skip("the coordinator does not tell its time")
        return diagnosis.judge_clock(skew, answer.seconds / 2 + (0.0 if issued else 1.0))

    def round_trip(self) -> CheckResult:
        """How fast small calls are."""
        return diagnosis.judge_round_trip(self._require_connection("coordinator").round_trips())

    def download(self) -> CheckResult:
        """How fast large ones are."""
        index = self._index()
        shard = index.sources[0].shards[0]
        received, seconds = self._require_connection("coordinator").download(
            shard.sha256, index.file_bytes(shard)
        )
        return diagnosis.judge_download(received, seconds, index.file_bytes(shard))

    def upload(self) -> CheckResult:
        """Not measured."""
        raise _Skip("not measured: a coordinator takes bytes only for a task that it gave")

    # The run on this machine

    def corpus(self) -> CheckResult:
        """The index is the run's, and so is a shard in the cache, if there is one."""
        index = self._index()
        shards = list(dict.fromkeys(index.shards))
        what = f"{index.name}, {index.train_tokens:,} tokens in {len(shards)} shards"
        copies = probes.cached_shards(self.options.cache, index)
        if not copies:
            finding = f"{what}: a worker fetches those that its tasks name"
            return CheckResult("corpus", "ok", finding)
        if probes.hash_of_file(copies[0]) != copies[0].stem:
            return CheckResult(
                "corpus",
                "failed",
                f"{what}: the copy {copies[0]} in the cache is damaged",
                f"delete {copies[0]}; the worker then fetches it again",
            )
        return CheckResult(
            "corpus", "ok", f"{what}: {len(copies)} are in the cache, the last one has its hash"
        )

    def _index(self) -> CorpusIndex:
        """The index of the run's corpus, compared with its hash."""
        if self._known_index is None:
            blob = self._manifest().corpus.index
            content = self._blob(blob)
            self._known_index = read_index(content)
        return self._known_index

    def _blob(self, blob: Blob) -> bytes:
        if blob.length > MAX_REPLY:
            raise _Skip(f"it has {amount(blob.length)}, which a check does not read")
        answer = self._require_connection("coordinator").get(f"/v1/blobs/{blob.sha256}")
        if sha256(answer.body) != blob.sha256:
            raise BlockTrainError(
                f"the coordinator's blob {blob.sha256} is damaged; ask its operator to restore it"
            )
        return answer.body

    def data(self) -> CheckResult:
        """A corpus that is on this machine is the run's."""
        if not self.options.url:
            raise _Skip("name a coordinator's address to compare it with")
        run = self._manifest().corpus
        if run.tokenizer is not None:
            load_tokenizer(self._blob(run.tokenizer))
        if self.config is None:
            raise _Skip("the run's settings are not known")
        mine = probes.corpus_index(
            self.options.data,
            self.options.data_folder,
            self.options.cache,
            tokenizer_of(self.config),
        )
        if not same_tokens(mine, self._index()):
            fix = (
                "nothing, if you mean the run's own corpus: workers fetch it; "
                f"else start a coordinator with --data {self.options.data}"
            )
            return CheckResult(
                "data",
                "failed",
                f"{self.options.data} is not the corpus of the run ({run.name}): "
                "its shards have other hashes",
                fix,
            )
        return CheckResult("data", "ok", f"{self.options.data} is the corpus of the run")

    def speed(self) -> CheckResult:
        """What a task would be."""
        self._require("torch", "device", "fingerprint", "memory")
        if self.config is None:
            raise _Skip("the run's settings are not known")
        step = probes.seconds_per_step(self.config, self.train_device, self._clock)
        try:
            status = read(Status, self._require_connection().get("/v1/status").body, MAX_REPLY)
        except (Refused, httpx2.HTTPError):
            return diagnosis.judge_speed(step, 0.0, None, 0.0)
        lasts = [
            block.round.open_seconds + block.round.deadline_seconds
            for block in status.blocks
            if block.round and block.block == 1
        ]
        return diagnosis.judge_speed(step, status.task_seconds, status.task_steps, sum(lasts))


def examine(options: DoctorOptions, clock: Clock | None = None) -> Iterator[CheckResult]:
    """Every check when it is done. If one hangs (DNS, a disk, a driver), the rest is skipped."""
    clock = clock or SystemClock()
    checklist, queue = _Checklist(options, clock), Queue[CheckResult]()
    threading.Thread(target=checklist.run, args=(queue,), name="doctor", daemon=True).start()
    end = clock.monotonic() + LOADING
    names = list(checklist.checks())
    for index, name in enumerate(names):
        try:
            yield queue.get(timeout=max(0.0, end - clock.monotonic()))
        except Empty:
            yield diagnosis.judge_timeout(name)
            yield from (
                CheckResult(later, "skipped", f"`{name}` took all the time")
                for later in names[index + 1 :]
            )
            return
        if name == "torch":
            end = clock.monotonic() + LIMIT


def show(options: DoctorOptions, *, as_json: bool) -> bool:
    """Print every check as it is done, or all as JSON; whether none failed."""
    # Before `console.status`, which replaces sys.stdout.
    out = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    names, checks = [*_Checklist(options, SystemClock()).checks(), "done"], list[CheckResult]()
    with console.status(f"examining: {names[0]}") as waiting:
        for check in examine(options):
            checks.append(check)
            waiting.update(f"examining: {names[len(checks)]}")
            if not as_json:
                waiting.stop()  # it may be on the same screen
                out.print(_render(check))
                waiting.start()
    good = all(check.state != "failed" for check in checks)
    if as_json:
        print(json.dumps({"ok": good, "checks": [asdict(check) for check in checks]}))
    return good


def _render(check: CheckResult) -> Text:
    line = Text.assemble(
        (f"{check.state:<8}", _COLOURS[check.state]), f" {check.name:<12} {check.found}"
    )
    return line.append(f"\n{'':<22}{check.fix}") if check.fix else line
