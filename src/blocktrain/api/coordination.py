"""Coordinating a run from a script, as `blocktrain coordinator` does."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, Unpack

from blocktrain.api.model import TrainedModel
from blocktrain.api.network import pull
from blocktrain.api.options import CoordinateOptions, take_begin, take_flags
from blocktrain.cli.coordinator import (
    CoordinatorFlags,
    ListenFlags,
    RunningCoordinator,
    read_request,
)
from blocktrain.cli.environment import new_run_folder
from blocktrain.cli.flags import BeginFlags, read_flags
from blocktrain.config import Config
from blocktrain.coordinator.policy import Policy
from blocktrain.protocol.status import Status
from blocktrain.watch.feed import Listener

BESIDE = ("score_bytes", "score_seconds", "disk_limit", "worker_disk_limit")
POLL_SECONDS = 0.2


class CoordinatedRun:
    """A run that workers can join. Leave its `with` block, or call `close`, to stop.

    Everything is in its folder: another one on the same folder goes on where this one stopped.
    """

    def __init__(
        self,
        out: Path | None,
        begin: BeginFlags,
        where: ListenFlags,
        config: Path | None,
        named: tuple[dict[str, Any], dict[str, Any]],
        flags: CoordinatorFlags,
    ) -> None:
        request = read_request(config, begin, *named, out)
        folder = out or new_run_folder(request.data)
        self._running = RunningCoordinator(folder, where, flags.limits())
        try:
            if config or begin.data or any(named):
                self._running.require(request)
            self._running.start(request, flags.score_bytes, warnings.warn, flags.score_seconds)
        except BaseException:
            self._running.close()
            raise
        self.folder, self.url = self._running.folder, self._running.server.url
        self.token = where.token
        self.join = self._running.commands.join
        """The command with which a machine joins."""

    @property
    def config(self) -> Config:
        return self._running.coordinator.run.config

    @property
    def finished(self) -> bool:
        return self._running.coordinator.finished is not None

    def status(self) -> Status:
        """What `blocktrain status` shows."""
        return self._running.coordinator.status()

    def events(self) -> Iterator[dict[str, Any]]:
        """What happens from now on, until the run is finished."""
        listener = Listener()
        self._running.coordinator.feed.listen(listener)
        try:
            while True:
                finished = self.finished
                for event in listener.take():
                    yield event.value
                if finished or listener.closed:
                    return
                time.sleep(POLL_SECONDS)
        finally:
            listener.closed = True

    def wait(self) -> None:
        """Wait until the run is finished."""
        while not self.finished:
            time.sleep(POLL_SECONDS)

    def pull(self, out: Path | str) -> TrainedModel:
        """The composed model of the newest versions, in a folder of its own."""
        return pull(self.url, out, self.token)

    def close(self) -> None:
        self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<run in {self.folder} at {self.url}>"


def coordinate(
    data: Path | str | None = None,
    out: Path | str | None = None,
    **options: Unpack[CoordinateOptions],
) -> CoordinatedRun:
    """Start a run, or go on with the one in `out`. Options are the flags of the command."""
    settings: dict[str, Any] = {"listen": "127.0.0.1:0", **options}
    where = take_flags(ListenFlags, settings)
    scoring = {name: settings.pop(name) for name in BESIDE if name in settings}
    begin, config = take_begin(data, settings)
    policy = {name: settings.pop(name) for name in Policy.model_fields if name in settings}
    return CoordinatedRun(
        None if out is None else Path(out),
        begin,
        where,
        config,
        (settings, policy),
        read_flags(CoordinatorFlags, scoring),
    )
