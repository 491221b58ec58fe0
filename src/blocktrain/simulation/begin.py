"""What a simulated run begins with: blocks of a few weights and tags, and a corpus of noise."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from blocktrain.config import Config
from blocktrain.learning.shards import CorpusIndex, Shard, TokenSource
from blocktrain.protocol.tensors import Tensors, pack
from blocktrain.simulation.tape import Tape

TAGS = 256  # slots of the tag lane
LANE = "tags"
SHARD_TOKENS, SHARDS = 1 << 12, 2


def first_weights(tape: Tape, block: int) -> Tensors:
    """Version 0 of a block: noise, and a lane of tags that is empty."""
    draw = np.random.default_rng([tape.seed, block])
    noise = draw.standard_normal(tape.world.values).astype(np.float32)
    return {LANE: np.zeros(TAGS, np.float32), "weights": noise}


def write_beginning(tape: Tape, config: Config, folder: Path) -> None:
    """The files that `runs.prepare` would make."""
    (folder / "corpus" / "shards").mkdir(parents=True)
    for block in range(1, config.blocks + 1):
        path = folder / f"block-{block}.safetensors"
        path.write_bytes(pack(first_weights(tape, block)))
    shards = []
    for number in range(SHARDS + 2):
        draw = np.random.default_rng([number, 7])
        content = draw.integers(0, 256, SHARD_TOKENS, dtype=np.uint8).tobytes()
        name = hashlib.sha256(content).hexdigest()
        (folder / "corpus" / "shards" / f"{name}.tok").write_bytes(content)
        shards.append(Shard(sha256=name, tokens=SHARD_TOKENS, bytes=SHARD_TOKENS))
    source = TokenSource(name="noise", weight=1.0, shards=tuple(shards[:SHARDS]))
    index = CorpusIndex(
        name="noise",
        id_bytes=1,
        sources=(source,),
        calibration=(shards[SHARDS],),
        valid=(shards[SHARDS + 1],),
    )
    (folder / "corpus" / "index.json").write_bytes(index.write())
