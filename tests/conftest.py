"""What all tests share: a learnable corpus, small settings and models. Nothing needs a network."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# On a busy machine threads that wait for each other cost six times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and cannot run it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

from blocktrain.config import Config, make_config
from blocktrain.learning.compose import Model, build_block, composition_of, independent
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.model import Block, IndependentBlock
from blocktrain.learning.pool import fit_pool_weights
from blocktrain.learning.tokenizer import ByteTokenizer
from blocktrain.learning.train import Trainer

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=30, database=None)
settings.load_profile("suite")

Tiny = Callable[..., Config]

# Files that take longest start first, so that no core is idle at the end.
LONGEST = (
    "test_bench_serving",
    "test_bench_transport",
    "test_docs",
    "test_golden",
    "test_bench_quality",
    "test_faults",
    "test_examples",
    "test_notebooks",
    "test_cli",
    "test_local",
    "test_bench_corpus",
    "test_openai",
    "test_bench_coordinator",
    "test_scoring",
)

WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heath",
    "inlet",
    "jetty",
    "knoll",
    "lagoon",
    "marsh",
    "north",
    "ocean",
    "prairie",
    "quarry",
    "ridge",
]


def write_text(lines: int, seed: int) -> str:
    """Sentences of a small grammar: learnable in a few steps, never quite certain."""
    draw = random.Random(seed)
    noun = lambda: draw.choice(WORDS)  # noqa: E731
    return "".join(
        f"the {noun()} {draw.choice(['meets', 'leaves', 'finds'])} the {noun()} by the {noun()}.\n"
        for _ in range(lines)
    )


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text(write_text(1200, seed=1))
    (folder / "valid.txt").write_text(write_text(60, seed=2))
    return folder


@pytest.fixture(scope="session")
def corpus(corpus_folder: Path) -> TokenCorpus:
    cache = corpus_folder.with_name("corpus-cache")
    return Source(str(corpus_folder), None, cache).open(ByteTokenizer())


def tiny_config(**changes: Any) -> Config:
    small: dict[str, Any] = {
        "blocks": 3,
        "layers_per_block": 1,
        "width": 16,
        "heads": 2,
        "context": 16,
        "z_width": 8,
        "fusion_share": 1.0,
    }
    return make_config({**small, "batch": 4, "steps": 12, "warmup": 2, **changes})


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return tiny_config


def random_model(config: Config) -> Model:
    """Random weights everywhere, also where training starts at zero: every path counts."""
    blocks = {n: build_block(config, n) for n in range(1, config.blocks + 1)}
    composition_of(config).connect(config, blocks)
    generator = torch.Generator().manual_seed(5)
    for block in blocks.values():
        for parameter in block.parameters():
            if not parameter.any():
                torch.nn.init.normal_(
                    parameter, std=parameter.shape[0] ** -0.5, generator=generator
                )
    return composition_of(config).assemble(config, blocks)


@pytest.fixture(scope="session")
def make_model() -> Callable[[Config], Model]:
    return random_model


def train_block(
    config: Config, index: int, corpus: TokenCorpus, sources: Sequence[IndependentBlock] = ()
) -> Block:
    trainer = Trainer(config, index, sources)
    for _ in trainer.run(corpus.batches(config, trainer.index), config.steps):
        pass
    return trainer.block


def train_model(config: Config, corpus: TokenCorpus) -> Model:
    """Every block by the plain loop."""
    blocks = {n: train_block(config, n, corpus) for n in range(1, config.independent + 1)}
    if config.fusion:
        blocks[config.fusion] = train_block(config, config.fusion, corpus, independent(blocks))
    return composition_of(config).assemble(config, blocks)


@pytest.fixture(scope="session")
def trained(corpus: TokenCorpus) -> Model:
    """A small trained model with fitted pool weights."""
    config = tiny_config(
        blocks=4,
        width=24,
        context=32,
        batch=8,
        steps=150,
        learning_rate=1e-2,
        fusion_learning_rate=1e-2,
        fusion_share=1.0,
    )
    model = train_model(config, corpus)
    model.pool_weights = fit_pool_weights(model, corpus.calibration)
    return model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def pytest_configure() -> None:
    """Ctrl-C must reach what tests start, also where the suite runs in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
