"""A run folder with a small model, and the commands that serve it, in processes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai

from blocktrain.learning.compose import Model
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.runs.folder import create_run, publish, seal
from conftest import tiny_config, train_model
from support.command import start
from support.waiting import PATIENCE


def small_model(corpus: TokenCorpus) -> Model:
    """Three blocks and a fusion block that learned a little: they write mostly letters."""
    config = tiny_config(
        blocks=4, context=32, batch=8, steps=40, learning_rate=2e-2, fusion_learning_rate=2e-2
    )
    return train_model(config, corpus)


def saved(model: Model, folder: Path) -> Path:
    """A run folder with the model, as `train` writes it."""
    run = create_run(folder, model.config, "tiny")
    for number, block in enumerate([*model.blocks, *([model.fusion] if model.fusion else [])], 1):
        publish(run, number, block)
    seal(run, model.config, "tiny", model.pool_weights)
    return folder


@dataclass
class Process:
    """A running command and the first line it printed."""

    process: subprocess.Popen[str]
    said: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.said["url"])

    def status(self, **headers: str) -> dict[str, Any]:
        return dict(httpx2.get(f"{self.url}/v1/status", headers=headers, timeout=PATIENCE).json())

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=PATIENCE)


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[Process]:
    """A command that keeps running, with --json."""
    process = start(*arguments, "--json", cwd=cwd)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (cwd / f"{arguments[0]}.err").read_text()[-2000:]
        yield Process(process, json.loads(line))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def openai_client(process: Process, key: str = "none") -> openai.OpenAI:
    """OpenAI's own client; what fails is not tried again."""
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)
