"""The codec on an update of a block that was really trained."""

from __future__ import annotations

import numpy as np

from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.train import Trainer
from blocktrain.protocol import compression, tensors
from blocktrain.protocol.compression import METHODS
from blocktrain.protocol.tensors import Tensors
from conftest import Tiny


def real_update(tiny: Tiny, corpus: TokenCorpus) -> Tensors:
    config = tiny(width=64, heads=4, layers_per_block=2, context=32, batch=8, steps=10)
    trainer = Trainer(config, 1)
    before = {name: t.numpy().copy() for name, t in trainer.block.state_dict().items()}
    for _ in trainer.run(corpus.batches(config, 1), config.steps):
        pass
    return {name: t.numpy() - before[name] for name, t in trainer.block.state_dict().items()}


def test_a_real_update_gets_smaller_as_promised(tiny: Tiny, corpus: TokenCorpus) -> None:
    delta = real_update(tiny, corpus)
    fp32 = sum(t.nbytes for t in delta.values())
    ratio = {method: fp32 / len(compression.compress(delta, None, method)[0]) for method in METHODS}
    assert (
        ratio["none"] >= 1 and ratio["fp16"] >= 2 and ratio["int8"] >= 3.9 and ratio["int4"] >= 7.5
    ), ratio
    for method in METHODS:
        payload, left = compression.compress(delta, None, method)
        found = compression.decompress(payload, tensors.schema_of(delta), method=method)
        assert all(
            np.array_equal(found[n] + left[n] if left else found[n], delta[n]) for n in delta
        )
