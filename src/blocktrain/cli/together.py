"""The commands that talk, from coordinator to audit. Parsing and printing only; the work is in `coordination`."""

from __future__ import annotations

import gc
import ipaddress
import json
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from blocktrain.cli.environment import cache_folder, data_folder, new_run_folder
from blocktrain.cli.flags import Coordination, Json, Settings, Token, at_least, given
from blocktrain.config import Config, make_config, read_settings
from blocktrain.coordinator.policy import Policy, make_policy
from blocktrain.errors import ConfigError, Interrupted, RunError
from blocktrain.files import write_atomic

if TYPE_CHECKING:
    from blocktrain.coordinator.calls import Coordinator
    from blocktrain.coordinator.server import Server
    from blocktrain.web.client import HttpClient

SWITCH_SECONDS = 0.0005  # that a merge may compute while an answer waits for the interpreter, which it does many times
Ca = Annotated[
    Path | None,
    Parameter(
        help="Certificate (PEM) that the coordinator's own must be signed by, if it is not a public one."
    ),
]
LAST_SCORE_SECONDS = 60.0  # that --exit waits for the last versions to be scored
Yes = Annotated[bool, Parameter(negative=())]


@dataclass(frozen=True)
class Address:
    """Where a coordinator listens, and to whom."""

    listen: Annotated[str, Parameter(help="Address and port; port 0 takes a free one.")] = (
        "127.0.0.1:8470"
    )
    token: Token = ""
    open: Annotated[
        bool,
        Parameter(
            help="Listen beyond this machine without a token: anyone who finds the address may join.",
            negative=(),
        ),
    ] = False
    tls: Annotated[
        tuple[Path, Path] | None,
        Parameter(help="Certificate and key (PEM files) to serve https with.", negative=()),
    ] = None

    def parse(self) -> tuple[str, int]:
        """Host and port, refusing an address that strangers can reach unless there is a token."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"--listen {self.listen!r} is not host:port, for example 127.0.0.1:8470"
            )
        host = host.strip("[]")
        if not self.token and not self.open and not _loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines: give --token SECRET (or --open to let anyone join)"
            )
        return host, int(port)


@dataclass(frozen=True)
class Conduct:
    """What a coordinator does beside the run; not part of it, and may be another at every start."""

    exit: Annotated[
        bool,
        Parameter(
            help="Leave when the run is finished, instead of staying for `pull` and `status`.",
            negative=(),
        ),
    ] = False
    score_bytes: Annotated[
        int,
        at_least(0),
        Parameter(
            help="Bytes of the valid part on which new versions are scored, in a process beside; 0: none."
        ),
    ] = 65536


def coordinator(
    *,
    data: str | None = None,
    out: Path | None = None,
    address: Annotated[Address | None, Parameter(name="*")] = None,
    config: Path | None = None,
    conduct: Annotated[Conduct | None, Parameter(name="*")] = None,
    settings: Settings = None,
    coordination: Coordination = None,
    json_: Json = False,
) -> None:
    """Coordinate a run: hand out tasks, merge updates, publish versions. Workers join with the command that it prints.

    Everything is in the folder --out: stop it, start it again with the same folder, and the run goes on. It needs no GPU.

    Parameters
    ----------
    data
        stdlib (the default), wikitext2, wikitext103, or the path of a text file or folder. Workers get it from here.
    out
        The folder of the run; by default a new one under runs/. One that holds a run is continued.
    config
        A TOML file with settings, `data`, and a table [coordination]; flags win over it.
    """
    from blocktrain.coordinator.calls import open_coordinator
    from blocktrain.coordinator.server import Listen, Server

    where = address or Address()
    host, port = where.parse()
    asked = _asked(config, data, given(settings), given(coordination))
    folder = out or new_run_folder(asked[2])
    running = open_coordinator(folder)
    try:
        _require_same_run(
            running, asked, folder, bool(config or data or given(settings) or given(coordination))
        )
        operator = _operator_token(folder)
        certificate, key = where.tls or (None, None)
        server = Server(
            running, Listen(host, port, where.token, operator, certificate=certificate, key=key)
        )
        _announce(server.url, folder, where.token, json_)
        _serve(running, server, asked, conduct or Conduct())
    finally:
        running.close()


def _asked(
    config: Path | None, data: str | None, settings: dict[str, Any], policy: dict[str, Any]
) -> tuple[Config, Policy, str]:
    from_file, of_run = read_settings(config)
    corpus = str(of_run.get("data", "stdlib")) if data is None else data
    coordination = from_file.pop("coordination", {})
    if not isinstance(coordination, dict):
        raise ConfigError("[coordination] is a table of settings")
    return make_config({**from_file, **settings}), make_policy({**coordination, **policy}), corpus


def _require_same_run(
    running: Coordinator, asked: tuple[Config, Policy, str], folder: Path, named: bool
) -> None:
    if running.ready and named and (running.live.config, running.live.policy) != asked[:2]:
        raise ConfigError(
            f"{folder} holds a run with other settings; leave the settings out to continue it, or choose another --out"
        )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _operator_token(folder: Path) -> str:
    """Made once, kept in the folder, readable by its owner alone."""
    path = folder / "operator.token"
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(24).encode())
        path.chmod(0o600)
    return path.read_text(encoding="ascii").strip()


def _announce(url: str, folder: Path, token: str, json_: bool) -> None:
    from blocktrain.terminal import console

    join = f"blocktrain worker {url}" + (f" --token {token}" if token else "")
    page = f"{url}/" + (f"#token={quote(token, safe='')}" if token else "")
    if json_:
        print(
            json.dumps({"url": url, "folder": str(folder), "join": join, "page": page}), flush=True
        )
    console.print(
        f"run folder [bold]{folder}[/]\njoin with   [bold]{join}[/]\npage        [bold]{page}[/]",
        soft_wrap=True,
    )
    console.print(f"watch with  blocktrain status {url} --watch", soft_wrap=True)


def _serve(
    running: Coordinator, server: Server, asked: tuple[Config, Policy, str], conduct: Conduct
) -> None:
    """Answer from the first moment; prepare the run beside it; tell what happens until stopped."""
    from blocktrain.watch.console import Watch, warn
    from blocktrain.watch.scoring import Scorer
    from blocktrain.web.server import allow_connections

    allow_connections()
    server.start()
    scorer = Scorer(running, conduct.score_bytes, warn)
    try:
        if not running.ready:
            _prepare(running, *asked)
        watch = Watch(running)
        gc.freeze()  # what is here stays: a full collection, in which nobody is answered, need not look at it again
        sys.setswitchinterval(SWITCH_SECONDS)
        running.live.close_beside()
        if conduct.score_bytes:
            scorer.start()
        while server.serves(0.5):
            if watch.tell() and conduct.exit:
                time.sleep(
                    2 * running.live.options.poll
                )  # waiting workers ask once more and are told that it is over
                scorer.settle(LAST_SCORE_SECONDS)
                watch.tell()
                break
    except KeyboardInterrupt:
        pass  # everything is on the disk
    finally:
        scorer.close()
        server.stop()
    if server.failure is not None:
        raise server.failure


def _prepare(running: Coordinator, config: Config, policy: Policy, data: str) -> None:
    """Version 0 and the corpus, made in a process of its own: it needs torch, the coordinator does not."""
    from blocktrain.runs.preparing import CorpusPlace, prepare_in_process

    with tempfile.TemporaryDirectory(
        dir=running.live.store.blobs.folder, prefix="prepare-"
    ) as folder:
        prepare_in_process(config, CorpusPlace(data, data_folder(), cache_folder()), Path(folder))
        running.begin(config, policy, data, Path(folder))


def worker(
    url: str,
    *,
    token: Token = "",
    device: str = "auto",
    memory: str = "",
    name: str = "",
    cache: Path | None = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Join a run and train one of its blocks. Dials out only; may be stopped and started at any time.

    Ctrl-C finishes the task first; twice leaves at once. Nothing that was acknowledged is lost either way.

    Parameters
    ----------
    url
        The coordinator's address, as it printed it.
    device
        cpu, cuda, cuda:N, mps, or auto (the best there is).
    memory
        What training may use, for example 4GB; a block that needs more is refused.
    name
        What `status` calls this machine.
    cache
        Folder for the corpus, weights and the state between tasks; by default ~/.cache/blocktrain.
    """
    from blocktrain.worker.command import WorkerOptions, run_worker

    options = WorkerOptions(url, token, device, memory, name, cache or cache_folder(), ca, json_)
    sys.exit(run_worker(options))


def doctor(
    url: str = "",
    *,
    token: Token = "",
    device: str = "auto",
    memory: str = "",
    cache: Path | None = None,
    ca: Ca = None,
    data: str = "",
    json_: Json = False,
) -> None:
    """Find out why a worker does not join: this machine, the line, and the run. Changes nothing; takes some seconds.

    Each line is ok, a warning or failed, with what fixes it. The exit code is 2 if a check failed.

    Parameters
    ----------
    url
        The coordinator's address, as it printed it; without it only this machine is looked at.
    device
        The device that would train: cpu, cuda, cuda:N, mps, or auto (the best there is).
    memory
        What training may use, for example 4GB, as with `blocktrain worker`.
    cache
        The worker's folder; by default ~/.cache/blocktrain.
    data
        Also compare this corpus (a name or a path on this machine) with the run's.
    """
    from blocktrain.worker.doctor.doctor import Patient, show

    patient = Patient(cache or cache_folder(), url, token, device, memory, ca, data, data_folder())
    if not show(patient, as_json=json_):
        raise RunError("a check failed; see above what fixes it")


def status(
    url: str, *, watch: Yes = False, token: Token = "", ca: Ca = None, json_: Json = False
) -> None:
    """Blocks, rounds, workers and bytes of a run.

    Parameters
    ----------
    url
        The coordinator's address.
    watch
        Stay, and show it again every two seconds (with --json: one object a line).
    """
    from blocktrain.watch.console import show_status

    client = _client(url, token, ca)
    try:
        show_status(client, watch=watch, as_json=json_)
    except KeyboardInterrupt:
        raise Interrupted("stopped watching") from None
    finally:
        client.close()


def kick(url: str, worker: str, *, token: Token = "", reason: str = "", ca: Ca = None) -> None:
    """Remove a worker from a run: its open tasks are free at once, and its key cannot join again.

    Parameters
    ----------
    url
        The coordinator's address.
    worker
        The worker's id, or the beginning of it, as `status` shows it.
    token
        The operator's token: the content of operator.token in the coordinator's folder.
    reason
        Why; it is kept in the ledger.
    """
    from blocktrain.watch.console import kick_worker

    client = _client(url, token, ca)
    try:
        print(f"kicked {kick_worker(client, worker, reason)}")
    finally:
        client.close()


def pull(url: str, *, out: Path, token: Token = "", ca: Ca = None, json_: Json = False) -> None:
    """Fetch the composed model of a run, running or finished, into a folder for `evaluate` and `generate`.

    Parameters
    ----------
    url
        The coordinator's address.
    out
        The run folder to make.
    """
    from blocktrain.runs.pull import pull as pull_run
    from blocktrain.terminal import console

    client = _client(url, token, ca)
    try:
        chosen = pull_run(client, out, told=lambda what: console.print(f"[dim]{what}[/]"))
    finally:
        client.close()
    if json_:
        print(json.dumps({"run": str(out), "versions": chosen.summary}))
        return
    made = ", ".join(f"{name} version {version}" for name, version in chosen.summary.items())
    console.print(
        f"{made}\nevaluate   blocktrain evaluate {out}\nwrite      blocktrain generate {out} --prompt 'The '",
        highlight=False,
    )


def audit(
    where: str, *, retrain: Yes = False, token: Token = "", ca: Ca = None, json_: Json = False
) -> None:
    """Recompute every version of a run from its public record; find updates that were lost, counted twice or never sent.

    Parameters
    ----------
    where
        A coordinator's folder (also while it runs) or its address.
    retrain
        Also train every update again, on one thread: takes as long as the workers took together.
    """
    from blocktrain.watch.console import audit_run

    if not audit_run(where, token, ca, retrain=retrain, as_json=json_):
        raise RunError("the audit found something; see above")


def replay(where: Path, *, listen: str = "127.0.0.1:0", json_: Json = False) -> None:
    """Look at a run again: serves its event log and the page on this machine, without a coordinator.

    Parameters
    ----------
    where
        A coordinator's folder (also while it runs), or an events.jsonl.
    listen
        Address and port on this machine; port 0 takes a free one.
    """
    from blocktrain.terminal import console
    from blocktrain.watch.stream import find_log, replay_app
    from blocktrain.web.server import AppServer, Where

    host, port = Address(listen, open=True).parse()
    if not _loopback(host):
        raise ConfigError(
            f"--listen {listen!r}: a replay answers on this machine only; from another one use ssh -L"
        )
    log = find_log(where)
    server = AppServer(replay_app(log), Where(host, port))
    if json_:
        print(json.dumps({"url": server.url, "log": str(log)}), flush=True)
    console.print(
        f"events of   {log}\npage        [bold]{server.url}/[/]\nCtrl-C ends it", soft_wrap=True
    )
    server.start()
    try:
        while server.serves(60):
            pass
    except KeyboardInterrupt:
        raise Interrupted("stopped") from None
    finally:
        server.stop()


def _client(url: str, token: str, ca: Path | None) -> HttpClient:
    from blocktrain.web.client import HttpClient

    return HttpClient(url, token, ca=ca)
