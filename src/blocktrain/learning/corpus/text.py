"""The text of a prepared corpus again, as runs keep it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.tokenizer import Tokenizer

PIECE = 1 << 22  # ids


def parts(corpus: TokenCorpus, tokenizer: Tokenizer) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """The text to train on, calibration part included, and the valid part."""
    index = corpus.index
    train = [shard for source in index.sources for shard in source.shards]

    def text(shards: object) -> Iterator[bytes]:
        for shard in shards:  # type: ignore[attr-defined]
            ids = corpus.open(shard)
            for start in range(0, len(ids), PIECE):
                yield tokenizer.decode(ids[start : start + PIECE].tolist())

    return text([*train, *index.calibration]), text(index.valid)


def text_hashes(corpus: TokenCorpus, tokenizer: Tokenizer) -> tuple[str, str]:
    """sha256 of both parts."""
    hashes = []
    for part in parts(corpus, tokenizer):
        digest = hashlib.sha256()
        for piece in part:
            digest.update(piece)
        hashes.append(digest.hexdigest())
    return hashes[0], hashes[1]


def write_texts(corpus: TokenCorpus, tokenizer: Tokenizer, folder: Path) -> None:
    """train.txt and valid.txt."""
    for name, part in zip(("train.txt", "valid.txt"), parts(corpus, tokenizer), strict=True):
        # Under another name first: the source may be this very folder.
        partial = folder / f"{name}.{os.getpid()}.partial"
        with partial.open("wb") as out:
            for piece in part:
                out.write(piece)
        partial.replace(folder / name)
