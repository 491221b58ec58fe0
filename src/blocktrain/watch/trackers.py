"""Experiment trackers as sinks of events: TensorBoard, Weights & Biases, MLflow.

Each needs an extra of the same name (`pip install 'blocktrain[wandb]'`) and is imported when it is
used. A tracker that fails is dropped with a warning: training never waits for it and never stops
because of it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from typing import Any, NamedTuple

from blocktrain.errors import ConfigError

PROJECT = "blocktrain"
MOST_WAITING = 10_000  # points
CLOSE_SECONDS = 30.0
STEP_KEYS = ("loss", "bits_per_byte", "tokens_per_second", "peak_share")
VERSION_KEYS = ("loss", "steps", "tokens", "updates", "clipped", "bytes_in", "bytes_out")
EventFields = Mapping[str, Any]
Parameters = Mapping[str, Any]


class Series(NamedTuple):
    """Points at one step. All names begin with `group/`; each group counts its own steps."""

    group: str
    step: int
    values: dict[str, float]


class MetricReader:
    """Turns events into points. It counts the scores, which have no step of their own."""

    def __init__(self) -> None:
        self._scores = 0

    def read(self, event: EventFields) -> Series | None:
        match event:
            case {"kind": "step", "block": block, "step": int(step)}:
                return self._series(_block_name(block), step, event, STEP_KEYS)
            case {"kind": "version", "block": block, "version": int(version)}:
                return self._series(f"{_block_name(block)}-versions", version, event, VERSION_KEYS)
            case {"kind": "score", "scores": dict(scores)}:
                self._scores += 1
                return self._series("valid", self._scores, scores, scores)
        return None

    @staticmethod
    def _series(group: str, step: int, fields: EventFields, keys: Iterable[str]) -> Series | None:
        values = {
            f"{group}/{key}": float(fields[key])
            for key in keys
            if isinstance(fields.get(key), int | float)
        }
        return Series(group, step, values) if values else None


def _block_name(block: object) -> str:
    return "reference" if block in (0, "reference") else f"block-{block}"


class Tracker(ABC):
    """One experiment in one tracker."""

    @abstractmethod
    def __init__(self, folder: Path, name: str, settings: Parameters) -> None:
        """Begin an experiment; files, if there are any, go into the folder."""

    @abstractmethod
    def log(self, series: Series) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard(Tracker):
    """Event files in FOLDER/tensorboard: `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, folder: Path, name: str, settings: Parameters) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._summary = Summary
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        text = "\n".join(f"{key} = {value}" for key, value in settings.items())
        self._write(text_pb("settings", f"```\n{text}\n```"), 0)

    def log(self, series: Series) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in series.values.items()
        ]
        self._write(self._summary(value=values), series.step)

    def _write(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as FileEvent

        self._writer.add_event(FileEvent(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of the project `blocktrain`. WANDB_MODE=offline keeps it in FOLDER/wandb."""

    def __init__(self, folder: Path, name: str, settings: Parameters) -> None:
        import wandb

        self._groups: set[str] = set()
        self._run = wandb.init(
            project=PROJECT,
            name=name,
            dir=str(folder),
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, series: Series) -> None:
        if series.group not in self._groups:  # blocks count their own steps, side by side
            self._groups.add(series.group)
            self._run.define_metric(f"{series.group}/*", step_metric=f"{series.group}/at")
        self._run.log({**series.values, f"{series.group}/at": series.step})

    def close(self) -> None:
        self._run.finish()


class Mlflow(Tracker):
    """A run of the experiment `blocktrain`, where MLFLOW_TRACKING_URI says.

    Without it, in FOLDER/mlflow.db.
    """

    def __init__(self, folder: Path, name: str, settings: Parameters) -> None:
        from mlflow import MlflowClient, is_tracking_uri_set

        where = None if is_tracking_uri_set() else f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=where)
        known = self._client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)

    def log(self, series: Series) -> None:
        for name, value in series.values.items():
            self._client.log_metric(self._run, name, value, step=series.step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": Mlflow,
}


def require_trackers(names: Iterable[str]) -> None:
    """A ConfigError names a tracker that is unknown or not installed."""
    for name in names:
        _require_known(name)
        if find_spec(name) is None:  # the package has the name of the tracker
            raise ConfigError(f"{name} is not installed: pip install 'blocktrain[{name}]'")


def _require_known(name: str) -> None:
    if name not in TRACKERS:
        raise ConfigError(f"unknown tracker {name!r}; known: {', '.join(TRACKERS)}")


class TrackerSink:
    """Passes events on to a tracker in a thread of its own, until it fails."""

    def __init__(
        self,
        tracker: str,
        folder: Path,
        settings: Parameters,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        _require_known(tracker)
        self._name, self._warn, self._reader = tracker, warn, MetricReader()
        self._queue: Queue[Series | None] = Queue(MOST_WAITING)
        self._tracker = self._start(folder, settings)
        self._thread = threading.Thread(target=self._pass_on, name=tracker, daemon=True)
        self._thread.start()

    def _start(self, folder: Path, settings: Parameters) -> Tracker:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return TRACKERS[self._name](folder, folder.resolve().name, settings)
        except ImportError as error:
            raise ConfigError(
                f"{self._name} is not installed ({error}): pip install 'blocktrain[{self._name}]'"
            ) from None
        except Exception as error:  # its library, its server, its account
            raise ConfigError(f"{self._name} does not start: {_first_line(error)}") from None

    def __call__(self, event: EventFields) -> None:
        if series := self._reader.read(event):
            with suppress(Full):  # it is slower than the run: points are left out
                self._queue.put_nowait(series)

    def close(self) -> None:
        """Pass on what waits, and end the experiment."""
        with suppress(Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)

    def _pass_on(self) -> None:
        try:
            while (series := self._queue.get()) is not None:
                self._tracker.log(series)
            self._tracker.close()
        except Exception as error:  # nothing that it does may stop the training
            self._warn(f"{self._name} failed and gets no more points: {_first_line(error)}")


@contextmanager
def tracking(
    names: Iterable[str], folder: Path, settings: Parameters, warn: Callable[[str], None]
) -> Iterator[Callable[[EventFields], None]]:
    """Passes events on to all named trackers while the block lasts."""
    sinks: list[TrackerSink] = []
    try:
        for name in dict.fromkeys(names):
            sinks.append(TrackerSink(name, folder, settings, warn))

        def track(event: EventFields) -> None:
            for sink in sinks:
                sink(event)

        yield track
    finally:
        for sink in sinks:
            sink.close()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
