"""The tensors of a block, counted without torch: names, shapes, parameters, FLOPs per token.

`learning.model` builds these tensors; tests hold the two against each other. Sizes, plans, the
coordinator and the checks of memory count with this module alone.
"""

from __future__ import annotations

from math import prod

from blocktrain.config import Config

NOISE_FREQUENCIES = 16  # of the noise level, each as a sine and a cosine
Shapes = dict[str, tuple[int, ...]]


def block_shapes(config: Config, index: int) -> Shapes:
    """The parameters of block `index` (from 1) as they travel: name -> shape."""
    shapes = _embedding(config, index) | _layers(config)
    return shapes | (_fusion(config) if index == config.fusion else _independent(config))


def block_parameters(config: Config, index: int) -> int:
    return sum(map(prod, block_shapes(config, index).values()))


def model_parameters(config: Config) -> int:
    """Of all blocks together."""
    fusion = block_parameters(config, config.fusion) if config.fusion else 0
    return config.independent * block_parameters(config, 1) + fusion


def _embedding(config: Config, index: int) -> Shapes:
    """Tables for the tokens; or, if one table serves all, which is the head, a matrix."""
    W, back = config.width, config.lookback - (index != config.fusion)
    if not config.shares_table:
        return {"embed": (config.lookback, config.vocabulary, W)}
    return {"look_back.weight": (back * W, W)} if back else {}


def _layers(config: Config) -> Shapes:
    W = config.width
    layer = {
        "norm_attention.scale": (W,),
        "qkv.weight": (W, 3 * W),
        "attention_out.weight": (W, W),
        "norm_mlp.scale": (W,),
        "up.weight": (W, 4 * W),
        "down.weight": (4 * W, W),
    }
    return {
        f"layers.{i}.{name}": shape
        for i in range(config.layers_per_block)
        for name, shape in layer.items()
    }


def _independent(config: Config) -> Shapes:
    W, Z = config.width, config.z_width
    denoises, edm = config.objective == "denoise", config.objective == "denoise" and config.skip
    shapes: Shapes = {"norm.scale": (W,)}
    if denoises:
        shapes |= {"z_in.weight": (Z, W), "noise_in.weight": (2 * NOISE_FREQUENCIES, W)}
    if config.tail:
        shapes["mask"] = (W,)
    if edm == "edm":
        shapes["z_out.weight"] = (W, Z)
    return shapes | {"head.weight": (Z if edm == "edm" else W, config.vocabulary)}


def _fusion(config: Config) -> Shapes:
    W, N = config.width, config.independent
    return {
        "readout.weights": (N,),
        "mix.weight": (N * W, W),
        "correct.weight": (W, N * W),
        "hand_on.weight": (N * W, W),
    }


def flops_per_token(config: Config, index: int) -> float:
    """Floating-point operations that training block `index` takes per token.

    A parameter of a matrix takes 2 in the forward pass and 4 in the backward pass. Attention sees
    half of the context on average. What a fusion block reads is frozen: blocks take the forward
    pass alone, and their heads have no gradient of their own. A block that trains on a path first
    walks it, a forward pass for each block before it.
    """
    W, L, V = config.width, config.layers_per_block, config.vocabulary
    layers = L * (12 * W**2 + W * config.context)
    tokens = prod(_embedding(config, index).get("look_back.weight", (0,)))
    if index == 0:  # the end-to-end model of the same shape
        return 6.0 * (config.blocks * layers + tokens + W * V)
    layers += tokens
    if index != config.fusion:
        extra = 2 * config.z_width * W if config.objective == "denoise" else 0
        walks = index - 1 if config.training_z == "path" else 0
        return (6.0 + 2.0 * walks) * (layers + W * V + extra)
    N = config.independent
    return 6.0 * (layers + 3 * N * W**2) + 4.0 * N * W * V + 2.0 * N * layers
