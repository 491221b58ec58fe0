"""A trained model in a script: scores, logits and text, as the commands give them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from typing import SupportsIndex, TypedDict, Unpack

import torch
from torch import Tensor

from blocktrain.cli.environment import require_model, source
from blocktrain.cli.flags import read_flags
from blocktrain.cli.generate import TextFlags
from blocktrain.config import Config
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.learning.compose import Model
from blocktrain.learning.generate import DraftSource, Mode, Sampler, write
from blocktrain.learning.threads import limited_threads
from blocktrain.learning.tokenizer import Tokenizer, tokenizer_of
from blocktrain.learning.train import pick_device
from blocktrain.runs.folder import ModelManifest, load_model, read_manifest
from blocktrain.runs.results import evaluate_run

EVAL_ADVICE = "use a longer text, or evaluate more of it"
PromptInput = str | bytes | Iterable[SupportsIndex]
"""A text, or its token ids: a list, or an array of numpy or torch."""


class TextOptions(TypedDict, total=False):
    """How text is written; what is left out is as in `blocktrain generate`."""

    temperature: float
    top_p: float
    seed: int
    mode: Mode
    sweeps: int
    draft: DraftSource


@dataclass(frozen=True)
class CrossEntropy:
    """How well a model predicts a text. Lower is better."""

    nats_per_token: float
    nats_per_byte: float

    @property
    def bits_per_byte(self) -> float:
        """Compares models of different tokenizers."""
        return self.nats_per_byte / math.log(2)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats_per_token)


@dataclass(frozen=True)
class TrainedModel:
    """The composed model of a run folder. Nothing is loaded before it is needed."""

    folder: Path
    device: str = "cpu"
    threads: int = 1
    """More than one may change the last bits of a result, and so a text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if self.threads < 1:
            raise ConfigError(f"threads: must be at least 1 (got {self.threads})")
        require_model(self.folder)
        _ = self.manifest

    @cached_property
    def manifest(self) -> ModelManifest:
        """The settings and the hashes of all files."""
        return read_manifest(self.folder)

    @property
    def config(self) -> Config:
        return self.manifest.config

    @cached_property
    def network(self) -> Model:
        """The blocks and what composes them, as torch modules."""
        return load_model(self.folder, pick_device(self.device))

    @property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.config)

    def evaluate(
        self, data: Path | str | None = None, *, eval_bytes: int | None = None, draws: int = 1
    ) -> dict[str, CrossEntropy]:
        """Cross entropies on the valid split of a corpus: `composed`, and each block alone.

        Without `data`, of the corpus that it was trained on. `eval_bytes` takes the beginning only.
        """
        if draws < 1:
            raise ConfigError(f"draws: must be at least 1 (got {draws})")
        try:
            corpus = source(self.manifest.data if data is None else str(data)).open(self.tokenizer)
        except CorpusError as error:
            hint = "" if data else "; name another text"
            raise CorpusError(f"{error}{hint}") from None
        tokens = corpus.limit_valid(eval_bytes, self.tokenizer)
        tokens.require(self.config.context, "valid", advice=EVAL_ADVICE)
        per_byte, _ = evaluate_run(
            self.folder,
            self.network,
            tokens,
            draws=draws,
            progress=lambda _: None,
            threads=self.threads,
        )
        return {
            name: CrossEntropy(nats * tokens.bytes_per_token, nats)
            for name, nats in per_byte.items()
        }

    def logits(self, text: PromptInput) -> Tensor:
        """(tokens, vocabulary): row t scores what may follow token t. At most one context."""
        ids = self.encode(text)
        if not 0 < len(ids) <= self.config.context:
            raise ConfigError(
                f"the text has {len(ids)} tokens; the model reads 1 to {self.config.context}"
            )
        with torch.no_grad(), limited_threads(self.threads):
            scorer = self.network.scorer()
            return scorer(torch.tensor([ids], device=self.network.device), 0)[0].float().cpu()

    def generate(
        self, prompt: PromptInput = "\n", max_tokens: int = 256, **options: Unpack[TextOptions]
    ) -> str:
        """The text that follows a prompt: the one that `blocktrain generate` writes.

        Options are temperature, top_p, seed, mode, sweeps and draft, as in that command.
        """
        return "".join(self.stream(prompt, max_tokens, **options))

    def stream(
        self, prompt: PromptInput = "\n", max_tokens: int = 256, **options: Unpack[TextOptions]
    ) -> Iterator[str]:
        """The same text as it is written, in whole characters."""
        flags = read_flags(TextFlags, {"max_tokens": max_tokens, **options})
        flags.check()
        return self._pieces(self.encode(prompt) or self.encode("\n"), flags)

    def _pieces(self, ids: list[int], flags: TextFlags) -> Iterator[str]:
        decoder = self.tokenizer.decoder()
        sampler = Sampler(flags.seed, flags.temperature, flags.top_p)
        with limited_threads(self.threads):
            for token in write(
                self.network,
                ids,
                flags.max_tokens,
                sampler,
                mode=flags.mode,
                sweeps=flags.sweeps,
                draft=flags.draft,
            ):
                if piece := decoder.text([token]):
                    yield piece
        if rest := decoder.text(final=True):
            yield rest

    def encode(self, text: PromptInput) -> list[int]:
        """The token ids of a text; ids stay as they are, if the vocabulary has them."""
        try:
            if isinstance(text, str | bytes):
                raw = text.encode() if isinstance(text, str) else text
                return [int(token_id) for token_id in self.tokenizer.encode(raw)]
            ids = [index(token_id) for token_id in text]
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text cannot be written as UTF-8: {error.reason}") from None
        except TypeError:
            raise ConfigError("give a text, bytes, or the token ids of a text") from None
        if bad := [i for i in ids if not 0 <= i < self.config.vocabulary]:
            raise ConfigError(
                f"{bad[0]} is no token id: the vocabulary has 0 to {self.config.vocabulary - 1}"
            )
        return ids
