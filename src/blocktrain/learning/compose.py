"""Blocks -> one model. There is one table with a row per composition: `COMPOSITIONS`.

A row builds blocks, says what each one trains on, assembles a model from them, scores it, and
says how it is served. To add a composition, write one class and `register` an instance; nothing
else asks which composition a model has.

A *stage* is anything called as `stage(ids, start) -> features`: it forgets what it knew from
position `start` on, reads the ids from there, and returns their features (1, T, W). Local blocks
and remote ones look alike. A *scorer* is the same one level up, `scorer(ids, start) -> logits`:
the composed model with its caches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import TRAITS, Config, Traits
from blocktrain.errors import ConfigError
from blocktrain.learning.model import (
    Block,
    Cache,
    FanReadout,
    FusionBlock,
    IndependentBlock,
    Readout,
    build_fusion,
    build_independent,
    pool,
    target_table,
)
from blocktrain.learning.noise import edm, euler_step, in_tail, noise_levels
from blocktrain.learning.objective import (
    Draws,
    Loss,
    denoise_logits,
    denoise_loss,
    draw_noise,
    draw_present,
    fusion_loss,
    next_loss,
)

FeatureStage = Callable[[Tensor, int], Tensor]
Scorer = Callable[[Tensor, int], Tensor]
Predictors = Callable[[Tensor, int], dict[str, Tensor]]
"""(tokens (B, T), index of the first row) -> log-probabilities or logits (B, T, V) by name."""
LoadBlocks = Callable[[Iterable[int]], Mapping[int, Block]]
"""Blocks by number, from wherever they are."""
PIECE = 128
MARGINAL_DRAWS = 8


@dataclass
class Model:
    """A trained model: its independent blocks in order, and what composes them."""

    config: Config
    blocks: list[IndependentBlock]
    fusion: FusionBlock | None = None
    pool_weights: Tensor | None = None
    """Fitted weights of the pool; None: equal ones."""
    compose: str = ""
    """The composition that it is used with; by default the one that it was trained for."""
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.compose = self.compose or self.config.compose
        self.table = target_table(self.config).to(self.blocks[0].device)
        for block in [*self.blocks, *([self.fusion] if self.fusion else [])]:
            block.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        return self.blocks[0].device

    @property
    def composition(self) -> Composition:
        """The one that it was trained for, which evaluates all that there is to evaluate."""
        return composition_of(self.config)

    def select(self, numbers: Iterable[int]) -> dict[int, Block]:
        """Some of its blocks by number, the fusion block included."""
        known: dict[int, Block] = dict(enumerate(self.blocks, start=1))
        if self.fusion and self.config.fusion:
            known[self.config.fusion] = self.fusion
        return {number: known[number] for number in numbers}

    def features(self, number: int, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """What block `number` (from 1) makes of the tokens alone, without a noised target."""
        block = self.blocks[number - 1]
        if block.skip != "exact":
            return block.features(tokens, cache=cache)
        # Zero is the mean of the z that the block saw.
        z = torch.zeros(*tokens.shape, self.config.z_width, device=self.device)
        return block.features(
            tokens, z=z, c_noise=middle_noise(self.config, number, self.device), cache=cache
        )

    def all_features(self, tokens: Tensor) -> Tensor:
        """(N, B, T, W)."""
        return torch.stack([self.features(n, tokens) for n in range(1, len(self.blocks) + 1)])

    def readout(self) -> Readout:
        """The pool of its independent blocks."""
        return make_pool(self.config, self.blocks, self.pool_weights)

    def scorer(self, *, seed: int = 0) -> Scorer:
        """The composed model as it was meant to be used, with its caches."""
        return composition_of(self.config, self.compose).scorer(self, seed)

    def drafter(self, number: int = 1) -> Scorer:
        """One block as a language model of its own."""
        if not self.config.predicts_without_noise:
            raise ConfigError(
                "a block of skip=edm cannot draft; use mode autoregressive, "
                "or --draft none for a model with a tail"
            )
        stage = LocalStage(self, number)
        return lambda ids, start: self.blocks[number - 1](stage(ids, start))


class Composition:
    """One row of the table. A subclass names its traits and overrides what differs."""

    traits: Traits

    def build(self, config: Config, index: int) -> Block:
        """Block `index` (from 1) with its initial weights, a function of (seed, index)."""
        if index == config.fusion:
            return build_fusion(config, index)
        return build_independent(config, index)

    def draw(
        self, block: Block, config: Config, sequences: int, generator: torch.Generator
    ) -> Draws:
        """What a batch of so many sequences needs at random."""
        if isinstance(block, FusionBlock):
            return draw_present(block.reads, sequences, config.feature_dropout, generator)
        if isinstance(block, IndependentBlock) and block.skip:
            return draw_noise(config, sequences, generator)
        return Draws()

    def loss(
        self,
        block: Block,
        sources: Sequence[IndependentBlock],
        tokens: Tensor,
        draws: Draws,
        *,
        config: Config,
        index: int,
        table: Tensor,
    ) -> Loss:
        """What block `index` is trained to lower; a fusion block reads the frozen `sources`."""
        if isinstance(block, FusionBlock):
            return fusion_loss(block, sources, tokens, draws)
        if not isinstance(block, IndependentBlock):
            raise ConfigError(f"compose={config.compose} does not say how block {index} is trained")
        if not block.skip:
            return next_loss(block, tokens)
        if config.training_z == "path":
            before = sources or [block] * (index - 1)
            return path_loss(block, before, table, tokens, config, draws)
        return denoise_loss(block, table, tokens, config, index, draws)

    def connect(self, config: Config, blocks: Mapping[int, Block]) -> None:
        """Copy what a fusion block keeps of the blocks it reads; it does not travel with it."""
        fusion = blocks.get(config.fusion or 0)
        if isinstance(fusion, FusionBlock):
            fusion.readout.copy_from(independent(blocks))

    def assemble(
        self,
        config: Config,
        blocks: Mapping[int, Block],
        pool_weights: Tensor | None = None,
        compose: str = "",
    ) -> Model:
        """The model of all its blocks. Without its fusion block it is only good as a pool."""
        fusion = blocks.get(config.fusion or 0)
        return Model(
            config,
            independent(blocks),
            fusion if isinstance(fusion, FusionBlock) else None,
            pool_weights,
            compose,
        )

    def scorer(self, model: Model, seed: int) -> Scorer:
        """The composed model with its caches, in this process."""
        stages = [LocalStage(model, n) for n in range(1, len(model.blocks) + 1)]
        return FanScorer(stages, self.readout(model.config, model.select, model.pool_weights))

    def readout(
        self, config: Config, load: LoadBlocks, pool_weights: Tensor | None = None
    ) -> FanReadout:
        """What combines the features of a fan. It loads only the blocks whose weights it needs."""
        raise ConfigError(f"compose={config.compose} has no readout; it is served as a ring")

    def extra_readout(self, model: Model) -> FanReadout | None:
        """What `context_predictors` evaluates beside the blocks and their pool."""
        return None

    def predictors(
        self,
        model: Model,
        *,
        seed: int = 0,
        draws: int = MARGINAL_DRAWS,
        leave_out: bool = False,
    ) -> list[Predictors]:
        """All that can be evaluated of a model; one predictor has the name of the composition."""
        passes = []
        if model.config.predicts_without_noise:
            passes.append(context_predictors(model, leave_out=leave_out))
        if model.blocks[0].skip:
            passes.append(euler_predictors(model, seed=seed, draws=draws))
        return passes

    def quick_predictors(self, model: Model, *, seed: int = 0) -> list[Predictors]:
        """What is scored while a run is going on: the blocks and the composed model."""
        return [context_predictors(model)] if model.config.predicts_without_noise else []


class FanComposition(Composition):
    """All blocks read the same tokens, and a readout combines their features."""

    def extra_readout(self, model: Model) -> FanReadout | None:
        if model.config.fusion and not model.fusion:
            return None
        return self.readout(model.config, model.select, model.pool_weights)


class Fuse(FanComposition):
    """The last block corrects the features of all others."""

    traits = TRAITS["fuse"]

    def readout(
        self, config: Config, load: LoadBlocks, pool_weights: Tensor | None = None
    ) -> FanReadout:
        number = config.fusion or config.blocks
        fusion = load([number])[number]
        if not isinstance(fusion, FusionBlock):
            raise ConfigError(f"block {number} is not a fusion block")
        return fusion.requires_grad_(False).eval()


class WeightedPool(FanComposition):
    """A weighted mean of the blocks' log-probabilities."""

    traits = TRAITS["pool"]

    def readout(
        self, config: Config, load: LoadBlocks, pool_weights: Tensor | None = None
    ) -> FanReadout:
        numbers = range(1, config.independent + 1)
        return make_pool(config, independent(load(numbers)), pool_weights)

    def extra_readout(self, model: Model) -> None:
        """The pool is evaluated anyway."""


class Euler(Composition):
    """The paper's path: every block denoises a step further."""

    traits = TRAITS["euler"]

    def scorer(self, model: Model, seed: int) -> Scorer:
        return EulerScorer(model, seed)

    def quick_predictors(self, model: Model, *, seed: int = 0) -> list[Predictors]:
        path = euler_predictors(model, seed=seed, draws=1)

        def last(tokens: Tensor, first: int) -> dict[str, Tensor]:
            return {"euler": path(tokens, first)["euler"]}

        return [*super().quick_predictors(model, seed=seed), last]


COMPOSITIONS: dict[str, Composition] = {}


def register(composition: Composition) -> None:
    """Let settings name this composition."""
    COMPOSITIONS[composition.traits.name] = composition
    TRAITS[composition.traits.name] = composition.traits


for _row in (Fuse(), WeightedPool(), Euler()):
    register(_row)


def composition_of(config: Config, name: str = "") -> Composition:
    """The one of these settings, or the one of that name, which composes the same blocks."""
    return COMPOSITIONS[name or config.compose]


def build_block(config: Config, index: int) -> Block:
    """Block `index` (from 1) of a run with its initial weights, a function of (seed, index)."""
    return composition_of(config).build(config, index)


def independent(blocks: Mapping[int, Block]) -> list[IndependentBlock]:
    """The blocks that read only tokens, in order."""
    return [block for _, block in sorted(blocks.items()) if isinstance(block, IndependentBlock)]


def make_pool(
    config: Config, blocks: Sequence[IndependentBlock], weights: Tensor | None = None
) -> Readout:
    """The log-linear pool of some blocks; without weights, of equal ones."""
    first = blocks[0]
    readout = Readout(len(blocks), config.width, first.vocabulary).to(first.device)
    readout.requires_grad_(False).copy_from(blocks)
    if weights is not None:
        readout.weights.copy_(weights)
    return readout


def context_predictors(model: Model, *, leave_out: bool = False) -> Predictors:
    """Every block alone, their pool, and what the composition makes of their features.

    With `leave_out` the latter is also evaluated with each block missing in turn.
    """
    own, count, name = (
        model.composition.extra_readout(model),
        len(model.blocks),
        model.config.compose,
    )
    weights = model.readout().weights

    def predict(tokens: Tensor, first: int) -> dict[str, Tensor]:
        features = model.all_features(tokens)
        logits = {f"block_{n + 1}": model.blocks[n](features[n]) for n in range(count)}
        present = torch.ones(count, tokens.shape[0], device=tokens.device)
        logp = torch.stack([logits[f"block_{n + 1}"].log_softmax(-1) for n in range(count)])
        logits["pool"] = pool(logp, weights, present)
        if own is not None:
            logits[name] = own.combine(tokens, features, present)
            for n in range(count) if leave_out and count > 1 else ():
                missing = present.clone()
                missing[n] = 0
                logits[f"{name}_without_{n + 1}"] = own.combine(tokens, features, missing)
        return logits

    return predict


def euler_predictors(model: Model, *, seed: int = 0, draws: int = MARGINAL_DRAWS) -> Predictors:
    """The paper's path after each block, and (draws > 1) its probabilities averaged over draws.

    A path from zero has nothing random to average over.
    """
    draws = draws if model.config.start == "noise" else 1

    def predict(tokens: Tensor, first: int) -> dict[str, Tensor]:
        B, T = tokens.shape
        predictions: dict[str, Tensor] = {}
        total: Tensor | None = None
        for draw in range(draws):
            rows = [row_noise(seed, draw, first + i, T, model.config.z_width) for i in range(B)]
            z = path_start(model.config, torch.stack(rows).to(tokens.device))
            path = euler_path(model, tokens, z)
            if draw == 0:
                predictions = {f"euler_{n + 1}": logits for n, logits in enumerate(path)}
                predictions["euler"] = path[-1]
            p = path[-1].softmax(-1)
            total = p if total is None else total + p
        if total is not None and draws > 1:
            predictions["marginal"] = (total / draws).log()
        return predictions

    return predict


def middle_noise(config: Config, number: int, device: torch.device) -> Tensor:
    """The noise level that block `number` gets when it has no z: the middle of its range.

    A block that was trained on a path knows only the level at which the path reaches it.
    """
    low, high = noise_levels(config).ranges(config.blocks, 0.0)[number - 1]
    level = high if config.training_z == "path" else (low * high) ** 0.5
    return edm(torch.tensor(level, device=device), config.sigma_data).noise


class LocalStage:
    """A block in this process, with its cache."""

    def __init__(self, model: Model, number: int) -> None:
        self.model, self.number = model, number
        self.cache = Cache(model.blocks[number - 1], 1)

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        self.cache.truncate(start)
        return in_pieces(
            lambda part: self.model.features(self.number, ids[:, part], self.cache), ids.shape[1]
        )


class FanScorer:
    """All stages read the same ids; a readout combines their features."""

    def __init__(self, stages: Sequence[FeatureStage], readout: FanReadout) -> None:
        self.stages, self.readout = stages, readout
        self.cache = readout.new_cache()

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        features = torch.stack([stage(ids, start) for stage in self.stages])
        present = torch.ones(features.shape[:2], device=features.device)
        if self.cache:
            self.cache.truncate(start)
        return in_pieces(
            lambda part: self.readout.combine(
                ids[:, part], features[:, :, part], present, self.cache
            ),
            ids.shape[1],
        )


def in_pieces(work: Callable[[slice], Tensor], positions: int) -> Tensor:
    """`work` on at most PIECE positions at a time, joined.

    BLAS may sum a longer product in another order.
    """
    return torch.cat([work(slice(i, i + PIECE)) for i in range(0, positions, PIECE)], dim=1)


class EulerScorer:
    """The paper's path: every position has its own start and passes all blocks in order.

    Its blocks mix z into what later positions attend to, so nothing can be cached: each call walks
    the whole window again.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.seed = model, seed
        self.window = torch.zeros(1, 0, dtype=torch.long, device=model.device)

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        self.window = torch.cat([self.window[:, :start], ids], dim=1)
        noise = window_noise(self.seed, self.window[0].tolist(), self.model.config.z_width)[None]
        z = path_start(self.model.config, noise.to(self.model.device))
        return euler_path(self.model, self.window, z)[-1][:, start:]


def path_start(config: Config, noise: Tensor) -> Tensor:
    """Where the path starts, from standard normal noise: at the highest noise level, or at zero."""
    return config.sigma_max * noise if config.start == "noise" else torch.zeros_like(noise)


def euler_path(model: Model, tokens: Tensor, z: Tensor, *, tail: int = 0) -> list[Tensor]:
    """Logits (B, T, V) after each block, walking the noise levels down from sigma_max.

    `z` (B, T, Z) is where the path starts.
    """
    path = []
    for number, block in enumerate(model.blocks, start=1):
        logits, z = euler_hop(model.config, number, block, model.table, tokens, z, tail=tail)
        path.append(logits)
    return path


def euler_hop(
    config: Config,
    number: int,
    block: IndependentBlock,
    table: Tensor,
    tokens: Tensor,
    z: Tensor,
    *,
    tail: int = 0,
) -> tuple[Tensor, Tensor]:
    """Block `number`'s step of the path: its logits (B, T, V), and z at the next noise level.

    A tail goes further down than the rest.
    """
    sigma_next, sigma = noise_levels(config).edges(config.blocks)[-number - 1 :][:2]
    if not tail:
        logits = denoise_logits(
            block, table, tokens, z, torch.tensor(sigma, device=tokens.device), config.sigma_data
        )
        return logits, euler_step(z, logits.softmax(-1) @ table, sigma, sigma_next)
    low_next, low = noise_levels(config, tail=True).edges(config.blocks)[-number - 1 :][:2]
    where = in_tail(tokens.shape[1], tail, tokens.device)[None]
    level, level_next = torch.where(where, low, sigma), torch.where(where, low_next, sigma_next)
    logits = denoise_logits(block, table, tokens, z, level, config.sigma_data, tail=tail)
    return logits, euler_step(
        z, logits.softmax(-1) @ table, level[..., None], level_next[..., None]
    )


def path_loss(
    block: IndependentBlock,
    before: Sequence[IndependentBlock],
    table: Tensor,
    tokens: Tensor,
    config: Config,
    draws: Draws,
) -> Loss:
    """Cross entropy of a block at the z that a path through the blocks before it ends with.

    The block may stand in for them: then it needs no other, and learns to improve on itself.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    z = path_start(config, draws.noise)
    with torch.no_grad():
        for number, other in enumerate(before, start=1):
            z = euler_hop(config, number, other, table, inputs, z)[1]
    logits = euler_hop(config, len(before) + 1, block, table, inputs, z)[0]
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return Loss(ce, ce)


def position_noise(seed: int, first: int, count: int, width: int) -> Tensor:
    """Standard normal (count, width), row i a pure function of (seed, first + i)."""
    rows = [counter_draws("noise", seed, first + i).standard_normal(width) for i in range(count)]
    return torch.from_numpy(np.stack(rows)).float()


def row_noise(seed: int, draw: int, row: int, count: int, width: int) -> Tensor:
    """Standard normal (count, width) for one row of a split.

    It is a pure function, so batches may be cut anywhere.
    """
    return position_noise((seed << 8) + draw, row, 1, count * width).reshape(count, width)


def window_noise(seed: int, window: Sequence[int], width: int, first: int = 0) -> Tensor:
    """Standard normal (tokens from `first` on, width).

    Each row is a pure function of the seed and of the window up to there. If it depended on the
    place in the window alone, every window would begin with the noise of the one before, and the
    text would repeat itself.
    """
    hasher, rows = hashlib.sha256(), []
    for position, token in enumerate(window):
        hasher.update(token.to_bytes(max(1, -(-token.bit_length() // 8)), "little"))
        if position >= first:
            mark = int.from_bytes(hasher.digest()[:8]) >> 4  # the upper bits are for the purpose
            rows.append(counter_draws("noise", seed, mark).standard_normal(width))
    return torch.from_numpy(np.stack(rows)).float() if rows else torch.zeros(0, width)


def counter_draws(
    purpose: Literal["noise", "sampling"], seed: int, position: int
) -> np.random.Generator:
    """Random numbers of one position, by counter; different purposes never share them."""
    key = np.array([seed, position | (1 if purpose == "noise" else 2) << 60], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
