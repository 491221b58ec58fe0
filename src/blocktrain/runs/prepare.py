"""What a run begins with, as files: version 0 of every block and the two parts of the corpus.

Making them needs torch. It is imported late, so that a coordinator can have them made in another
process without loading torch itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blocktrain.config import Config
from blocktrain.processes import Channel, Job, run_jobs

if TYPE_CHECKING:
    from blocktrain.learning.corpus.source import Source

PIECE = 1 << 22  # bytes


def prepare(config: Config, source: Source, folder: Path) -> None:
    """Write block-N.safetensors, train.txt and valid.txt.

    The folder, opened as a corpus, has the same parts as the source.
    """
    from blocktrain.learning.compose import build_block
    from blocktrain.learning.corpus.text import write_texts
    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.learning.train import block_weights
    from blocktrain.protocol.tensors import pack

    tokenizer = tokenizer_of(config)
    corpus = source.open(tokenizer)
    corpus.require(config.context)
    folder.mkdir(parents=True, exist_ok=True)
    # Opening train.txt cuts the calibration part off again.
    write_texts(corpus, tokenizer, folder)
    for index in range(1, config.blocks + 1):
        weights = pack(block_weights(build_block(config, index)))
        (folder / f"block-{index}.safetensors").write_bytes(weights)


def prepare_in_process(
    config: Config, data: str, data_dir: Path | None, cache_dir: Path, folder: Path
) -> None:
    """`prepare` in a process of its own; `data`, `data_dir` and `cache_dir` as in `Source`."""
    job = Job("prepare", _work, (config, data, data_dir, cache_dir, folder))
    run_jobs([job], 1, lambda *_: None)


def _work(
    _: Channel, config: Config, data: str, data_dir: Path | None, cache_dir: Path, folder: Path
) -> None:
    from blocktrain.learning.corpus.source import Source

    prepare(config, Source(data, data_dir, cache_dir), folder)
