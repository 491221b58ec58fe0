"""Events end up in TensorBoard, Weights & Biases (offline) and MLflow; failures stop nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from blocktrain.errors import ConfigError
from blocktrain.watch import trackers
from blocktrain.watch.trackers import MetricReader, Series, Tracker, TrackerSink
from support.waiting import until

EVENTS: list[Mapping[str, Any]] = [
    {"kind": "start", "blocks": 2},
    {"kind": "step", "block": 1, "step": 10, "loss": 3.5, "tokens_per_second": 1000.0},
    {"kind": "step", "block": 2, "step": 5, "loss": 4.5},
    {"kind": "step", "block": 1, "step": 20, "loss": 3.0},
    {"kind": "version", "block": 1, "version": 1, "steps": 50, "loss": None, "bytes_in": 7},
    {"kind": "score", "scores": {"block-1": 2.5, "fused": 2.25}},
    {"kind": "score", "scores": {"block-1": 2.0, "fused": 1.75}},
    {"kind": "unknown"},
]
SETTINGS = {"width": 96, "compose": "fuse"}


def track(name: str, folder: Path) -> None:
    sink = TrackerSink(name, folder, SETTINGS, warn=pytest.fail)
    for event in EVENTS:
        sink(event)
    sink.close()


def test_events_become_points_by_block() -> None:
    reader = MetricReader()
    points = [series for event in EVENTS if (series := reader.read(event))]
    assert points[0] == Series(
        "block-1", 10, {"block-1/loss": 3.5, "block-1/tokens_per_second": 1000.0}
    )
    assert points[3] == Series(
        "block-1-versions", 1, {"block-1-versions/steps": 50.0, "block-1-versions/bytes_in": 7.0}
    )
    assert points[5] == Series("valid", 2, {"valid/block-1": 2.0, "valid/fused": 1.75})
    assert len(points) == 6
    reference = reader.read({"kind": "step", "block": 0, "step": 1, "loss": 2})
    assert reference == Series("reference", 1, {"reference/loss": 2.0})


def test_tensorboard_reads_the_points(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path)
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert [(e.step, e.value) for e in seen.Scalars("block-1/loss")] == [(10, 3.5), (20, 3.0)]
    assert [(e.step, e.value) for e in seen.Scalars("valid/fused")] == [(1, 2.25), (2, 1.75)]
    assert "settings" in seen.Tags()["tensors"]


def test_wandb_keeps_the_points_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    track("wandb", tmp_path)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    names = (b"block-1/loss", b"3.5", b"valid/fused", b"1.75", b"block-1/at", b"width")
    # Records of protobuf, not compressed. A process of its own writes them.
    until(lambda: all(name in path.read_bytes() for name in names), "the points in the file")


def test_mlflow_keeps_the_points_in_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("blocktrain")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["width"] == "96" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "block-1/loss")
    assert [(m.step, m.value) for m in history] == [(10, 3.5), (20, 3.0)]


class Broken(Tracker):
    def __init__(self, folder: Path, name: str, settings: trackers.Parameters) -> None:
        if "refuse" in settings:
            raise RuntimeError("no account\nmore")
        if "absent" in settings:
            raise ImportError("No module named 'x'")

    def log(self, series: Series) -> None:
        raise OSError("the server is gone")

    def close(self) -> None: ...


def test_a_tracker_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "broken", Broken)
    warnings: list[str] = []
    sink = TrackerSink("broken", tmp_path, SETTINGS, warnings.append)
    for event in EVENTS:
        sink(event)
    sink.close()
    assert warnings == ["broken failed and gets no more points: the server is gone"]


def test_a_tracker_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "broken", Broken)
    with pytest.raises(ConfigError, match=r"broken does not start: no account$"):
        TrackerSink("broken", tmp_path, {"refuse": 1})
    with pytest.raises(ConfigError, match=r"pip install 'blocktrain\[broken\]'"):
        TrackerSink("broken", tmp_path, {"absent": 1})
    with pytest.raises(ConfigError, match="known: tensorboard, wandb, mlflow"):
        TrackerSink("nothing", tmp_path, {})


def test_a_tracker_that_is_not_installed_is_refused_before_a_run_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "absent_package", Broken)
    with pytest.raises(ConfigError, match=r"pip install 'blocktrain\[absent_package\]'"):
        trackers.require_trackers(["tensorboard", "absent_package"])
    with pytest.raises(ConfigError, match="unknown tracker 'x'"):
        trackers.require_trackers(["x"])
