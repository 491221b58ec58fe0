"""`blocktrain coordinator`: start a run or continue it, and print what happens."""

from __future__ import annotations

import gc
import json
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self
from urllib.parse import quote

from cyclopts import Parameter

from blocktrain.cli.environment import (
    OPERATOR_TOKEN,
    STAGE_KEY,
    cache_folder,
    data_folder,
    new_run_folder,
    read_config,
)
from blocktrain.cli.flags import (
    AllowHost,
    BeginFlags,
    Coordination,
    Json,
    ScoreBytes,
    ScoreSeconds,
    SettingsFlags,
    Token,
    Track,
    named_settings,
    named_text,
)
from blocktrain.config import (
    DERIVED,
    TOKENIZERS,
    Config,
    Origin,
    read_new_settings,
    read_origin,
)
from blocktrain.coordinator.limits.quotas import DiskLimits
from blocktrain.coordinator.policy import Policy, make_policy, policy_for_size
from blocktrain.errors import ConfigError
from blocktrain.files import write_atomic
from blocktrain.serving.line.address import is_loopback, parse_address
from blocktrain.units import parse_bytes

if TYPE_CHECKING:
    from blocktrain.watch.feed import Listener
    from blocktrain.watch.scoring import ScoringThread
    from blocktrain.watch.server import Server, WatchedCoordinator

# A merge may hold the interpreter this long while a request waits; it yields many times.
SWITCH_SECONDS = 0.0005
SCORE_SECONDS = 10.0
LAST_SCORE_SECONDS = 60.0  # --exit waits this long for the scores of the last versions


@dataclass(frozen=True)
class ListenFlags:
    """Where a coordinator listens, and to whom."""

    listen: Annotated[str, Parameter(help="Address and port; port 0 takes a free one.")] = (
        "127.0.0.1:8470"
    )
    token: Token = ""
    open: Annotated[
        bool,
        Parameter(
            help="Listen beyond this machine without a token: anyone who finds it may join.",
            negative=(),
        ),
    ] = False
    allow_host: AllowHost = ()
    tls: Annotated[
        tuple[Path, Path] | None,
        Parameter(help="Certificate and key (PEM files) to serve https with.", negative=()),
    ] = None

    def parse(self) -> tuple[str, int]:
        """Host and port; an address that strangers can reach needs a token."""
        host, port = parse_address(self.listen)
        if not self.token and not self.open and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines: "
                "give --token SECRET (or --open to let anyone join)"
            )
        return host, port


@dataclass(frozen=True)
class CoordinatorFlags:
    """What a coordinator does beside the run; it may differ at every start."""

    exit: Annotated[
        bool,
        Parameter(
            help="Leave when the run is finished, instead of staying for `pull` and `status`.",
            negative=(),
        ),
    ] = False
    score_bytes: ScoreBytes = 65536
    score_seconds: ScoreSeconds = SCORE_SECONDS
    track: Track = ()
    disk_limit: Annotated[
        str,
        Parameter(
            help="How much the run may have in its folder, for example 200GB (without the corpus). "
            "Beyond that it takes no updates until you start it again with more. By default "
            "until little is left on the disk."
        ),
    ] = ""
    worker_disk_limit: Annotated[
        str,
        Parameter(
            help="How much of one worker may be there that no round has taken yet. By default "
            "eight of the longest updates of the model (without limit if --undefended)."
        ),
    ] = ""

    def limits(self) -> DiskLimits:
        texts = (self.disk_limit, self.worker_disk_limit)
        return DiskLimits(*(parse_bytes(text) if text else None for text in texts))


class RunRequest(NamedTuple):
    """What the command line and the settings file say about the run."""

    config: Config
    policy: Policy
    data: str
    origin: Origin | None = None


def coordinator(
    *,
    begin: Annotated[BeginFlags | None, Parameter(name="*")] = None,
    out: Path | None = None,
    address: Annotated[ListenFlags | None, Parameter(name="*")] = None,
    config: Path | None = None,
    flags: Annotated[CoordinatorFlags | None, Parameter(name="*")] = None,
    settings: SettingsFlags = None,
    coordination: Coordination = None,
    json_: Json = False,
) -> None:
    """Coordinate a run: hand out tasks, merge updates, publish versions. It needs no GPU.

    Workers join with the command that it prints. Everything is in the folder --out: stop it,
    start it again with the same folder, and the run goes on.

    Parameters
    ----------
    out
        The folder of the run; by default a new one under runs/. One that holds a run is continued.
    config
        A TOML file with settings, `data`, and a table [coordination]; flags win over it.
    """
    where, begin = address or ListenFlags(), begin or BeginFlags()
    where.parse()  # first: what follows takes a while
    named = named_settings(settings), named_settings(coordination)
    request = read_request(config, begin, *named, out)
    folder = out or new_run_folder(request.data)
    flags = flags or CoordinatorFlags()
    limits = flags.limits()
    if flags.track:
        from blocktrain.watch.trackers import require_trackers

        require_trackers(flags.track)  # before a folder is made
    with RunningCoordinator(folder, where, limits) as running:
        if config or begin.data or any(named):
            running.require(request)
        _announce(running.commands, json_)
        _serve(running, request, flags)


class RunningCoordinator:
    """A coordinator that answers in threads of this process, as long as its `with` block lasts."""

    def __init__(self, folder: Path, where: ListenFlags, limits: DiskLimits | None = None) -> None:
        from blocktrain.watch.server import open_coordinator

        self.folder = folder
        self._existed = folder.exists()
        self._was_empty = not self._existed or (folder.is_dir() and not any(folder.iterdir()))
        self.coordinator = open_coordinator(folder)
        self.coordinator.run.quotas.limits = limits or DiskLimits()
        try:
            self.server = self._bind(where)
        except BaseException:
            self._clear()
            raise
        self._scorer: ScoringThread | None = None
        certificate = where.tls[0] if where.tls else None
        self.commands = Commands(self.server.url, where.token, folder, _self_signed(certificate))

    def _bind(self, where: ListenFlags) -> Server:
        from blocktrain.watch.server import Listen, Server

        host, port = where.parse()
        certificate, key = where.tls or (None, None)
        operator = _secret(self.folder / OPERATOR_TOKEN)
        listen = Listen(
            host,
            port,
            where.token,
            operator,
            where.allow_host,
            _secret(self.folder / STAGE_KEY).encode(),
            certificate=certificate,
            key=key,
        )
        return Server(self.coordinator, listen)

    def require(self, request: RunRequest) -> None:
        """Refuse to go on with a run of other settings."""
        if not self.coordinator.ready:
            return
        run, config = self.coordinator.run, request.config
        # A tokenizer is looked up when a run begins; a file is called tokenizer.json then.
        names = (config.tokenizer, "tokenizer.json" if config.tokenizer not in TOKENIZERS else "")
        if run.config.tokenizer in names:
            found = {name: getattr(run.config, name) for name in ("tokenizer", *DERIVED)}
            config = config.replace(**found)
        if (run.config, run.policy) != (config, request.policy):
            raise ConfigError(
                f"{self.folder} holds a run with other settings; "
                "leave the settings out to continue it, or choose another --out"
            )

    def start(
        self,
        request: RunRequest,
        score_bytes: int,
        warn: Callable[[str], None] = lambda _: None,
        score_seconds: float = SCORE_SECONDS,
    ) -> None:
        """Answer at once, prepare the run meanwhile, then close rounds and score versions."""
        from blocktrain.watch.scoring import ScoringThread
        from blocktrain.web.server import allow_connections

        allow_connections()
        self._scorer = ScoringThread(self.coordinator, score_bytes, warn, score_seconds)
        self.server.start()
        if not self.coordinator.ready:
            _prepare(self.coordinator, *request)
        self.coordinator.close_in_background()
        if score_bytes:
            self._scorer.start()

    def settle(self) -> None:
        """Wait until waiting workers have learned that the run is over, and all is scored."""
        time.sleep(2 * self.coordinator.run.options.poll)
        if self._scorer is not None:
            self._scorer.settle(LAST_SCORE_SECONDS)

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self.server.stop()
        self._clear()

    def _clear(self) -> None:
        unused = self._was_empty and not self.coordinator.ready
        self.coordinator.close()
        if unused:  # a port that is taken, a certificate or a corpus that cannot be read
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._existed:
                self.folder.mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_request(
    config: Path | None,
    begin: BeginFlags,
    settings: dict[str, Any],
    policy: dict[str, Any],
    out: Path | None = None,
) -> RunRequest:
    """What flags and a settings file say together; flags win."""
    from_file, of_run = read_new_settings(config)
    coordination = from_file.pop("coordination", {})
    if not isinstance(coordination, dict):
        raise ConfigError(f"{config}: [coordination] must be a table of settings")
    named = {**from_file, **settings}
    origin = begin.origin(read_origin(of_run, config), out)
    text: str | None = "stdlib"
    if origin is None:
        chosen = read_config(named)
    else:
        from blocktrain.runs.prepare import continue_in_process
        from blocktrain.terminal import console

        chosen, text, sentence = continue_in_process(origin, named)
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    by_size = policy_for_size(chosen) if named.get("size") else {}
    rules = make_policy({**by_size, **coordination, **policy})
    return RunRequest(chosen, rules, named_text(begin.data, of_run, text), origin)


def _secret(path: Path) -> str:
    """Made once and kept in the file, readable by its owner alone."""
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(24).encode(), private=True)
    return path.read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class Commands:
    """The commands and addresses that a coordinator prints; they work as they are printed."""

    url: str
    join_token: str
    folder: Path
    ca: Path | None = None
    """A certificate that no authority has signed: clients must name it to trust it."""

    @property
    def _access(self) -> str:
        token = f" --token {shlex.quote(self.join_token)}" if self.join_token else ""
        return f"{token} --ca {shlex.quote(str(self.ca))}" if self.ca else token

    @property
    def join(self) -> str:
        return f"blocktrain worker {self.url}{self._access}"

    @property
    def watch(self) -> str:
        return f"blocktrain status {self.url} --watch{self._access}"

    @property
    def pull(self) -> str:
        out = self.folder.with_name(f"{self.folder.resolve().name}-model")
        return f"blocktrain pull {self.url} --out {shlex.quote(str(out))}{self._access}"

    @property
    def page(self) -> str:
        fragment = f"#token={quote(self.join_token, safe='')}" if self.join_token else ""
        return f"{self.url}/{fragment}"


def _self_signed(certificate: Path | None) -> Path | None:
    """The certificate itself, if it is its own issuer."""
    if certificate is None:
        return None
    from cryptography import x509

    parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
    return certificate.resolve() if parsed.issuer == parsed.subject else None


def _announce(printed: Commands, json_: bool) -> None:
    from blocktrain.terminal import console

    if json_:
        fields = {"url": printed.url, "folder": str(printed.folder)}
        print(json.dumps({**fields, "join": printed.join, "page": printed.page}), flush=True)
    console.print(
        f"run folder  {printed.folder}\n"
        f"join with   {printed.join}\n"
        f"page        {printed.page}\n"
        f"watch with  {printed.watch}\n"
        f"fetch with  {printed.pull}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _serve(running: RunningCoordinator, request: RunRequest, flags: CoordinatorFlags) -> None:
    """Coordinate, and print what happens until stopped."""
    from blocktrain.terminal import warn
    from blocktrain.watch.trackers import tracking

    server, settings = running.server, request.config.model_dump()
    try:
        running.start(request, flags.score_bytes, warn, flags.score_seconds)
        with tracking(flags.track, running.folder, settings, warn) as track:
            lines = EventLines(running.coordinator, running.commands.pull, track)
            gc.freeze()  # these stay: a full collection, which blocks answers, can skip them
            sys.setswitchinterval(SWITCH_SECONDS)
            while server.serves(0.5):
                if lines.print_new() and flags.exit:
                    running.settle()
                    lines.print_new()
                    break
    except KeyboardInterrupt:
        pass  # everything is on the disk
    if server.failure is not None:
        raise server.failure


def _prepare(
    running: WatchedCoordinator, config: Config, policy: Policy, data: str, origin: Origin | None
) -> None:
    """Make version 0 and the corpus in another process: only that one needs torch."""
    from blocktrain.runs.prepare import prepare_in_process
    from blocktrain.terminal import bar

    beside = running.run.store.address or None  # a folder on the same disk has enough room
    with tempfile.TemporaryDirectory(dir=beside, prefix="prepare-") as folder:
        place = (data, data_folder(), cache_folder())
        with bar("preparing the corpus") as progress:
            resolved = prepare_in_process(
                config, place, Path(folder), origin, lambda _, share: progress(share)
            )
        running.begin(resolved, policy, data, Path(folder))


class EventLines:
    """Prints a line for every version, worker and score, and for the end of the run."""

    def __init__(
        self,
        coordinator: WatchedCoordinator,
        pull_command: str,
        track: Callable[[dict[str, Any]], None],
    ) -> None:
        from blocktrain.terminal import console

        self._pull_command, self._track = pull_command, track
        self._feed = coordinator.feed
        self._listener = self._listen()
        self._warned = False
        run = coordinator.run
        console.print(
            f"run {run.id[:12]}: {run.config.blocks} blocks, {run.config.length}",
            highlight=False,
        )
        self._finished = coordinator.finished is not None
        if coordinator.finished:
            self._print_end(coordinator.finished)

    def _listen(self) -> Listener:
        from blocktrain.watch.feed import Listener

        listener = Listener(kinds=("worker", "version", "score", "finish"))
        self._feed.listen(listener)
        return listener

    def print_new(self) -> bool:
        """Print what is new; True when the run is finished."""
        from blocktrain.terminal import console, warn

        if self._listener.closed:  # it was dropped because too much happened at once
            self._listener = self._listen()
        for event in self._listener.take():
            self._track(event.value)
            if event.kind != "finish":
                console.print(_line(event.value), highlight=False, markup=False, soft_wrap=True)
            elif not self._finished:
                self._finished = True
                self._print_end(event.value["reason"])
        if self._feed.problem and not self._warned:
            self._warned = True
            warn(self._feed.problem)
        return self._finished

    def _print_end(self, reason: str) -> None:
        from rich.markup import escape

        from blocktrain.terminal import console

        console.print(f"[bold]{escape(reason)}[/]", highlight=False, soft_wrap=True)
        console.print(
            f"fetch the model with: {self._pull_command}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _line(event: dict[str, Any]) -> str:
    """A worker, a version or a score in one line."""
    from blocktrain.terminal import score_line
    from blocktrain.units import amount

    if event["kind"] == "worker":
        device = f" ({event['device']})" if event["state"] == "joined" else ""
        return f"worker {event['name'] or event['worker'][:12]} {event['state']}{device}"
    moved = f"{amount(event['bytes_in'])} in, {amount(event['bytes_out'])} out"
    if event["kind"] == "score":
        return f"{score_line(event)} ({moved})"
    loss = "" if event["loss"] is None else f", loss {event['loss']:.3f}"
    version = f"block {event['block']} version {event['version']}"
    return f"{version}: {event['steps']} steps{loss} ({moved})"
