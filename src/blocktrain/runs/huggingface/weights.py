"""The weights of a finished model, under the names of `exported/modeling_blocktrain.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from blocktrain.errors import RunError
from blocktrain.learning.compose import middle_noise
from blocktrain.learning.model import Block, FusionBlock, IndependentBlock, noise_features
from blocktrain.runs.folder import ModelManifest, load_blocks, write_json

CPU = torch.device("cpu")
LARGEST_FILE = 5_000_000_000  # bytes; larger models are written as several files
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MATRIX = re.compile(
    r"(layers\.\d+\.(qkv|attention_out|up|down)|head|mix|hand_on|correct|look_back)\.weight"
)
NORM = re.compile(r"(layers\.\d+\.norm_(attention|mlp)|norm)\.scale")
UNUSED = re.compile(r"z_in\.weight|noise_in\.weight|mask|readout\.(norms|heads|weights)")

NamedTensors = dict[str, Tensor]


def model_tensors(manifest: ModelManifest, numbers: Iterable[int]) -> Iterator[NamedTensors]:
    """The tensors of one block after the other, so that only one block is in memory.

    The last ones are what the composed model keeps of all blocks: norms, heads and pool weights.
    """
    norms: list[Tensor] = []
    heads: list[Tensor] = []
    count = manifest.config.independent
    weights = torch.tensor(manifest.pool_weights or [1 / count] * count)
    for number in numbers:
        block = load_blocks(manifest, [number], CPU)[number]
        tensors = block_tensors(block)
        if isinstance(block, FusionBlock):
            weights = block.readout.weights
            yield {f"fusion.{name}": tensor for name, tensor in tensors.items()}
        elif isinstance(block, IndependentBlock):
            norms.append(tensors.pop("norm.weight"))
            heads.append(tensors.pop("head.weight"))
            if block.skip:
                tensors["offset"] = input_offset(manifest, number, block)
            yield {f"blocks.{number - 1}.{name}": tensor for name, tensor in tensors.items()}
    yield {
        "norm_scales": torch.stack(norms),
        "lm_head.weight": torch.cat(heads, dim=1),
        "pool_weights": weights,
    }


def input_offset(manifest: ModelManifest, number: int, block: IndependentBlock) -> Tensor:
    """What a block adds to every position when it has no noised target."""
    return block.noise_in(noise_features(middle_noise(manifest.config, number, CPU)))[0]


def block_tensors(block: Block) -> NamedTensors:
    """Embedding, layers and matrices. `nn.Linear` has its matrix the other way round."""
    tensors: NamedTensors = {}
    for name, tensor in block.state_dict().items():
        if name == "embed":
            tensors |= {f"embed.{back}.weight": table for back, table in enumerate(tensor)}
        elif MATRIX.fullmatch(name):
            tensors[name] = tensor.T
        elif NORM.fullmatch(name):
            tensors[name.replace(".scale", ".weight")] = tensor
        elif not UNUSED.fullmatch(name):
            raise RunError(f"this model has {name}, which `blocktrain export` does not know")
    return tensors


def write_weights(folder: Path, parts: Iterable[NamedTensors], largest: int = LARGEST_FILE) -> None:
    """One file; of a large model several and their index."""
    files: list[list[str]] = []
    total = 0
    for tensors in pack(parts, largest):
        files.append(list(tensors))
        total += sum(tensor.nbytes for tensor in tensors.values())
        path = folder / _numbered(len(files))
        try:
            safetensors.torch.save_file(tensors, path, {"format": "pt"})
        except safetensors.SafetensorError as error:  # of a full disk, for one
            raise RunError(f"cannot write {path.name} into {folder.parent}: {error}") from None
        path.chmod(0o644)  # it is made for its owner alone
    if len(files) == 1:
        (folder / _numbered(1)).rename(folder / WEIGHTS)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / _numbered(number)).rename(folder / name)
        places |= dict.fromkeys(names, name)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _numbered(number: int) -> str:
    """The name of a file while it is not known how many there will be."""
    return f"{number}.safetensors"


def pack(parts: Iterable[NamedTensors], largest: int) -> Iterator[NamedTensors]:
    """The same tensors, as many at a time as a file of `largest` bytes holds."""
    packed: NamedTensors = {}
    size = 0
    for tensors in parts:
        for name, tensor in tensors.items():
            if packed and size + tensor.nbytes > largest:
                yield packed
                packed, size = {}, 0
            packed[name] = tensor.detach().contiguous()
            size += tensor.nbytes
    yield packed
