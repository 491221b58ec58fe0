"""Training on this machine from a script, as `blocktrain train` does."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any, Unpack

from blocktrain.api.model import TrainedModel
from blocktrain.api.options import TrainOptions, take_begin, take_flags
from blocktrain.cli.train import (
    TrainFlags,
    TrainRequest,
    begin_run,
    plan_training,
    resume_run,
)
from blocktrain.config import Config
from blocktrain.errors import RunError
from blocktrain.runs.local import train_blocks
from blocktrain.runs.report import write_report
from blocktrain.runs.results import complete
from blocktrain.watch.trackers import require_trackers, tracking


class Training:
    """One run. Iterate over it to train; what it gives are the events of its events.jsonl.

    Stopping early (`break`, Ctrl-C) saves: a new one with `resume=True` and the same `out` goes on
    to the same weights. Options are the settings and flags of the command: `size="2M"`,
    `steps=200`, `reference=True`, `track=["wandb"]`. `parent` is a trained run to go on from.
    """

    def __init__(
        self,
        data: Path | str | None = None,
        out: Path | str | None = None,
        **options: Unpack[TrainOptions],
    ) -> None:
        settings: dict[str, Any] = {**options}
        if isinstance(track := settings.get("track"), str):
            settings["track"] = (track,)
        self._flags = take_flags(TrainFlags, settings)
        begin, config = take_begin(data, settings)
        resume, preset = settings.pop("resume", False), settings.pop("preset", None)
        request = TrainRequest(begin, preset, config, settings, self._flags.reference)
        require_trackers(self._flags.track)  # before a folder is made
        folder = None if out is None else Path(out)
        self._run = (
            resume_run(folder, request)
            if resume
            else begin_run(folder, request, self._flags.eval_bytes)
        )
        self.result: dict[str, Any] | None = None
        """What is in result.json, once it is trained."""

    @property
    def folder(self) -> Path:
        return self._run.run.folder

    @property
    def config(self) -> Config:
        return self._run.config

    @property
    def model(self) -> TrainedModel:
        """The trained model."""
        if self.result is None:
            raise RunError(f"the training in {self.folder} is not finished; iterate over it first")
        return TrainedModel(self.folder)

    def run(self) -> TrainedModel:
        """Train to the end."""
        for _ in self:
            pass
        return self.model

    def __iter__(self) -> Iterator[dict[str, Any]]:
        events: Queue[dict[str, Any] | None] = Queue()
        failures: list[BaseException] = []
        stop = threading.Event()

        def work() -> None:
            try:
                self._train(events.put, stop.is_set)
            except BaseException as error:  # raised again below
                failures.append(error)
            finally:
                events.put(None)

        thread = threading.Thread(target=work, name="training", daemon=True)
        thread.start()
        try:
            while (event := events.get()) is not None:
                yield event
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]

    def _train(
        self, on_event: Callable[[dict[str, Any]], None], stopped: Callable[[], bool]
    ) -> None:
        plan = plan_training(self._run, self._flags)
        settings = plan.config.model_dump()
        with tracking(self._flags.track, self.folder, settings, warnings.warn) as track:

            def pass_on(event: dict[str, Any]) -> None:
                track(event)
                on_event(event)

            train_blocks(plan, pass_on, warnings.warn, stopped)
        self.result = complete(plan, lambda _: None)
        write_report(self.folder)

    def __repr__(self) -> str:
        return f"<training in {self.folder}>"


def train(
    data: Path | str | None = None,
    out: Path | str | None = None,
    **options: Unpack[TrainOptions],
) -> TrainedModel:
    """Train a model to its end and return it; arguments as in `Training`."""
    return Training(data, out, **options).run()
