"""A small model and `blocktrain serve` in front of it, for the tests of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from blocktrain.learning.compose import Model
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from support.serving import Process, openai_client, saved, small_model, started


@pytest.fixture(scope="module")
def model(corpus: TokenCorpus) -> Model:
    return small_model(corpus)


@pytest.fixture(scope="module")
def run(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("served") / "small")


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[Process]:
    """Everything in one process."""
    with started("serve", str(run), "--listen", "127.0.0.1:0", cwd=run.parent) as process:
        yield process


@pytest.fixture(scope="module")
def api(served: Process) -> Iterator[openai.OpenAI]:
    with openai_client(served) as api:
        yield api
