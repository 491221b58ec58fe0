"""The plain local loop that trains one block, or the end-to-end reference."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from blocktrain.config import Config, require_device
from blocktrain.errors import ConfigError, RunError
from blocktrain.files import replace_file
from blocktrain.learning.compose import build_block, composition_of
from blocktrain.learning.model import (
    Block,
    FusionBlock,
    IndependentBlock,
    build_reference,
    target_table,
)
from blocktrain.learning.objective import Draws, Loss
from blocktrain.learning.optimizer import Optimizers
from blocktrain.learning.shards import Batches
from blocktrain.schedule import block_learning_rate

COMPILER = ("torch._dynamo", "torch._inductor")  # modules whose errors are about compiling
REFERENCE = 0  # the end-to-end model takes the place before block 1
Weights = dict[str, npt.NDArray[np.float32]]


def pick_device(name: str) -> torch.device:
    """The device by name; auto takes the best there is."""
    try:
        require_device(name)
    except ValueError as error:
        raise ConfigError(f"device={name!r} {error}") from None
    if name == "auto":
        name = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name}, but this torch sees no CUDA device; use --device cpu, "
            "or install a CUDA build of torch"
        )
    if name.startswith("cuda:") and int(name[5:]) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name}, but this torch sees {torch.cuda.device_count()} CUDA device(s), "
            "numbered from 0"
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps, but this torch sees no Apple GPU; use --device cpu")
    return torch.device(name)


def compile_layers(blocks: Iterable[Block], device: torch.device) -> None:
    """Let torch.compile make kernels of the layers when they are first used.

    Shapes are never generalised: a kernel, and with it the bits of a result, depends on the shape
    alone and not on what the process computed before. So an audit repeats them.
    """
    require_compiler(device)
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # no processes that stay: a layer has few kernels
    for block in blocks:
        for layer in block.layers:
            layer.compile(dynamic=False)


def require_compiler(device: torch.device) -> None:
    """A ConfigError says what torch.compile lacks on this machine."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError(
                "compile=true needs triton on a GPU, and it is not installed: install it with "
                "`pip install triton`, or leave --compile out"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "compile=true needs a C++ compiler (g++) on every machine that trains, and there is "
            "none here: install it, for example with `apt install g++`, or leave --compile out"
        ) from None


@dataclass
class Trainer:
    """One block (or the reference), its optimizer, and how many steps it has made.

    Holds no other block's optimizer.
    """

    config: Config
    index: int
    sources: Sequence[IndependentBlock] = ()
    step: int = 0
    shift: int = 0  # step s trains on batch s + shift of the block's order
    seconds: float = field(default=0.0, init=False)  # of all its steps, also those before a stop
    block: Block = field(init=False)
    optimizer: Optimizers = field(init=False)

    def __post_init__(self) -> None:
        self.device = pick_device(self.config.device)
        block = (
            build_reference(self.config)
            if self.index == REFERENCE
            else build_block(self.config, self.index)
        )
        self.block = block.to(self.device)
        if self.config.compile:
            compile_layers([self.block], self.device)
        self.table = target_table(self.config).to(self.device)
        if self.fusion:
            if len(self.sources) != self.fusion.reads:
                raise ConfigError(
                    f"the fusion block reads {self.fusion.reads} blocks, "
                    f"{len(self.sources)} were given"
                )
            self.read(self.sources)
        kind = self.config.fusion_optimizer if self.fusion else self.config.optimizer
        self.optimizer = Optimizers(self.block, kind, weight_decay=self.config.weight_decay)

    @property
    def fusion(self) -> FusionBlock | None:
        """The block, if it is a fusion block."""
        return self.block if isinstance(self.block, FusionBlock) else None

    def read(self, sources: Sequence[IndependentBlock]) -> None:
        """Let the fusion block read newly published blocks."""
        self.sources = [source.to(self.device).requires_grad_(False) for source in sources]
        if self.config.compile:
            compile_layers(self.sources, self.device)
        if self.fusion:
            self.fusion.readout.copy_from(self.sources)

    def run(self, batches: Batches, until: int) -> Iterator[tuple[int, float]]:
        """Train to step `until`; after every step yields (steps made, cross entropy)."""
        while self.step < until:
            began = time.monotonic()
            loss = self._one_step(batches)
            self.step += 1
            self.seconds += time.monotonic() - began
            yield self.step, loss

    def _one_step(self, batches: Batches) -> float:
        c = self.config
        tokens = torch.from_numpy(batches(self.step + self.shift))
        self.block.zero_grad(set_to_none=True)
        try:
            loss = self._gradients(tokens)
        except RuntimeError as error:
            if c.compile and type(error).__module__.startswith(COMPILER):
                raise RunError(
                    f"torch.compile cannot compile block {self.index} here "
                    f"({str(error).strip().splitlines()[0]}); start a run without --compile"
                ) from None
            raise
        torch.nn.utils.clip_grad_norm_(self.block.parameters(), 1.0)
        self.optimizer.step(block_learning_rate(c, self.index, self.step))
        ce = loss.item()
        if not math.isfinite(ce):
            raise RunError(
                f"the loss of block {self.index} is not finite at step {self.step}; "
                "lower the learning rate"
            )
        return ce

    def _gradients(self, tokens: Tensor) -> Tensor:
        """Add up the gradients of a batch, `micro_batch` sequences at a time; returns its CE."""
        sequences, rows, draws = len(tokens), self.config.rows, self._draw(len(tokens))
        ce = torch.zeros((), device=self.device)
        for first in range(0, sequences, rows):
            part = slice(first, first + rows)
            loss = self._loss(tokens[part].to(self.device), draws.of(part, self.device))
            share = len(tokens[part]) / sequences
            (loss.total * share).backward()
            ce += loss.ce.detach() * share
        return ce

    def _draw(self, sequences: int) -> Draws:
        """What this step needs at random, for the whole batch."""
        entropy = [self.config.seed, self.index, self.step + self.shift]
        seed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(seed[0]))
        return composition_of(self.config).draw(self.block, self.config, sequences, generator)

    def _loss(self, tokens: Tensor, draws: Draws) -> Loss:
        c = self.config
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=c.dtype == "bfloat16"):
            return composition_of(c).loss(
                self.block,
                self.sources,
                tokens,
                draws,
                config=c,
                index=self.index,
                table=self.table,
            )

    def weights(self) -> Weights:
        """The parameters as they travel, without what a fusion block copies from other blocks."""
        return block_weights(self.block)

    def load_weights(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Take over parameters; names and shapes must be exactly those of the block."""
        put_weights(self.block, weights)

    def drop_gradients(self) -> None:
        """Free their memory; the next step computes its own."""
        self.block.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state as `moment.name`; empty before the first step."""
        return self.optimizer.moments()

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """Continue with these moments; without any, the optimizer starts fresh."""
        self.optimizer.restore(moments)

    def save(self, path: Path) -> None:
        """Weights, optimizer moments and step, as one safetensors file, atomically."""
        tensors = {
            f"model.{name}": t.detach().contiguous() for name, t in self.block.state_dict().items()
        }
        tensors |= self.moments()
        note = {
            "fingerprint": self.config.fingerprint,
            "index": self.index,
            "step": self.step,
            "seconds": self.seconds,
        }
        write_state(path, tensors, json.dumps(note))

    def load(self, path: Path) -> None:
        """Continue from a saved state of the same run and block."""
        tensors, text = read_state(path)
        note = json.loads(text)
        if (note["fingerprint"], note["index"]) != (self.config.fingerprint, self.index):
            raise RunError(
                f"{path} belongs to another run or block; "
                "resume with the settings that the run was started with"
            )
        self.step, self.seconds = note["step"], note["seconds"]
        load_weights(
            self.block,
            {k.removeprefix("model."): t for k, t in tensors.items() if k.startswith("model.")},
            path,
        )
        self.restore({k: t for k, t in tensors.items() if not k.startswith("model.")})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; RunError says what is wrong with it."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from None
    except safetensors.SafetensorError as error:
        raise RunError(f"{path} is damaged ({error}); restore it or train again") from None


def write_state(path: Path, tensors: Mapping[str, Tensor], note: str) -> None:
    """Tensors and a note about them as one safetensors file, atomically.

    Only its owner can read it. It gets a hash, because safetensors does not notice a flipped bit.
    No copy is made: a worker's state is three times its weights.
    """
    metadata = {"note": note, "sha256": _state_hash(tensors, note)}
    with replace_file(path, private=True) as partial:
        safetensors.torch.save_file(dict(tensors), partial, metadata)


def read_state(path: Path) -> tuple[dict[str, Tensor], str]:
    """What `write_state` wrote, to the last bit; RunError says what is wrong with it."""
    tensors, metadata = read_tensors(path)
    note = metadata.get("note", "")
    if metadata.get("sha256") != _state_hash(tensors, note):
        raise RunError(
            f"{path} is damaged, or of another version of blocktrain; "
            "delete it to train that block again"
        )
    return tensors, note


def _state_hash(tensors: Mapping[str, Tensor], note: str) -> str:
    digest = hashlib.sha256(note.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_weights(block: Block, weights: dict[str, Tensor], path: Path) -> None:
    """Put weights into a block, refusing other names or shapes."""
    expected = {name: tuple(t.shape) for name, t in block.state_dict().items()}
    shapes = {name: tuple(t.shape) for name, t in weights.items()}
    if expected != shapes:
        odd = sorted(set(expected.items()) ^ set(shapes.items()))[0][0]
        raise RunError(
            f"{path} does not fit this model (first difference: {odd}); "
            "it is damaged or from another run"
        )
    block.load_state_dict(weights)


def block_weights(block: Block) -> Weights:
    """Copies of a block's parameters, without its buffers."""
    return {
        name: p.detach().to("cpu", torch.float32, copy=True).numpy()
        for name, p in block.named_parameters()
    }


def put_weights(block: Block, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Put parameters into a block, refusing other names or shapes."""
    expected = {name: tuple(p.shape) for name, p in block.named_parameters()}
    shapes = {name: w.shape for name, w in weights.items()}
    if expected != shapes:
        odd = sorted(set(expected.items()) ^ set(shapes.items()))[0][0]
        raise RunError(
            f"these weights do not fit the block (first difference: {odd}); "
            "they are from another run"
        )
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(weights[name], dtype=np.float32)))
