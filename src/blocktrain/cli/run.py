"""Commands that take part in a run or look at it: from `worker` and `status` to `audit`."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from blocktrain.cli.environment import cache_folder, cores, data_folder
from blocktrain.cli.flags import Ca, Json, Token, Yes, at_least
from blocktrain.errors import ConfigError, Interrupted, RunError
from blocktrain.serving.line.address import is_loopback, parse_address

if TYPE_CHECKING:
    from blocktrain.audit.evidence import Audit
    from blocktrain.protocol.calls import Calls
    from blocktrain.web.client import HttpClient

OperatorToken = Annotated[
    str,
    Parameter(
        env_var="BLOCKTRAIN_TOKEN",
        help="The operator token, from the file operator.token in the coordinator's folder "
        "(or the environment's BLOCKTRAIN_TOKEN). The join token is not enough.",
        allow_leading_hyphen=True,  # a random one may begin with it
    ),
]


@dataclass(frozen=True)
class DeviceFlags:
    """On what a worker, or several at once, compute."""

    device: Annotated[
        str, Parameter(help="cpu, cuda, cuda:N, mps, or auto (the best there is).")
    ] = "auto"
    devices: Annotated[
        str,
        Parameter(
            help="One worker process for each of these devices, as in 0,1 for the first two GPUs; "
            "cpu stands for a core. They share the downloads and one display."
        ),
    ] = ""
    cores: Annotated[
        int, at_least(0, 1024), Parameter(help="So many more worker processes, each on one core.")
    ] = 0

    def several(self) -> list[str]:
        """The devices of --devices and --cores; empty if neither is given."""
        listed = [part.strip() for part in self.devices.split(",")] if self.devices else []
        devices = [f"cuda:{part}" if part.isdecimal() else part for part in listed]
        devices += ["cpu"] * self.cores
        if devices and self.device != "auto":
            raise ConfigError(
                "--device is for one worker: name them all in --devices, "
                f"as in --devices {self.device},cpu"
            )
        if self.cores > cores():
            from blocktrain.terminal import warn

            warn(f"--cores {self.cores}: this machine has {cores()}, so the workers share them")
        return devices


@dataclass(frozen=True)
class CacheFlags:
    """What a worker keeps on its disk."""

    cache: Annotated[
        Path | None,
        Parameter(
            help="Folder for the corpus, weights and the state between tasks; by default "
            "~/.cache/blocktrain."
        ),
    ] = None
    cache_limit: Annotated[
        str,
        Parameter(
            help="How much of the corpus all workers with this folder may keep there. Shards that "
            "were not used for longest are deleted first, and fetched again when a task needs them."
        ),
    ] = "20GB"


def worker(
    url: str,
    *,
    token: Token = "",
    where: Annotated[DeviceFlags | None, Parameter(name="*")] = None,
    memory: str = "",
    name: str = "",
    disk: Annotated[CacheFlags | None, Parameter(name="*")] = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Join a run and train one of its blocks, or several with --devices or --cores.

    It only dials out, and may be stopped and started at any time. Ctrl-C finishes the task first;
    a second Ctrl-C leaves at once. Nothing that was acknowledged is lost either way.

    Parameters
    ----------
    url
        The coordinator's address, as it printed it.
    memory
        How much training may use, for example 4GB; a block that needs more is refused. With
        several workers: each of them.
    name
        The name of this machine in `status`.
    """
    from blocktrain.worker.command import WorkerOptions, run_worker

    flags, disk = where or DeviceFlags(), disk or CacheFlags()
    cache = disk.cache or cache_folder()
    options = WorkerOptions(
        url, token, flags.device, memory, name, cache, ca, json_, disk.cache_limit
    )
    if devices := flags.several():
        from blocktrain.worker.group import run_group

        sys.exit(run_group(options, devices))
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
    """Find out why a worker does not join: check this machine, the network and the run.

    It changes nothing and takes a few seconds. Each line is ok, a warning or a failure, with its
    fix. The exit code is 2 if a check failed.

    Parameters
    ----------
    url
        The coordinator's address, as it printed it; without it only this machine is checked.
    device
        The device that would train: cpu, cuda, cuda:N, mps, or auto (the best there is).
    memory
        How much training may use, for example 4GB, as with `blocktrain worker`.
    cache
        The worker's folder; by default ~/.cache/blocktrain.
    data
        Also compare this corpus (a name or a path on this machine) with the run's.
    """
    from blocktrain.worker.doctor.doctor import DoctorOptions, show

    options = DoctorOptions(
        cache or cache_folder(), url, token, device, memory, ca, data, data_folder()
    )
    if not show(options, as_json=json_):
        raise RunError("a check failed; the lines above say how to fix it")


def status(
    url: str, *, watch: Yes = False, token: Token = "", ca: Ca = None, json_: Json = False
) -> None:
    """Show blocks, rounds, workers and bytes of a run.

    Parameters
    ----------
    url
        The coordinator's address.
    watch
        Stay, and show it again every two seconds (with --json: one object a line).
    """
    from blocktrain.cli.status import show_status

    client = _client(url, token, ca)
    try:
        show_status(client, watch=watch, as_json=json_)
    except KeyboardInterrupt:
        raise Interrupted("stopped watching") from None
    finally:
        client.close()


def kick(
    url: str, worker: str, *, token: OperatorToken = "", reason: str = "", ca: Ca = None
) -> None:
    """Remove a worker from a run: its open tasks are free at once, and its key cannot join again.

    Parameters
    ----------
    url
        The coordinator's address.
    worker
        The worker's id or the beginning of it, as `status` shows it, or its whole name.
    reason
        Why; the ledger keeps it.
    """
    from blocktrain.protocol.refusals import Code, Refused

    client = _client(url, token, ca)
    try:
        print(f"kicked {_kick(client, worker, reason)}")
    except Refused as error:
        if error.code != Code.BAD_TOKEN:
            raise
        raise ConfigError(
            "only the operator may kick, and the operator token is missing or wrong: give "
            '--token "$(cat FOLDER/operator.token)", with FOLDER the coordinator\'s folder'
        ) from None
    finally:
        client.close()


def _kick(client: Calls, worker: str, reason: str) -> str:
    """Kick the one worker whose id begins like this, or that has this name."""
    from blocktrain.protocol.messages import Kick

    workers = client.status().workers
    matches = [
        w.worker for w in workers if w.worker.startswith(worker) or (w.name and w.name == worker)
    ]
    if len(matches) != 1:
        known = ", ".join(w.worker[:12] for w in workers) or "none"
        raise ConfigError(f"{len(matches)} workers are called {worker!r}; known: {known}")
    client.kick(Kick(worker=matches[0], reason=reason))
    return matches[0]


def pull(url: str, *, out: Path, token: Token = "", ca: Ca = None, json_: Json = False) -> None:
    """Fetch the composed model of a run, running or finished, for `evaluate` and `generate`.

    Parameters
    ----------
    url
        The coordinator's address.
    out
        The run folder to make. One that was pulled from this run before is updated.
    """
    from blocktrain.runs.pull import pull as pull_run
    from blocktrain.terminal import console

    client = _client(url, token, ca)
    try:
        chosen = pull_run(client, out, lambda what: console.print(f"[dim]{what}[/]"))
    finally:
        client.close()
    if json_:
        print(json.dumps({"run": str(out), "versions": chosen.summary}))
        return
    versions = ", ".join(f"{name} version {version}" for name, version in chosen.summary.items())
    folder = shlex.quote(str(out))
    console.print(
        f"{versions}\nevaluate   blocktrain evaluate {folder}\n"
        f"write      blocktrain generate {folder} --prompt 'The '",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def audit(
    where: str,
    *,
    retrain: Yes = False,
    parent: Path | None = None,
    token: Token = "",
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Recompute every version of a run from its public record.

    Finds updates that were lost, counted twice or never sent.

    Parameters
    ----------
    where
        A coordinator's folder (also while it runs) or its address, or a folder of `train`.
    retrain
        Also train every update again, on one thread: takes as long as the workers took together.
    parent
        The folder of the run that this one goes on from, to check that it began with its weights.
    """
    from blocktrain.audit.audit import audit as audit_run
    from blocktrain.audit.evidence import RemoteSource, open_folder
    from blocktrain.terminal import bar
    from blocktrain.web.client import HttpClient

    remote = where.startswith(("http://", "https://"))
    with bar("audit") as progress, tempfile.TemporaryDirectory(prefix="blocktrain-audit-") as cache:
        evidence = (
            RemoteSource(HttpClient(where, token, ca=ca), Path(cache))
            if remote
            else open_folder(Path(where))
        )
        report = audit_run(
            evidence,
            retrain=retrain,
            progress=lambda _, done, total: progress(done / max(total, 1)),
        )
    if parent is not None and report.facts is not None:
        from blocktrain.runs.parent import check_parent

        report = replace(report, findings=(*report.findings, *check_parent(report.facts, parent)))
    if json_:
        print(json.dumps(report.as_dict()))
    else:
        _show_audit(report, retrain, parent)
    if not report.ok:
        raise RunError("the audit found something; see above")


def _show_audit(report: Audit, retrain: bool, parent: Path | None) -> None:
    from blocktrain.terminal import console

    for finding in report.findings:
        console.print(
            f"[red]{finding.name}[/] entry {finding.entry}: {finding.sentence}", highlight=False
        )
    console.print(
        f"{'all is well' if report.ok else f'{len(report.findings)} findings'}: "
        f"{report.entries} entries, {report.versions} versions recomputed, "
        f"{report.updates} updates ({report.pending} not merged yet)",
        highlight=False,
    )
    if report.parent:
        more = f"checked against {parent}" if parent else "--parent FOLDER checks them"
        console.print(f"it {report.parent.sentence} ({more})", highlight=False, markup=False)
    if retrain:
        console.print(
            f"{report.retrained} updates trained again to the same bytes", highlight=False
        )


def replay(where: Path, *, listen: str = "127.0.0.1:0", json_: Json = False) -> None:
    """Look at a run again: serve its event log and the page on this machine, without a coordinator.

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

    host, port = parse_address(listen)
    if not is_loopback(host):
        raise ConfigError(
            f"--listen {listen!r}: a replay answers on this machine only; "
            "from another one use ssh -L"
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
