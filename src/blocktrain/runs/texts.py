"""Cross entropy of whole texts, measured as evaluation harnesses do.

A text is read after the end of another one (or a line break, where the vocabulary has no such
end), so its first token counts too. Windows of `context` tokens follow each other. The last one
begins early enough to be full, and only what no window before it predicted counts.
`lm-eval` computes the same over `blocktrain serve`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from blocktrain.errors import CorpusError
from blocktrain.learning.compose import Model, Predictors
from blocktrain.learning.corpus.readers import require_text
from blocktrain.learning.evaluate import Progress, rows_without_overlap
from blocktrain.learning.threads import THREADS, limited_threads
from blocktrain.learning.tokenizer import Ids, tokenizer_of
from blocktrain.runs.folder import load_reference, read_manifest
from blocktrain.terminal import perplexity

MAX_FILE = 1 << 30  # bytes
ROWS = 16  # at once


@dataclass(frozen=True)
class TextLosses:
    """Nats of all tokens of some texts, by model, and how much text that is."""

    nats: dict[str, float]
    texts: int
    tokens: int
    bytes: int
    words: int

    def units(self, name: str) -> dict[str, float | None]:
        """A model's loss in all units; JSON has no infinity, so null stands for it."""
        nats = self.nats[name]
        units = {
            "nats_per_token": nats / self.tokens,
            "nats_per_byte": nats / self.bytes,
            "bits_per_byte": nats / self.bytes / math.log(2),
            "byte_perplexity": perplexity(nats / self.bytes),
            "word_perplexity": perplexity(nats / self.words),
        }
        return {unit: value if math.isfinite(value) else None for unit, value in units.items()}


def read_texts(path: Path) -> list[bytes]:
    """The texts of a file: one for each line {"text": ...} of a .jsonl, else the file as it is."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise CorpusError(f"{path} has more than 1 GiB: cut it, or use --data")
        content = path.read_bytes()
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from None
    if path.suffix != ".jsonl":
        require_text(content, str(path), first=True)
        texts = [content]
    else:
        lines = enumerate(content.splitlines(), start=1)
        texts = [_text_of(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not any(texts):
        raise CorpusError(f"{path} has no text in it")
    return [text for text in texts if text]


def _text_of(line: bytes, place: str) -> bytes:
    try:
        text: str = json.loads(line)["text"]
        return text.encode()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise CorpusError(f'{place} is not a JSON object with a text "text"') from None


def evaluate_texts(
    folder: Path,
    model: Model,
    texts: Sequence[bytes],
    *,
    draws: int = 1,
    threads: int = THREADS,
    progress: Progress = lambda _: None,
) -> TextLosses:
    """The losses of a run's model and of its parts on whole texts."""
    tokenizer, config = tokenizer_of(model.config), model.config
    passes = model.composition.predictors(model, seed=config.seed, draws=draws)
    reference = load_reference(read_manifest(folder), model.device)
    if reference is not None:
        passes.append(lambda ids, _: {"reference": reference(reference.features(ids))})
    start = np.array([tokenizer.first_token], tokenizer.dtype)
    encoded = [np.concatenate([start, tokenizer.encode(text)]) for text in texts]
    size, known = sum(map(len, encoded)), 0
    nats: dict[str, float] = {}
    row = 0
    with limited_threads(threads):
        for ids in encoded:
            for tokens, counted in rolling_rows(ids, config.context):
                for predict in passes:
                    for name, loss in _losses(predict, tokens.to(model.device), counted, row):
                        nats[name] = nats.get(name, 0.0) + loss
                row += len(tokens)
                known += tokens.shape[0] * counted
                progress(known / size)
    words = sum(len(re.split(r"\s+", text.decode("utf-8", "replace"))) for text in texts)
    losses = {"composed": nats[model.compose], **nats}
    return TextLosses(losses, len(texts), size - len(texts), sum(map(len, texts)), words)


def rolling_rows(ids: Ids, context: int) -> Iterator[tuple[torch.Tensor, int]]:
    """(some rows of context + 1 ids, how many of their last ids count).

    Every id but the first counts once. A text that is shorter is one shorter row.
    """
    for _, tokens in rows_without_overlap(ids, context, ROWS):
        counted = tokens.shape[1] - 1
        if counted == context:
            yield tokens, counted
        else:
            last = ids[max(0, len(ids) - context - 1) :]
            yield torch.from_numpy(last.astype(np.int64)[None]), counted


@torch.no_grad()
def _losses(
    predict: Predictors, tokens: torch.Tensor, counted: int, row: int
) -> Iterator[tuple[str, float]]:
    targets = tokens[:, -counted:]
    for name, logits in predict(tokens[:, :-1], row).items():
        scored = logits[:, -counted:].float().transpose(1, 2)
        yield name, F.cross_entropy(scored, targets, reduction="none").double().sum().item()
