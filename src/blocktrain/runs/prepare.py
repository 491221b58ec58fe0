"""What a run begins with, as files: version 0 of every block and the two parts of the corpus. Needs torch: import it late."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from blocktrain.config import Config
from blocktrain.learning.compose import build_block
from blocktrain.learning.data import Source
from blocktrain.learning.tokenizer import Bytes
from blocktrain.learning.train import block_weights
from blocktrain.protocol.tensors import pack

PIECE = 1 << 22


def prepare(config: Config, source: Source, folder: Path) -> None:
    """Write block-N.safetensors, train.txt and valid.txt; the folder, opened as a corpus, has the same parts as the source."""
    corpus = source.open()
    corpus.require(config.context)
    folder.mkdir(parents=True, exist_ok=True)
    _write(
        folder / "train.txt", (corpus.train, corpus.calibration)
    )  # whoever opens it cuts the calibration part off again
    _write(folder / "valid.txt", (corpus.valid,))
    for index in range(1, config.blocks + 1):
        (folder / f"block-{index}.safetensors").write_bytes(
            pack(block_weights(build_block(config, index)))
        )


def _write(path: Path, parts: Iterable[Bytes]) -> None:
    partial = path.with_name(
        f"{path.name}.{os.getpid()}.partial"
    )  # the source may be this very folder
    with partial.open("wb") as out:
        for part in parts:
            for start in range(0, len(part), PIECE):
                out.write(part[start : start + PIECE].tobytes())
    partial.replace(path)
