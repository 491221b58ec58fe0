"""Runs `prepare` in a process of its own, so that the coordinator never loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blocktrain.config import Config
from blocktrain.processes import Channel, Job, run_jobs


@dataclass(frozen=True)
class CorpusPlace:
    """What `learning.data.Source` is made of, without importing it."""

    spec: str
    data_dir: Path | None
    cache_dir: Path


def prepare_in_process(config: Config, place: CorpusPlace, folder: Path) -> None:
    """Version 0 of every block and the corpus, as files in the folder."""
    run_jobs([Job("prepare", _prepare, (config, place, folder))], 1, lambda *_: None)


def _prepare(_: Channel, config: Config, place: CorpusPlace, folder: Path) -> None:
    from blocktrain.learning.data import Source
    from blocktrain.runs.prepare import prepare

    prepare(config, Source(place.spec, place.data_dir, place.cache_dir), folder)
