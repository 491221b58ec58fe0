"""A trained model in a script: scores, logits and text, as the commands give them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from blocktrain.cli.environment import require_model, source
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
PromptInput = str | bytes | Sequence[int]
"""A text, or its token ids."""


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
        self, data: str | None = None, *, eval_bytes: int | None = None, draws: int = 1
    ) -> dict[str, CrossEntropy]:
        """Cross entropies on the valid split of a corpus: `composed`, and each block alone.

        Without `data`, of the corpus that it was trained on. `eval_bytes` takes the beginning only.
        """
        try:
            corpus = source(self.manifest.data if data is None else data).open(self.tokenizer)
        except CorpusError as error:
            hint = "" if data else "; name another text"
            raise CorpusError(f"{error}{hint}") from None
        tokens = corpus.limit_valid(eval_bytes, self.tokenizer)
        tokens.require(self.config.context, "valid", advice=EVAL_ADVICE)
        per_byte = evaluate_run(
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
        if unknown := sorted(options.keys() - TextOptions.__annotations__.keys()):
            known = ", ".join(TextOptions.__annotations__)
            raise ConfigError(f"unknown option {unknown[0]!r}; known: {known}")
        sampler = Sampler(
            options.get("seed", 0), options.get("temperature", 0.8), options.get("top_p", 1.0)
        )
        if max_tokens < 1 or not 0 < sampler.top_p <= 1 or not sampler.temperature >= 0:
            raise ConfigError(
                "max_tokens must be at least 1, top_p above 0 and at most 1, "
                "and temperature at least 0"
            )
        decoder, ids = self.tokenizer.decoder(), self.encode(prompt) or self.encode("\n")
        with limited_threads(self.threads):
            for token in write(
                self.network,
                ids,
                max_tokens,
                sampler,
                mode=options.get("mode", "autoregressive"),
                sweeps=options.get("sweeps", 1),
                draft=options.get("draft", "first-block"),
            ):
                if piece := decoder.text([token]):
                    yield piece
        if rest := decoder.text(final=True):
            yield rest

    def encode(self, text: PromptInput) -> list[int]:
        """The token ids of a text; ids stay as they are, if the vocabulary has them."""
        if isinstance(text, str | bytes):
            raw = text.encode() if isinstance(text, str) else text
            return [int(token_id) for token_id in self.tokenizer.encode(raw)]
        ids = list(text)
        if bad := [i for i in ids if type(i) is not int or not 0 <= i < self.config.vocabulary]:
            raise ConfigError(
                f"{bad[0]!r} is no token id: the vocabulary has 0 to {self.config.vocabulary - 1}"
            )
        return ids
