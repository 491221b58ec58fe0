"""A corpus as memory-mapped text, and its batches as a pure function of (seed, stream, step)."""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from blocktrain.errors import CorpusError
from blocktrain.learning.tokenizer import Bytes, Ids, Tokenizer

VALID_SHARE = 0.05
CALIBRATION_SHARE = 1 / 64
CALIBRATION_MAX = 1 << 18
SAMPLES, SAMPLE_SIZE = 64, 4096  # of a part, to see whether it is text
CONTROL_BYTES = np.array([b for b in range(32) if chr(b) not in "\t\n\r\f\v\b\x1b"], np.uint8)
MOST_CONTROL = 0.02  # share of control bytes in a text
TEXT_SUFFIXES = {
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".json",
    ".csv",
    ".tsv",
    ".html",
    ".xml",
    ".tex",
    ".c",
    ".h",
    ".js",
    ".ts",
    ".java",
    ".go",
    ".rs",
}
_HUB = {
    "wikitext2": ("wikitext-2", "wikitext-2-raw-v1"),
    "wikitext103": ("wikitext-103", "wikitext-103-raw-v1"),
}


@dataclass(frozen=True)
class Corpus:
    """Three parts: what blocks train on, what pool weights are fitted on, what is evaluated.

    It holds text, or (after `encode`) the tokens of a text.
    """

    name: str
    train: Ids
    calibration: Ids
    valid: Ids
    source: Corpus | None = None
    """The text that these tokens were made of."""

    def encode(self, tokenizer: Tokenizer) -> Corpus:
        """The tokens of this text."""
        text = self.text
        train, calibration = tokenizer.encode(text.train), tokenizer.encode(text.calibration)
        return Corpus(self.name, train, calibration, tokenizer.encode(text.valid), text)

    def limit_valid(self, size: int | None) -> Corpus:
        """This text with a valid part of at most `size` bytes; None keeps all of it."""
        return replace(self, valid=self.valid[:size])

    @property
    def text(self) -> Corpus:
        return self.source or self

    @property
    def bytes_per_token(self) -> float:
        """Of the valid part: turns nats per token into nats per byte."""
        return len(self.text.valid) / len(self.valid)

    @property
    def hashes(self) -> tuple[str, str]:
        """sha256 of the text to train on, calibration part included, and of the valid part."""
        text = self.text
        return _sha256(text.train, text.calibration), _sha256(text.valid)

    def require(
        self, context: int, *parts: str, advice: str = "use a longer text or a smaller --context"
    ) -> None:
        """Refuse a corpus whose parts (all, or the named ones) do not fill one context."""
        unit = "tokens" if self.source else "bytes"
        for part in parts or ("train", "calibration", "valid"):
            size = len(getattr(self, part))
            if size < context + 1:
                raise CorpusError(
                    f"{self.name}: the {part} part has {size} {unit}, "
                    f"fewer than one context of {context} + 1; {advice}"
                )


@dataclass(frozen=True)
class Source:
    """Where a corpus is: a name or path, the folder of named corpora, and the cache folder."""

    spec: str
    data_dir: Path | None
    cache_dir: Path

    def require_outside(self, folder: Path) -> None:
        """Refuse to write results into the corpus: the next reader would take them for text."""
        text = Path(self.spec)
        if (
            self.spec
            and text.is_dir()
            and not _is_split(text)
            and folder.resolve().is_relative_to(text.resolve())
        ):
            raise CorpusError(
                f"{folder} lies inside the corpus {self.spec}; name a folder elsewhere with --out"
            )

    def open(self) -> Corpus:
        """The corpus, memory-mapped; refused if it is not text."""
        corpus = open_corpus(self.spec, self.data_dir, self.cache_dir)
        require_text(corpus)
        return corpus


def open_corpus(spec: str, data_dir: Path | None, cache: Path) -> Corpus:
    """A corpus by name (stdlib, wikitext2, wikitext103) or by the path of a text file or folder."""
    if spec == "stdlib":
        return _whole(spec, _concatenate("stdlib", _stdlib_files(), cache))
    if spec in _HUB:
        train, valid = _wikitext(spec, data_dir, cache)
        return _split(spec, _map(train), _map(valid))
    path = Path(spec)
    if path.is_dir() and spec:
        name = path.resolve().name
        if _is_split(path):
            return _split(name, _map(path / "train.txt"), _map(path / "valid.txt"))
        return _whole(name, _concatenate(name, _text_files(path, cache), cache))
    if path.is_file():
        return _whole(path.name, path)
    raise CorpusError(
        f"no corpus {spec!r}: it is neither a file, nor a folder, "
        f"nor one of stdlib, {', '.join(_HUB)}"
    )


def require_text(corpus: Corpus) -> None:
    """Refuse what is not text in any encoding that extends ASCII, by samples from all over it."""
    for name in ("train", "valid"):
        part = getattr(corpus, name)
        starts = np.linspace(0, max(len(part) - SAMPLE_SIZE, 0), SAMPLES).astype(np.int64)
        sample = np.concatenate([part[start : start + SAMPLE_SIZE] for start in starts])
        share = float(np.isin(sample, CONTROL_BYTES).mean())
        if (sample == 0).any() or share > MOST_CONTROL:
            what = "NUL bytes" if (sample == 0).any() else f"{share:.0%} control characters"
            raise CorpusError(
                f"{corpus.name} is not text: its {name} part has {what}; "
                "give a text file, for example in UTF-8"
            )


def _is_split(folder: Path) -> bool:
    return (folder / "train.txt").is_file() and (folder / "valid.txt").is_file()


def absolute(spec: str) -> str:
    """A spec that works from any working directory: names stay, paths become absolute."""
    is_name = spec == "stdlib" or spec in _HUB or not spec
    return spec if is_name or not Path(spec).exists() else str(Path(spec).resolve())


def batch(
    data: Ids, *, seed: int, stream: int, step: int, batch: int, context: int
) -> torch.Tensor:
    """(batch, context + 1) ids at random offsets: a pure function of (seed, stream, step)."""
    offsets = batch_offsets(
        len(data), seed=seed, stream=stream, step=step, batch=batch, context=context
    )
    rows = np.stack([data[o : o + context + 1] for o in offsets])
    return torch.from_numpy(rows.astype(np.int64))


def batch_offsets(
    size: int, *, seed: int, stream: int, step: int, batch: int, context: int
) -> npt.NDArray[np.int64]:
    """Where the sequences of a step begin."""
    key = np.array([seed, (stream << 32) | step], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).integers(0, size - context, size=batch)


def rows_without_overlap(data: Ids, context: int, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first row, (rows, <= context + 1) ids).

    Every token but the first is predicted exactly once.
    """
    full = (len(data) - 1) // context
    for first in range(0, full, rows):
        some = [
            data[i * context : (i + 1) * context + 1] for i in range(first, min(first + rows, full))
        ]
        yield first, torch.from_numpy(np.stack(some).astype(np.int64))
    if full * context < len(data) - 1:
        yield full, torch.from_numpy(np.array(data[full * context :], dtype=np.int64)[None])


def _whole(name: str, path: Path) -> Corpus:
    """One file split 95 : 5 at a line boundary."""
    data = _map(path)
    cut = int(len(data) * (1 - VALID_SHARE))
    # At least half of the valid part stays, however long the lines are.
    near = min(1 << 16, (len(data) - cut) // 2)
    line_end = np.flatnonzero(data[cut : cut + near] == ord("\n"))
    cut += int(line_end[0]) + 1 if len(line_end) else 0
    return _split(name, data[:cut], data[cut:])


def _split(name: str, train: Bytes, valid: Bytes) -> Corpus:
    """Keep the end of the training part for fitting pool weights: no block trains on it."""
    reserve = min(max(int(len(train) * CALIBRATION_SHARE), 4096), CALIBRATION_MAX, len(train) // 4)
    return Corpus(name, train[: len(train) - reserve], train[len(train) - reserve :], valid)


def _sha256(*parts: Ids) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.data)
    return digest.hexdigest()


def _map(path: Path) -> Bytes:
    try:
        if path.stat().st_size == 0:
            raise CorpusError(f"{path} is empty; give a file with text in it")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from None


def _concatenate(name: str, files: Iterable[Path], cache: Path) -> Path:
    """The files one after another in one cached file, named by path, size and time of each."""
    paths = sorted(files)
    if not paths:
        raise CorpusError(f"{name}: no text files found ({', '.join(sorted(TEXT_SUFFIXES))})")
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in paths]
    if not any(size for _, size, _ in stats):
        raise CorpusError(
            f"{name}: all its {len(paths)} text files are empty; give some with text in them"
        )
    digest = hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
    target = cache / "corpora" / f"{name}-{digest}.txt"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as out:
                for file in paths:
                    with file.open("rb") as source:
                        shutil.copyfileobj(source, out, 1 << 20)
            partial.replace(target)
        except OSError as error:
            raise CorpusError(
                f"cannot gather {name} into {target.parent}: {error.strerror or error}"
            ) from None
        finally:
            with suppress(OSError):
                partial.unlink()
    return target


def _stdlib_files() -> Iterator[Path]:
    """The modules of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    ignore = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "lib2to3",
    }
    return (path for path in _files(root, lambda path: path.name in ignore) if path.suffix == ".py")


def _text_files(folder: Path, cache: Path) -> Iterator[Path]:
    """Files that are text by their name, without hidden folders, the cache and run folders.

    A run folder grows while its training reads the corpus.
    """

    def ignore(path: Path) -> bool:
        try:
            is_run = (path / "config.toml").is_file() and (path / "model").is_dir()
        except OSError:  # not readable
            return True
        return is_run or path.name.startswith(".") or path.resolve() == cache.resolve()

    return (
        path
        for path in _files(folder, ignore)
        if path.suffix.lower() in TEXT_SUFFIXES and path.is_file()
    )


def _files(root: Path, ignore: Callable[[Path], bool]) -> Iterator[Path]:
    """All files below a folder. Ignored folders, which may be large, are not even listed."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not ignore(Path(folder, name))]
        yield from (Path(folder, name) for name in files)


def _wikitext(name: str, data_dir: Path | None, cache: Path) -> tuple[Path, Path]:
    folder, hub_name = _HUB[name]
    if data_dir is not None and (data_dir / folder / "train.txt").is_file():
        return data_dir / folder / "train.txt", data_dir / folder / "valid.txt"
    local = cache / "corpora" / folder
    if not (local / "valid.txt").is_file():
        _download(name, hub_name, local)
    return local / "train.txt", local / "valid.txt"


def _download(name: str, hub_name: str, target: Path) -> None:
    """Fetch the splits from the Hugging Face hub and keep them as plain text."""
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from pyarrow import parquet

        files = HfApi().list_repo_files("Salesforce/wikitext", repo_type="dataset")
        target.mkdir(parents=True, exist_ok=True)
        for split, ours in (("train", "train.txt"), ("validation", "valid.txt")):
            parts = sorted(f for f in files if f.startswith(f"{hub_name}/{split}-"))
            partial = target / f"{ours}.partial"
            with partial.open("w", encoding="utf-8") as out:
                for part in parts:
                    local = hf_hub_download("Salesforce/wikitext", part, repo_type="dataset")
                    for text in parquet.read_table(local, columns=["text"])["text"].to_pylist():
                        out.write(text)
            partial.replace(target / ours)
    except Exception as error:
        raise CorpusError(
            f"{name} is not here and could not be downloaded ({type(error).__name__}); "
            f"either set BLOCKTRAIN_DATA to a folder with {target.name}/train.txt and "
            f"{target.name}/valid.txt, or connect to the Hugging Face hub and install "
            "blocktrain[hub]"
        ) from None
