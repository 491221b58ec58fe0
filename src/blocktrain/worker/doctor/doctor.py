"""`blocktrain doctor`: why a worker does not join, or that nothing is in its way. The order of the checks and what depends on what.

`probes` measures, `diagnosis` judges. One failure does not hide the others: only what cannot be checked without it is skipped.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue

import httpx2
from rich.console import Console
from rich.text import Text

from blocktrain.config import Config, make_config
from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.protocol.identity import verify
from blocktrain.protocol.messages import MAX_REPLY, PROTOCOL, Manifest, read
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.status import Status
from blocktrain.terminal import amount, console
from blocktrain.worker.doctor import diagnosis, probes
from blocktrain.worker.doctor.diagnosis import Answer, Check, Place

LOADING = 120.0  # seconds for python and torch: a cold disk or a busy machine may need them
LIMIT = 20.0  # seconds for all the rest
KEPT = 8  # files of the size of a block's weights: moments and residual twice, the weights and the update
_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_INSTALL = "install the coordinator's version of blocktrain here"


@dataclass(frozen=True)
class Patient:
    """What a worker would be started with."""

    cache: Path
    url: str = ""  # empty: only this machine
    token: str = ""
    device: str = "auto"
    memory: str = ""
    ca: Path | None = None
    data: str = ""  # a corpus on this machine to compare with the run's
    data_folder: Path | None = None


class _Skipped(Exception):
    """A check that makes no sense after what was found; why."""


class _Exam:
    """One examination: what was found so far, and a method for every check."""

    def __init__(self, patient: Patient) -> None:
        self.patient = patient
        self.done: dict[str, Check] = {}
        self.place = "cpu"  # where it would be trained
        self.line: probes.Line | None = None
        self.health: Answer | httpx2.HTTPError | None = None
        self.answer: Answer | None = None  # to GET /v1/run
        self.manifest: Manifest | None = None
        self.config: Config | None = None

    def checks(self) -> dict[str, Callable[[], Check]]:
        """Every check by its name, in order."""
        first = [self.python, self.torch, self.device]
        line = [self.address, self.port, self.tls, self.coordinator]
        run = [self.token, self.protocol, self.fingerprint, self.signature]
        moving = [self.clock, self.round_trip, self.download, self.upload]
        there = [*line, *run, *moving] if self.patient.url else []
        text = [
            *([self.corpus] if self.patient.url else []),
            *([self.data] if self.patient.data else []),
        ]
        last = [self.speed] if self.patient.url else []
        return {
            check.__name__: check
            for check in [*first, *there, self.memory, self.disk, *text, *last]
        }

    def run(self, done: Queue[Check]) -> None:
        """All checks, one after another."""
        for name, check in self.checks().items():
            try:
                found = check()
            except _Skipped as why:
                found = Check(name, "skipped", str(why))
            except BlockTrainError as error:
                found = diagnosis.from_error(name, error)
            except httpx2.HTTPError as error:
                found = Check(
                    name,
                    "failed",
                    f"the line broke ({str(error) or type(error).__name__})",
                    "try again; the line is not stable",
                )
            except (
                Exception
            ) as error:  # whatever is wrong with this machine: the other checks go on
                found = Check(
                    name,
                    "failed",
                    f"{type(error).__name__}: {error}"[:300],
                    "this is what a worker would meet, too",
                )
            self.done[name] = found
            done.put(found)
        if self.line is not None:
            self.line.close()

    def _after(self, *names: str) -> None:
        for name in names:
            if self.done[name].state == "skipped":
                raise _Skipped(self.done[name].found)
            if self.done[name].state == "failed":
                raise _Skipped(f"cannot be checked while `{name}` fails")

    def _line(self, *names: str) -> probes.Line:
        self._after("address", *names)
        if self.line is None:
            raise _Skipped("there is no line")
        return self.line

    def _manifest(self) -> Manifest:
        self._after("token")
        if self.manifest is None:
            self._after("protocol")
            raise _Skipped("the run's manifest cannot be read")
        return self.manifest

    # This machine

    def python(self) -> Check:
        """The interpreter."""
        return diagnosis.judge_python(sys.version_info[:3])

    def torch(self) -> Check:
        """It imports, and is one that we know."""
        try:
            import torch
        except Exception as error:  # a torch that does not fit the machine fails in many ways
            fix = "install torch again; the README says which one for which machine"
            return Check(
                "torch",
                "failed",
                f"cannot be imported ({type(error).__name__}: {error})"[:300],
                fix,
            )
        return diagnosis.judge_torch(torch.__version__)

    def device(self) -> Check:
        """It computes."""
        self._after("torch")
        try:
            self.place, what = probes.find_device(self.patient.device)
        except RuntimeError as error:
            found = f"--device {self.patient.device} cannot compute ({str(error).splitlines()[0]})"[
                :300
            ]
            return Check(
                "device",
                "failed",
                found,
                "use --device cpu, or install a torch made for this device",
            )
        return Check("device", "ok", f"{self.place} ({what})")

    def memory(self) -> Check:
        """Enough for any block of the run, if it is known."""
        self._after("torch")
        from blocktrain.worker.command import parse_bytes
        from blocktrain.worker.task import footprint

        needed = {}
        if self.config is not None:
            needed["block 1"] = footprint(self.config, 1)
            if self.config.fusion is not None:
                needed["the fusion block"] = footprint(self.config, self.config.fusion)
        has, free = probes.memory_of(self.place)
        asked = self.patient.memory
        return diagnosis.judge_memory(
            parse_bytes(asked) if asked else has, free, needed, asked=bool(asked)
        )

    def disk(self) -> Check:
        """The cache can be written, and holds what the run needs."""
        folder = self.patient.cache
        try:
            free = probes.free_space(folder)
        except OSError as error:
            return diagnosis.judge_unwritable(folder, error)
        needed = 0
        if self.manifest is not None:
            weights = [block.weights.length for block in self.manifest.blocks]
            corpus = (self.manifest.corpus.train, self.manifest.corpus.valid)
            cached = self.done["torch"].good and len(
                probes.cached_corpus(folder, self.manifest.corpus)
            ) == len(corpus)
            needed = (
                sum(weights)
                + KEPT * max(weights)
                + (0 if cached else sum(blob.length for blob in corpus))
            )
        return diagnosis.judge_disk(folder, free, needed)

    # The line

    def address(self) -> Check:
        """It is one, and its name is known."""
        place = Place.parse(self.patient.url)
        self.line = probes.Line(place, self.patient.token, self.patient.ca)
        if self.line.proxy:
            return Check(
                "address",
                "ok",
                f"{place.host} port {place.port}, by the proxy that the environment names",
            )
        try:
            found = self.line.addresses()
        except OSError as error:
            return diagnosis.judge_unknown_host(place, error)
        return Check(
            "address",
            "ok",
            f"{place.host} port {place.port}"
            + (f" is {', '.join(found)}" if found != [place.host] else ""),
        )

    def port(self) -> Check:
        """Somebody takes connections."""
        line = self._line()
        if line.proxy:
            return Check("port", "ok", "the proxy connects")
        try:
            return Check("port", "ok", f"{line.connect()} takes connections")
        except OSError as error:
            return diagnosis.judge_port(line.place, error)

    def tls(self) -> Check:
        """Both sides speak it, and the certificate is trusted; or neither does."""
        line = self._line("port")
        place = line.place
        if place.scheme == "https":
            if line.proxy:
                return Check("tls", "ok", "through the proxy, with the first answer")
            try:
                return diagnosis.judge_certificate(place, *line.handshake(), time.time())
            except OSError as error:
                return diagnosis.judge_tls_error(place, error, self.patient.ca)
        try:
            self.health = line.get("/healthz")
        except httpx2.HTTPError as error:
            self.health = error
        bad = (
            not isinstance(self.health, Answer)
            or not diagnosis.judge_health(place, self.health).good
        )
        if bad and not line.proxy and line.speaks_tls():
            return diagnosis.judge_tls_missing(place)
        return diagnosis.judge_plain(place, secret=bool(self.patient.token), near=place.near)

    def coordinator(self) -> Check:
        """Who answers is a coordinator."""
        line = self._line("tls")
        try:
            found = self.health or line.get("/healthz")
            if isinstance(found, httpx2.HTTPError):
                raise found
        except httpx2.TimeoutException:
            return diagnosis.judge_silent(line.place, probes.PATIENCE)
        except httpx2.ProxyError as error:
            fix = "set HTTP_PROXY, HTTPS_PROXY and NO_PROXY so that it can be reached"
            return Check(
                "coordinator", "failed", f"the proxy does not let this through ({error})", fix
            )
        except httpx2.HTTPError as error:
            return diagnosis.judge_stranger(
                line.place, f"not HTTP: {str(error) or type(error).__name__}"
            )
        self.health = found
        return diagnosis.judge_health(line.place, found)

    # The run

    def token(self) -> Check:
        """The coordinator tells about its run."""
        self.answer = self._line("coordinator").get("/v1/run")
        return diagnosis.judge_token(self.answer, given=bool(self.patient.token))

    def protocol(self) -> Check:
        """Both sides speak the same one; a manifest of another one is read as far as it goes."""
        self._after("token")
        if self.answer is None or self.answer.status != 200:
            raise _Skipped("there is no run yet")
        value = self.answer.value
        found = diagnosis.judge_protocol(value.get("protocol") if isinstance(value, dict) else None)
        try:
            self.manifest = read(Manifest, self.answer.body, MAX_REPLY)
        except Refused as error:
            if found.good:
                return Check(
                    "protocol",
                    "failed",
                    f"the run's manifest cannot be read ({error.detail})"[:300],
                    _INSTALL,
                )
        return found

    def fingerprint(self) -> Check:
        """The settings mean the same here."""
        manifest = self._manifest()
        try:
            config = make_config(dict(manifest.config))
        except ConfigError as error:
            return Check(
                "fingerprint",
                "failed",
                f"this version cannot read the run's settings ({error})"[:300],
                _INSTALL,
            )
        if config.fingerprint != manifest.fingerprint:
            found = f"the run's settings mean something else here ({config.fingerprint[:12]}, not {manifest.fingerprint[:12]})"
            return Check("fingerprint", "failed", found, _INSTALL)
        self.config = config
        return Check("fingerprint", "ok", f"{config.fingerprint[:12]}, run {manifest.run[:12]}")

    def signature(self) -> Check:
        """The manifest is the coordinator's, and the coordinator is the one that this machine knows."""
        manifest = self._manifest()
        if manifest.protocol != PROTOCOL:
            raise _Skipped("signatures of another protocol are made otherwise")
        try:
            verify(manifest, manifest.coordinator)
        except Refused:
            fix = "something in between changes answers: connect to the coordinator itself, by https if it can be"
            return Check(
                "signature", "failed", "the manifest was not signed by the key that it names", fix
            )
        known = self.patient.cache / "runs" / manifest.run / "coordinator.key"
        if known.exists() and known.read_text(encoding="ascii") != manifest.coordinator:
            found = f"this is not the coordinator that the run began with: {known} has another key"
            return Check(
                "signature",
                "failed",
                found,
                "ask its operator; if the change is right, delete that file",
            )
        return Check(
            "signature",
            "ok",
            f"by the key {manifest.coordinator[:12]}" + (", known here" if known.exists() else ""),
        )

    def clock(self) -> Check:
        """Not far from the coordinator's."""
        self._line("coordinator")
        answer = self.answer if self.manifest else self.health
        issued = self.manifest.issued if self.manifest else None
        skew = diagnosis.clock_skew(answer, issued) if isinstance(answer, Answer) else None
        if skew is None or not isinstance(answer, Answer):
            raise _Skipped("the coordinator does not tell its time")
        return diagnosis.judge_clock(skew, answer.seconds / 2 + (0.0 if issued else 1.0))

    def round_trip(self) -> Check:
        """How fast small calls are."""
        return diagnosis.judge_round_trip(self._line("coordinator").round_trips())

    def download(self) -> Check:
        """How fast large ones are."""
        corpus = self._manifest().corpus
        received, seconds = self._line("coordinator").download(
            corpus.train.sha256, corpus.train.length
        )
        return diagnosis.judge_download(
            received, seconds, corpus.train.length + corpus.valid.length
        )

    def upload(self) -> Check:
        """Not measured."""
        raise _Skipped("not measured: a coordinator takes bytes only for a task that it gave")

    # The run on this machine

    def corpus(self) -> Check:
        """The copy in the cache, if there is one, is the run's."""
        corpus = self._manifest().corpus
        self._after("torch")
        copies = probes.cached_corpus(self.patient.cache, corpus)
        what = f"{corpus.name}, {amount(corpus.train.length + corpus.valid.length)}"
        if damaged := [
            str(path) for path, wanted in copies.items() if probes.hash_of_file(path) != wanted
        ]:
            found = f"{what}: the copy in the cache is damaged, {' and '.join(damaged)} has another hash than the run's"
            return Check(
                "corpus",
                "failed",
                found,
                f"delete {' and '.join(damaged)}; the worker then fetches it again",
            )
        if len(copies) < 2:
            return Check("corpus", "ok", f"{what}: a worker fetches it when it first joins")
        return Check("corpus", "ok", f"{what}: the copy in the cache has the run's hash")

    def data(self) -> Check:
        """A corpus that is on this machine is the run's."""
        if not self.patient.url:
            raise _Skipped("name a coordinator's address to compare it with")
        manifest = self._manifest()
        self._after("torch")
        run = manifest.corpus
        if probes.corpus_hashes(
            self.patient.data, self.patient.data_folder, self.patient.cache
        ) != (run.train.sha256, run.valid.sha256):
            fix = f"nothing, if the run's own is meant: workers get it from there; else start a coordinator with --data {self.patient.data}"
            return Check(
                "data",
                "failed",
                f"{self.patient.data} is not the corpus of the run ({run.name}): it has another hash",
                fix,
            )
        return Check("data", "ok", f"{self.patient.data} is the corpus of the run")

    def speed(self) -> Check:
        """What a task would be."""
        self._after("torch", "device", "fingerprint", "memory")
        if self.config is None:
            raise _Skipped("the run's settings are not known")
        step = probes.seconds_per_step(self.config, self.place)
        try:
            status = read(Status, self._line().get("/v1/status").body, MAX_REPLY)
        except (Refused, httpx2.HTTPError):
            return diagnosis.judge_speed(step, 0.0, None, 0.0)
        lasts = [
            block.round.open_seconds + block.round.deadline_seconds
            for block in status.blocks
            if block.round and block.block == 1
        ]
        return diagnosis.judge_speed(step, status.task_seconds, status.task_steps, sum(lasts))


def examine(patient: Patient) -> Iterator[Check]:
    """Every check when it is done; what hangs (a name server, a disk, a driver) ends the examination, not the caller."""
    exam, done = _Exam(patient), Queue[Check]()
    threading.Thread(target=exam.run, args=(done,), name="doctor", daemon=True).start()
    end = time.monotonic() + LOADING
    names = list(exam.checks())
    for index, name in enumerate(names):
        try:
            yield done.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            yield diagnosis.judge_unended(name)
            yield from (
                Check(left, "skipped", f"`{name}` took all the time") for left in names[index + 1 :]
            )
            return
        if name == "torch":
            end = time.monotonic() + LIMIT


def show(patient: Patient, *, as_json: bool) -> bool:
    """Print every check as it is done, or all as JSON; whether none failed."""
    out = Console(
        file=sys.stdout, soft_wrap=True, highlight=False
    )  # now: what waits takes sys.stdout over
    names, checks = [*_Exam(patient).checks(), "done"], list[Check]()
    with console.status(f"examining: {names[0]}") as waiting:
        for check in examine(patient):
            checks.append(check)
            waiting.update(f"examining: {names[len(checks)]}")
            if not as_json:
                waiting.stop()  # it may be on the same screen
                out.print(_lines(check))
                waiting.start()
    good = all(check.state != "failed" for check in checks)
    if as_json:
        print(json.dumps({"ok": good, "checks": [asdict(check) for check in checks]}))
    return good


def _lines(check: Check) -> Text:
    said = Text.assemble(
        (f"{check.state:<8}", _COLOURS[check.state]), f" {check.name:<12} {check.found}"
    )
    return said.append(f"\n{'':<22}{check.fix}") if check.fix else said
