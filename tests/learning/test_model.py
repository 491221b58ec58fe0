"""The network: causal, the same bits in any chunks, initial weights, what fusion reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.config import Config
from blocktrain.errors import ConfigError
from blocktrain.learning.compose import Model, build_block
from blocktrain.learning.model import (
    MIN_ROWS,
    Cache,
    IndependentBlock,
    build_fusion,
    build_independent,
    build_reference,
    pool,
    shift_by_one,
    target_table,
)
from conftest import random_model, tiny_config

CONTEXT = 72  # longer than two tiles of the attention kernel, and no multiple of one
FUSE = random_model(tiny_config(context=CONTEXT))
POOL = random_model(tiny_config(context=CONTEXT, compose="pool"))
DENOISE = random_model(tiny_config(context=CONTEXT, compose="pool", objective="denoise"))
SHARED = random_model(tiny_config(context=CONTEXT, embedding="shared"))
DENOISE_SHARED = random_model(DENOISE.config.replace(embedding="shared"))
MODELS = {
    "fuse": FUSE,
    "pool": POOL,
    "denoise": DENOISE,
    "fuse, one table": SHARED,
    "denoise, one table": DENOISE_SHARED,
}
TEXT = torch.randint(0, 256, (1, CONTEXT), generator=torch.Generator().manual_seed(1))

chunkings = st.lists(
    st.one_of(st.integers(1, 6), st.integers(1, CONTEXT)), min_size=1, max_size=CONTEXT
)


def in_chunks(score: Callable[[Tensor, int], Tensor], text: Tensor, sizes: Sequence[int]) -> Tensor:
    """The answer to `text` read in chunks of these sizes, the last one taking what is left."""
    parts, at = [], 0
    for size in [*sizes, text.shape[1]]:
        if part := text[:, at : at + size].shape[1]:
            parts.append(score(text[:, at : at + size], at))
            at += part
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", MODELS)
@given(sizes=chunkings)
def test_a_composed_model_gives_the_same_bits_in_any_chunks(name: str, sizes: list[int]) -> None:
    scorer = MODELS[name].scorer()
    assert torch.equal(in_chunks(scorer, TEXT, sizes), scorer(TEXT, 0))


@pytest.mark.parametrize("name", MODELS)
@given(sizes=chunkings)
def test_a_single_block_gives_the_same_bits_in_any_chunks(name: str, sizes: list[int]) -> None:
    scorer = MODELS[name].drafter(2)
    assert torch.equal(in_chunks(scorer, TEXT, sizes), scorer(TEXT, 0))


def test_every_chunk_size_gives_the_same_bits() -> None:
    scorer = FUSE.scorer()
    whole = scorer(TEXT, 0)
    for size in range(1, CONTEXT):
        assert torch.equal(in_chunks(scorer, TEXT, [size] * (CONTEXT // size)), whole), (
            f"chunks of {size}"
        )


@pytest.mark.parametrize("embedding", ["full", "shared"])
def test_a_long_prompt_gives_the_same_bits_where_blas_would_sum_in_another_order(
    embedding: str,
) -> None:
    model = random_model(
        tiny_config(blocks=2, width=256, heads=4, context=300, embedding=embedding)
    )
    text = torch.randint(0, 256, (1, 300), generator=torch.Generator().manual_seed(2))
    scorer = model.scorer()
    assert torch.equal(in_chunks(scorer, text, [37, 200, 1, 2]), scorer(text, 0))


@pytest.mark.parametrize("name", MODELS)
def test_a_truncated_and_extended_cache_gives_the_same_bits(name: str) -> None:
    scorer = MODELS[name].scorer()
    whole = scorer(TEXT, 0)
    other = (TEXT + 7) % 256
    scorer(other[:, 20:], 20)  # a wrong draft, longer than what replaces it
    assert torch.equal(scorer(TEXT[:, 20:23], 20), whole[:, 20:23])
    assert torch.equal(scorer(TEXT[:, 23:], 23), whole[:, 23:])
    scorer(other, 0)
    assert torch.equal(scorer(TEXT, 0), whole)


@pytest.mark.parametrize("name", MODELS)
def test_cached_equals_the_forward_of_training_to_rounding(name: str) -> None:
    model = MODELS[name]
    features = model.all_features(TEXT)
    present = torch.ones(features.shape[:2])
    readout = model.readout()
    plain = (
        model.fusion.combine(TEXT, features, present)
        if model.fusion
        else readout(readout.normalize(features), present)
    )
    assert torch.allclose(in_chunks(model.scorer(), TEXT, [5, 1, 30]), plain, atol=1e-5, rtol=1e-5)


def test_a_cache_holds_no_more_than_the_context() -> None:
    block = FUSE.blocks[0]
    cache = Cache(block, 1)
    block.features(TEXT, cache=cache)
    with pytest.raises(ValueError, match="do not fit the context"):
        block.features(TEXT[:, :1], cache=cache)
    cache.truncate(CONTEXT - 1)
    block.features(TEXT[:, :1], cache=cache)
    cache.truncate(CONTEXT + 5)
    assert cache.length == CONTEXT


def test_few_rows_alone_equal_the_same_rows_among_others() -> None:
    linear = FUSE.blocks[0].head
    rows = torch.randn(1, 50, 16)
    for count in range(1, 50):
        assert torch.equal(linear(rows[:, :count]), linear(rows)[:, :count])
    assert linear(rows[0, 0]).shape == (256,)
    assert MIN_ROWS == 4


@pytest.mark.parametrize("name", MODELS)
def test_no_position_sees_a_later_byte(name: str) -> None:
    model = MODELS[name]
    changed = TEXT.clone()
    changed[:, 40] += 1
    before, after = model.all_features(TEXT), model.all_features(changed % 256)
    assert torch.equal(before[:, :, :40], after[:, :, :40])
    assert not torch.allclose(before[:, :, 40:], after[:, :, 40:])


def test_a_position_sees_its_own_noised_target_and_those_before_it() -> None:
    block, level = DENOISE.blocks[0], torch.tensor(0.1)
    z = torch.randn(1, CONTEXT, 8)
    changed = z.clone()
    changed[:, 40] += 1
    before = block.features(TEXT, z=z, c_noise=level)
    after = block.features(TEXT, z=changed, c_noise=level)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40], after[:, 40])


def test_the_positions_of_a_tail_see_each_other_and_not_their_bytes() -> None:
    config = tiny_config(objective="denoise", compose="euler", tail=4)
    block = random_model(config).blocks[0]
    text, z = TEXT[:, :16], torch.randn(1, 16, 8)
    noised = lambda text, z: block.features(text, z=z, c_noise=torch.tensor(0.1), tail=4)  # noqa: E731
    before = noised(text, z)
    unknown = text.clone()
    unknown[:, 13:] = 0  # position 12 is the first of the tail: it knows its byte, and not the next
    assert torch.equal(noised(unknown, z), before)
    last = z.clone()
    last[:, 15] += 1
    after = noised(text, last)
    assert torch.equal(after[:, :12], before[:, :12])
    assert all(not torch.allclose(after[:, t], before[:, t]) for t in range(12, 16))


@pytest.mark.parametrize("model", [FUSE, SHARED])
def test_fusion_starts_exactly_as_the_pool(model: Model) -> None:
    config = model.config
    fusion = build_fusion(config, config.blocks)
    fusion.readout.copy_from(model.blocks)
    features, present = model.all_features(TEXT), torch.ones(2, 1)
    readout = Model(config, model.blocks).readout()
    assert fusion.correct.weight.any()  # what trains has a gradient from the first step on
    assert torch.equal(
        fusion.combine(TEXT, features, present), readout(readout.normalize(features), present)
    )


def test_fusion_reads_the_features_of_a_position_and_of_those_before_it() -> None:
    fusion, features, present = FUSE.fusion, FUSE.all_features(TEXT), torch.ones(2, 1)
    assert fusion is not None
    changed = features.clone()
    changed[0, :, 40] += 1
    before, after = fusion.combine(TEXT, features, present), fusion.combine(TEXT, changed, present)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40], after[:, 40])
    shifted = shift_by_one(features[0], None)
    assert torch.equal(shifted[:, 1:], features[0, :, :-1]) and not shifted[:, 0].any()


def test_corrections_pass_through_the_head_of_a_missing_block_too() -> None:
    config = tiny_config(context=CONTEXT)
    fusion = build_fusion(config, config.blocks)
    fusion.readout.copy_from(FUSE.blocks)
    fusion.load_state_dict(
        {
            n: torch.randn_like(t) if n.startswith("layers") else t
            for n, t in fusion.state_dict().items()
        }
    )
    features, present = FUSE.all_features(TEXT), torch.tensor([[0.0], [1.0]])
    before = fusion.combine(TEXT, features, present)
    with torch.no_grad():
        fusion.correct.weight[:, : config.width] = 0  # onto the features of block 1
    assert not torch.allclose(fusion.combine(TEXT, features, present), before)
    assert torch.equal(
        fusion.combine(TEXT, features, present),
        fusion.combine(TEXT, features * present[:, :, None, None], present),
    )


def test_one_product_pools_as_the_mean_of_log_probabilities_does() -> None:
    readout, features = Model(FUSE.config, FUSE.blocks).readout(), FUSE.all_features(TEXT)
    readout.weights.copy_(torch.tensor([0.3, 0.8]))
    logp = torch.stack(
        [block(f).log_softmax(-1) for block, f in zip(FUSE.blocks, features, strict=True)]
    )
    for present in (torch.ones(2, 1), torch.tensor([[0.0], [1.0]])):
        ours = readout(readout.normalize(features), present).log_softmax(-1)
        assert torch.allclose(ours, pool(logp, readout.weights, present).log_softmax(-1), atol=1e-5)


def test_fusion_holds_copies_of_norms_and_heads_and_does_not_train_them() -> None:
    config = tiny_config()
    blocks = [build_independent(config, n) for n in (1, 2)]
    for n, block in enumerate(blocks):
        torch.nn.init.normal_(block.norm.scale, generator=torch.Generator().manual_seed(n))
    fusion = build_fusion(config, 3)
    fusion.readout.copy_from(blocks)
    for n, block in enumerate(blocks):
        assert torch.equal(fusion.readout.norms[n], block.norm.scale)
        assert torch.equal(fusion.readout.heads[n], block.head.weight)
    assert {"readout.norms", "readout.heads"} <= set(fusion.state_dict())
    assert not {"readout.norms", "readout.heads"} & set(dict(fusion.named_parameters()))
    before = fusion.readout.heads.clone()
    torch.nn.init.zeros_(blocks[0].head.weight)
    assert torch.equal(fusion.readout.heads, before)


def test_a_missing_block_leaves_no_trace_in_the_fused_answer() -> None:
    assert FUSE.fusion is not None
    features = FUSE.all_features(TEXT)
    garbled = features.clone()
    garbled[1] = 1e3
    present = torch.tensor([[1.0], [0.0]])
    assert torch.equal(
        FUSE.fusion.combine(TEXT, features, present), FUSE.fusion.combine(TEXT, garbled, present)
    )
    assert not torch.allclose(
        FUSE.fusion.combine(TEXT, features, torch.ones(2, 1)),
        FUSE.fusion.combine(TEXT, features, present),
    )


@given(st.lists(st.floats(0.05, 2), min_size=2, max_size=5), st.data())
def test_pool_shares_the_weight_of_the_missing(weights: list[float], data: st.DataObject) -> None:
    count = len(weights)
    present = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any)),
        dtype=torch.float32,
    )
    logp = torch.randn(
        count, 1, 2, 256, generator=torch.Generator().manual_seed(count)
    ).log_softmax(-1)
    w = torch.tensor(weights) * present
    expected = torch.einsum("n,nbtv->btv", w * sum(weights) / w.sum(), logp)
    assert torch.allclose(
        pool(logp, torch.tensor(weights), present[:, None]), expected, atol=1e-4, rtol=1e-4
    )
    same = logp[:1].expand(
        count, -1, -1, -1
    )  # blocks of one mind: who is missing makes no difference
    assert torch.allclose(
        pool(same, torch.tensor(weights), present[:, None]),
        logp[0] * sum(weights),
        atol=1e-4,
        rtol=1e-4,
    )


def test_only_denoising_blocks_hold_what_reads_z() -> None:
    def names(config: Config, index: int = 1) -> set[str]:
        return {name.split(".")[0] for name, _ in build_block(config, index).named_parameters()}

    plain = {"embed", "layers", "norm", "head"}
    assert names(tiny_config()) == plain
    assert names(tiny_config(), 3) == {"embed", "layers", "readout", "mix", "correct", "hand_on"}
    assert names(tiny_config(compose="pool", objective="denoise")) == plain | {"z_in", "noise_in"}
    paper = {"compose": "euler", "objective": "denoise", "skip": "edm"}
    assert names(tiny_config(**paper)) == plain | {"z_in", "noise_in", "z_out"}
    assert names(tiny_config(**paper, tail=4)) == plain | {"z_in", "noise_in", "z_out", "mask"}
    block = build_independent(tiny_config(**paper), 1)
    assert not block.z_in.weight.any() and not block.noise_in.weight.any()


def test_initial_weights_are_a_function_of_seed_and_index() -> None:
    config = tiny_config()
    torch.manual_seed(1)
    first = build_block(config, 1).embed
    following = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(following, torch.rand(1)), "building a block disturbs the global generator"
    assert torch.equal(first, build_block(config, 1).embed)
    assert not torch.equal(first, build_block(config, 2).embed)
    assert not torch.equal(first, build_block(config.replace(seed=1), 1).embed)


def test_the_reference_has_all_layers_and_reads_only_tokens() -> None:
    config = tiny_config(
        blocks=3, layers_per_block=2, objective="denoise", compose="euler", skip="edm", tail=2
    )
    reference = build_reference(config)
    assert len(reference.layers) == 6
    assert reference.skip is None and isinstance(reference, IndependentBlock)
    assert {name.split(".")[0] for name, _ in reference.named_parameters()} == {
        "embed",
        "layers",
        "norm",
        "head",
    }


def test_the_target_table_has_unit_rows_drawn_from_the_seed() -> None:
    table = target_table(DENOISE.config)
    assert table.shape == (256, 8)
    assert torch.allclose(table.norm(dim=1), torch.ones(256))
    assert torch.equal(table, target_table(DENOISE.config))
    assert not torch.equal(table, target_table(DENOISE.config.replace(seed=1)))


def test_with_a_large_vocabulary_one_table_serves_the_head_and_all_tokens() -> None:
    small = tiny_config(tokenizer="bpe:1024")
    large = tiny_config(tokenizer="bpe:1025")
    assert not small.shares_table and large.shares_table
    assert not large.replace(embedding="full").shares_table
    assert small.replace(embedding="shared").shares_table
    tables = {
        index: [n for n, p in build_block(large, index).named_parameters() if 1025 in p.shape]
        for index in (1, large.blocks)
    }
    assert tables == {1: ["head.weight"], large.blocks: []}, "a fusion block trains none"
    one = build_block(large.replace(lookback=1), 1)
    assert not any("look_back" in name for name, _ in one.named_parameters())


def test_one_table_reads_as_many_tokens_back_as_several_do() -> None:
    changed = TEXT.clone()
    changed[:, 40] += 1
    block = SHARED.blocks[0]
    before, after = (block.embed_tokens(text, 0, None, 0) for text in (TEXT, changed % 256))
    differs = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert differs == list(range(40, 40 + SHARED.config.lookback))


def test_one_table_is_not_for_the_head_of_edm() -> None:
    edm = {"objective": "denoise", "skip": "edm", "compose": "euler"}
    assert not tiny_config(tokenizer="bpe:4096", **edm).shares_table
    with pytest.raises(ConfigError, match="use embedding=full"):
        tiny_config(embedding="shared", **edm)


def test_only_denoising_holds_a_target_table() -> None:
    assert target_table(tiny_config()).numel() == 0
    assert target_table(DENOISE.config).shape == (256, 8)
