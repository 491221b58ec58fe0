"""What `--data` names: files, folders and well-known texts, tokenized once and then cached."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import CorpusError
from blocktrain.learning.corpus.pieces import Mark
from blocktrain.learning.corpus.readers import TextFile
from blocktrain.learning.corpus.token_corpus import TokenCorpus, is_prepared, open_prepared
from blocktrain.learning.corpus.tokenize import OnTokens, SourceText, tokenize, tokenizer_hash
from blocktrain.learning.shards import SHARD_TOKENS
from blocktrain.learning.tokenizer import Tokenizer

TEXT_SUFFIXES = frozenset(
    [
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
    ]
)
_HUB = {
    "wikitext2": ("wikitext-2", "wikitext-2-raw-v1"),
    "wikitext103": ("wikitext-103", "wikitext-103-raw-v1"),
}


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

    @property
    def name(self) -> str:
        """For people."""
        path = Path(self.spec)
        return path.resolve().name if self.spec and path.exists() else self.spec

    def open(
        self,
        tokenizer: Tokenizer,
        *,
        shard_tokens: int = SHARD_TOKENS,
        progress: OnTokens = lambda _: None,
    ) -> TokenCorpus:
        """The corpus in tokens. The first call tokenizes the text, and the cache keeps the shards.

        Several processes may call at once: one works, and the others wait.
        """
        if self.spec and is_prepared(Path(self.spec)):
            corpus = open_prepared(Path(self.spec))
            if corpus.index.tokenizer != tokenizer_hash(tokenizer):
                raise CorpusError(
                    f"{self.spec} was prepared with another tokenizer than {tokenizer.name}; "
                    "prepare it again from its text, or use that tokenizer"
                )
            return corpus
        texts = self.texts()
        identity = [
            (text.weight, [i.identity for i in text.train], [i.identity for i in text.valid])
            for text in texts
        ]
        key = repr((identity, tokenizer_hash(tokenizer), shard_tokens))
        folder = self.cache_dir / "corpora" / hashlib.sha256(key.encode()).hexdigest()[:32]
        try:
            with _lock(folder.with_suffix(".lock")):
                index = tokenize(
                    self.name,
                    texts,
                    tokenizer,
                    folder,
                    shard_tokens=shard_tokens,
                    progress=progress,
                )
        except OSError as error:
            raise CorpusError(
                f"cannot write tokens to {folder}: {error.strerror or error}"
            ) from None
        return TokenCorpus(index, folder)

    def texts(self) -> list[SourceText]:
        """What is read; CorpusError if there is nothing to read."""
        train, valid = _files_of(self.spec, self.data_dir, self.cache_dir)
        for path in (*train, *valid):
            if len(train) == 1 and TextFile(path).identity[1] == "0":
                raise CorpusError(f"{path} is empty; give a file with text in it")
        return [
            SourceText(self.name, 1.0, tuple(map(TextFile, train)), tuple(map(TextFile, valid)))
        ]


def training_text(source: Source) -> Iterator[bytes]:
    """The text to train on (and its calibration part) in pieces, as for training a tokenizer."""
    for text in source.texts():
        for file in text.train:
            for piece in file.pieces(Mark()):
                yield piece.text


def absolute(spec: str) -> str:
    """A spec that works from any working directory: names stay, paths become absolute."""
    is_name = spec == "stdlib" or spec in _HUB or not spec
    return spec if is_name or not Path(spec).exists() else str(Path(spec).resolve())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _files_of(spec: str, data_dir: Path | None, cache: Path) -> tuple[list[Path], list[Path]]:
    """Files to train on, and files to evaluate on if they are apart."""
    if spec == "stdlib":
        return sorted(_stdlib_files()), []
    if spec in _HUB:
        train, valid = _wikitext(spec, data_dir, cache)
        return [train], [valid]
    path = Path(spec)
    if path.is_dir() and spec:
        if _is_split(path):
            return [path / "train.txt"], [path / "valid.txt"]
        return _non_empty(path.resolve().name, _text_files(path, cache)), []
    if path.is_file():
        return [path], []
    raise CorpusError(
        f"no corpus {spec!r}: it is neither a file, nor a folder, "
        f"nor one of stdlib, {', '.join(_HUB)}"
    )


def _non_empty(name: str, files: Iterable[Path]) -> list[Path]:
    paths = sorted(files)
    if not paths:
        raise CorpusError(f"{name}: no text files found ({', '.join(sorted(TEXT_SUFFIXES))})")
    if not any(path.stat().st_size for path in paths):
        raise CorpusError(
            f"{name}: all its {len(paths)} text files are empty; give some with text in them"
        )
    return paths


def _is_split(folder: Path) -> bool:
    return (folder / "train.txt").is_file() and (folder / "valid.txt").is_file()


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
