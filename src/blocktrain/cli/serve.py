"""Commands that serve a trained run: `serve`, which users talk to, and the stages behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from blocktrain.cli.environment import require_model
from blocktrain.cli.flags import AllowHost, DeviceName, Json, Token, Yes, at_least
from blocktrain.errors import BlockTrainError, ConfigError
from blocktrain.serving.line.address import is_loopback, parse_address, parse_route, read_key

if TYPE_CHECKING:
    from blocktrain.serving.chat_template import ChatTemplate
    from blocktrain.serving.entry.entry import Entry
    from blocktrain.serving.entry.route import FindStages
    from blocktrain.serving.openai_api import ServingRules
    from blocktrain.serving.openai_messages import Defaults
    from blocktrain.serving.stage.stage import Stage, StageGuard
    from blocktrain.web.client import HttpClient
    from blocktrain.web.server import AppServer, Where

Plaintext = Annotated[
    bool,
    Parameter(
        help="Do not encrypt connections with a key: for a network that nobody else can read.",
        negative=(),
    ),
]
ASK_SECONDS = 5.0  # a coordinator has this long to answer
log = logging.getLogger("blocktrain.serve")


@dataclass(frozen=True)
class ApiFlags:
    """Where `serve` listens, to whom, and to how many."""

    listen: Annotated[
        str, Parameter(help="Address and port of the API and the page; port 0 takes a free one.")
    ] = "127.0.0.1:8480"
    api_keys: Annotated[
        Path | None,
        Parameter(help="File with one API key a line; needed to listen beyond this machine."),
    ] = None
    open: Annotated[
        bool,
        Parameter(
            help="Listen beyond this machine without API keys: anyone may use it.", negative=()
        ),
    ] = False
    allow_host: AllowHost = ()
    tls: Annotated[
        tuple[Path, Path] | None,
        Parameter(help="Certificate and key (PEM files) to serve https with.", negative=()),
    ] = None
    max_requests: Annotated[
        int, at_least(1), Parameter(help="Requests that are answered at the same time.")
    ] = 8
    queue: Annotated[
        int,
        at_least(0),
        Parameter(help="Requests that may wait; more are refused with 429, try again later."),
    ] = 32

    def parse(self) -> Where:
        """Where to listen; an address that strangers can reach needs keys."""
        from blocktrain.web.server import Where

        host, port = parse_address(self.listen)
        if self.api_keys is None and not self.open and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines: "
                "give --api-keys FILE (or --open to let anyone in)"
            )
        certificate, key = self.tls or (None, None)
        return Where(host, port, certificate=certificate, key=key)

    def rules(self, model: str, defaults: Defaults, template: ChatTemplate) -> ServingRules:
        from blocktrain.serving.openai_api import ServingRules
        from blocktrain.web.door import make_door
        from blocktrain.web.guard import Keys, read_keys

        keys = read_keys(self.api_keys) if self.api_keys else Keys()
        host, _ = parse_address(self.listen)
        door = make_door(host, self.allow_host, secret=self.api_keys is not None)
        return ServingRules(
            model, keys, defaults, template, self.max_requests, self.queue, door=door
        )


@dataclass(frozen=True)
class AnswerFlags:
    """How `serve` answers requests that do not say how."""

    mode: Annotated[
        Literal["exact", "sweep", "autoregressive"] | None,
        Parameter(
            help="exact: drafted here, checked by all blocks; the same text as autoregressive, "
            "which asks all hosts for each token. sweep: the whole text at once. By default exact, "
            "or autoregressive for models that cannot be checked in one sweep."
        ),
    ] = None
    sweeps: Annotated[
        int,
        at_least(1),
        Parameter(help="Traversals of mode sweep; more come closer to the exact text."),
    ] = 1
    draft: Annotated[
        Literal["first-block", "none"] | None,
        Parameter(
            help="What mode sweep starts from: the first block's text, or pure noise "
            "(the default if a block alone cannot write)."
        ),
    ] = None
    no_degraded: Annotated[
        bool,
        Parameter(
            help="Fail an answer when a block is missing, instead of continuing without it.",
            negative=(),
        ),
    ] = False
    deadline: Annotated[
        float,
        at_least(1),
        Parameter(help="Seconds that an answer may take; one that is not complete by then fails."),
    ] = 600.0
    chat_template: Annotated[
        Path | None,
        Parameter(
            help="Jinja template that makes one text of the messages of a chat; by default "
            "model/chat_template.jinja of the run."
        ),
    ] = None

    def template(self, run: Path) -> ChatTemplate:
        from blocktrain.runs.served import chat_template
        from blocktrain.serving.chat_template import read_template

        return read_template(self.chat_template) if self.chat_template else chat_template(run)

    def defaults(self, entry: Entry) -> Defaults:
        """The flags, completed with what this model can do."""
        from blocktrain.serving.openai_messages import Defaults

        mode = self.mode or ("exact" if "exact" in entry.modes() else "autoregressive")
        return Defaults(
            mode, self.sweeps, self.draft or entry.draft(), not self.no_degraded, self.deadline
        )


@dataclass(frozen=True)
class RouteFlags:
    """The stages that `serve` uses, and how."""

    route: Annotated[
        str,
        Parameter(
            help="Stages as host:port,host:port, or the coordinator that they announce themselves "
            "to (http://host:port). Without it the whole model is served from here."
        ),
    ] = ""
    token: Token = ""
    key: Annotated[
        Path | None,
        Parameter(
            help="File with the secret that all hosts share. Connections with a key are encrypted, "
            "and both sides prove that they know it. Needed for stages beyond this machine and for "
            "those that a coordinator lists: it is the file stage.key in its folder."
        ),
    ] = None
    plaintext: Plaintext = False
    ca: Annotated[
        Path | None,
        Parameter(
            help="Certificate (PEM) that signed that of the coordinator in --route, or those of "
            "the stages that --route names."
        ),
    ] = None
    wire: Annotated[
        Literal["fp32", "fp16"],
        Parameter(help="Numbers on the wire; fp16 halves the bytes and may change the text."),
    ] = "fp32"

    check: Annotated[
        float,
        Parameter(
            help="Share of the sweeps of which one block is computed again by another holder, so "
            "that a stage that lies is found and left out."
        ),
    ] = 0.02

    def secret(self) -> bytes:
        """The key. Without one, text goes only to stages that are named and on this machine."""
        if self.key is not None:
            return read_key(self.key)
        if "://" in self.route:
            raise ConfigError(
                "a coordinator can list stages of anybody: give --key FILE, the file stage.key in "
                "the coordinator's folder"
            )
        away = [name for name in parse_route(self.route) if not is_loopback(parse_address(name)[0])]
        if away:
            raise ConfigError(
                f"{away[0]} is on another machine: give --key FILE, the same on all hosts"
            )
        return b""

    def entry(self, run: Path, *, reference: bool, device: str, threads: int) -> Entry:
        from blocktrain.learning.train import pick_device
        from blocktrain.runs.served import RunModel
        from blocktrain.serving.entry.entry import Entry

        secret, listed = self.secret(), "://" in self.route
        stages = (
            _stage_finder(_coordinator(self.route, self.token, self.ca), secret)
            if listed
            else parse_route(self.route)
        )
        return Entry(
            RunModel(require_model(run), reference=reference, device=pick_device(device)),
            stages,
            key=secret,
            tls=_client_tls(None if listed else self.ca, secret, plaintext=self.plaintext),
            wire=self.wire,
            threads=threads,
            check=self.check,
        )


def _coordinator(url: str, token: str, ca: Path | None) -> HttpClient:
    from blocktrain.web.client import HttpClient

    return HttpClient(
        url, token, ca=ca if url.startswith("https://") else None, timeout=ASK_SECONDS
    )


def _stage_finder(coordinator: HttpClient, key: bytes) -> FindStages:
    """A function that asks a coordinator where the stages are. Only those with the key count."""
    from blocktrain.protocol.handshake import is_proven

    async def find(model: str) -> list[str]:
        listed = await asyncio.to_thread(coordinator.stages)
        ours = [stage for stage in listed.stages if stage.model == model]
        return [stage.address for stage in ours if is_proven(key, stage)]

    return find


def _client_tls(ca: Path | None, key: bytes, *, plaintext: bool) -> ssl.SSLContext | None:
    """How to connect to stages: by an authority, or by the key."""
    from blocktrain.serving.line.tls import trust_authority, trust_key

    if ca is not None:
        return trust_authority(ca)
    return trust_key() if key and not plaintext else None


def serve(
    run: Path,
    *,
    hosts: Annotated[RouteFlags | None, Parameter(name="*")] = None,
    api: Annotated[ApiFlags | None, Parameter(name="*")] = None,
    answers: Annotated[AnswerFlags | None, Parameter(name="*")] = None,
    reference: Yes = False,
    device: DeviceName = "cpu",
    threads: Annotated[int, at_least(1)] = 1,
    json_: Json = False,
) -> None:
    """Serve a trained run: an OpenAI-compatible API and a page to write with.

    Alone it holds the whole model; with --route it uses stages. The same seed writes the same
    bytes as `blocktrain generate`, from one host or from many. Ctrl-C first finishes the answers
    that have begun.

    Parameters
    ----------
    run
        The run folder.
    reference
        Serve the end-to-end model of the run instead, if it was trained.
    threads
        Threads that compute here; each needs a core of its own.
    """
    from blocktrain.web.server import run_loop

    hosts, api, answers = hosts or RouteFlags(), api or ApiFlags(), answers or AnswerFlags()
    listen = api.parse()

    async def serving() -> None:
        entry = hosts.entry(run, reference=reference, device=device, threads=threads)
        try:
            name, template = run.resolve().name, answers.template(run)
            rules = api.rules(name, answers.defaults(entry), template)
            _log_to_stderr()
            await serve_entry(
                entry, rules, listen, lambda server: _announce(server.url, rules.model, json_)
            )
        finally:
            await entry.aclose()

    run_loop(serving())


async def serve_entry(
    entry: Entry, rules: ServingRules, listen: Where, on_start: Callable[[AppServer], None]
) -> None:
    """Serve until stopped. `on_start` is called when it answers."""
    from blocktrain.serving.entry.answer import Request
    from blocktrain.serving.openai_api import build_app
    from blocktrain.web.server import AppServer

    server = AppServer(build_app(entry, rules), listen)  # first: the port may be taken
    await entry.start()
    for name in entry.unreachable():
        effect = "its blocks are computed here until it comes"
        if not entry.fan:
            effect = "answers fail until it comes"
        log.warning("no stage answers at %s: %s", name, effect)
    defaults = rules.defaults
    entry.check(Request(b"\n", mode=defaults.mode, sweeps=defaults.sweeps, draft=defaults.draft))
    # Announced by the running server: a reader of the announcement may stop it at once.
    await server.serve(lambda: on_start(server))


def _log_to_stderr() -> None:
    """Losses and returns of stages are worth a line each, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("blocktrain")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _announce(url: str, model: str, json_: bool) -> None:
    from blocktrain.terminal import console

    if json_:
        print(json.dumps({"url": url, "model": model}), flush=True)
    console.print(
        f"write with it  [bold]{url}[/]\nfrom code      base_url {url}/v1, model {model}",
        soft_wrap=True,
        highlight=False,
    )


@dataclass(frozen=True)
class StageFlags:
    """Where a stage listens, and to whom."""

    listen: Annotated[str, Parameter(help="Address and port; port 0 takes a free one.")] = (
        "127.0.0.1:8481"
    )
    key: Annotated[
        Path | None,
        Parameter(
            help="File with the secret that all hosts share; needed to listen beyond this machine "
            "and for --announce: there it is the file stage.key in the coordinator's folder. "
            "Connections with a key are encrypted."
        ),
    ] = None
    plaintext: Plaintext = False
    tls: Annotated[
        tuple[Path, Path] | None,
        Parameter(
            help="Certificate and key (PEM files) to use instead of those that a stage with a key "
            "makes for itself.",
            negative=(),
        ),
    ] = None
    ca: Annotated[
        Path | None,
        Parameter(
            help="Certificate (PEM) that signed that of the coordinator in --announce, or else the "
            "next stage's in a ring."
        ),
    ] = None
    announce: Annotated[
        str,
        Parameter(
            help="Coordinator to announce this stage to: http://host:port, as in `serve --route`."
        ),
    ] = ""
    token: Token = ""

    def parse(self) -> tuple[str, int]:
        """Host and port; an address that strangers can reach needs a key."""
        host, port = parse_address(self.listen)
        if self.key is None and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines: give --key FILE, the same on all hosts"
            )
        if self.announce and self.key is None:
            raise ConfigError(
                "--announce needs --key FILE: the file stage.key in the coordinator's folder"
            )
        if self.announce and host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"others cannot connect to {host}: with --announce, "
                "listen on the address by which others reach this machine"
            )
        return host, port

    def guard(self) -> StageGuard:
        """The secret and the certificates of its connections."""
        from blocktrain.serving.line.tls import load_tls, own_tls
        from blocktrain.serving.stage.stage import StageGuard

        secret = read_key(self.key) if self.key else b""
        tls = load_tls(*self.tls) if self.tls else None
        if tls is None and secret and not self.plaintext:
            tls = own_tls()
        ca = None if self.announce else self.ca
        return StageGuard(secret, tls, _client_tls(ca, secret, plaintext=self.plaintext))


def stage(
    run: Path,
    *,
    blocks: str = "",
    post: Annotated[StageFlags | None, Parameter(name="*")] = None,
    reference: Yes = False,
    device: DeviceName = "cpu",
    threads: Annotated[int, at_least(1)] = 1,
    json_: Json = False,
) -> None:
    """Hold some blocks of a trained run and compute with them for `blocktrain serve`.

    `serve` may be here or on another host. Only the files of these blocks are read. It may be
    stopped and started at any time; Ctrl-C ends it.

    Parameters
    ----------
    run
        The run folder.
    blocks
        Which, for example 2 or 2-3 or 1,3; by default all (the fusion block is the entry's).
    reference
        Hold layers of the run's end-to-end model instead, in as many groups as there are blocks.
    threads
        Threads that compute here; each needs a core of its own.
    """
    post = post or StageFlags()
    host, port = post.parse()  # first: to import torch takes a while

    from blocktrain.learning.threads import use_threads
    from blocktrain.learning.train import pick_device
    from blocktrain.runs.served import RunModel
    from blocktrain.serving.blocks import parse_blocks, serve_blocks
    from blocktrain.serving.stage.stage import Stage
    from blocktrain.web.server import allow_connections, run_loop

    guard = post.guard()
    allow_connections()
    use_threads(threads)
    source = RunModel(require_model(run), reference=reference, device=pick_device(device))
    served = serve_blocks(source, parse_blocks(blocks))

    async def serving() -> None:
        stage, stop = Stage(served, guard, threads=threads), _stop_event()
        await stage.start(host, port)
        try:
            _announce_stage(stage, json_)
            notices = (
                [_keep_announcing(_coordinator(post.announce, post.token, post.ca), stage)]
                if post.announce
                else []
            )
            await _first(stop.wait(), *notices)
        finally:
            await stage.aclose()

    run_loop(serving())


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them ends or fails, and cancel the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _keep_announcing(coordinator: HttpClient, stage: Stage) -> None:
    """Announce the stage again and again; a coordinator that does not answer may do so later."""
    from blocktrain.protocol.handshake import prove_notice
    from blocktrain.protocol.messages import STAGE_NOTICE_SECONDS, StageNotice
    from blocktrain.web.client import retry_later

    while True:
        now = int(1000 * time.time())
        notice = StageNotice(address=stage.address, model=stage.blocks.facts.model, issued=now)
        notice = prove_notice(stage.guard.key, notice)
        try:
            await asyncio.to_thread(coordinator.announce_stage, notice)
        except BlockTrainError as error:
            if not retry_later(error):
                raise
        await asyncio.sleep(STAGE_NOTICE_SECONDS)


def _stop_event() -> asyncio.Event:
    """Set by Ctrl-C and SIGTERM."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C interrupts
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, event.set)
    return event


def _announce_stage(stage: Stage, json_: bool) -> None:
    from blocktrain.terminal import console

    facts = stage.blocks.facts
    if json_:
        fields = {
            "address": stage.address,
            "kind": facts.kind,
            "blocks": facts.blocks,
            "fingerprint": facts.fingerprint,
            "model": facts.model,
        }
        print(json.dumps(fields), flush=True)
    name = "layers of the reference, groups" if facts.kind == "reference" else "blocks"
    console.print(
        f"serving {name} {', '.join(map(str, facts.blocks))} at [bold]{stage.address}[/]",
        soft_wrap=True,
        highlight=False,
    )
