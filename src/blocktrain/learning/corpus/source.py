"""What `--data` names: files, folders, datasets and mixtures, tokenized once and then cached."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from blocktrain.errors import CorpusError, explain_os_error
from blocktrain.learning.corpus import hub
from blocktrain.learning.corpus.files import LocalFile
from blocktrain.learning.corpus.mixture import is_mixture, read_mixture
from blocktrain.learning.corpus.pieces import Mark
from blocktrain.learning.corpus.readers import (
    LINES_SUFFIXES,
    PARQUET,
    Input,
    TextFile,
    is_known,
    reader_of,
    suffix_of,
)
from blocktrain.learning.corpus.token_corpus import TokenCorpus, is_prepared, open_prepared
from blocktrain.learning.corpus.tokenize import OnTokens, SourceText, tokenize, tokenizer_hash
from blocktrain.learning.shards import SHARD_TOKENS
from blocktrain.learning.tokenizer import Tokenizer

SAMPLE_BYTES = 64 << 20  # of a text, to learn a tokenizer from
SPANS = 64  # of a large file, from which a sample is taken
_TRAIN = re.compile(r"train([-_.].*)?")
_VALID = re.compile(r"valid(ation)?([-_.].*)?")
_WIKITEXT = {
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
        text = Path(split_column(self.spec)[0])
        if (
            self.spec
            and text.is_dir()
            and not _splits(text)
            and not is_prepared(text)
            and folder.resolve().is_relative_to(text.resolve())
        ):
            raise CorpusError(
                f"{folder} lies inside the corpus {self.spec}; name a folder elsewhere with --out"
            )

    @property
    def name(self) -> str:
        """For people."""
        path = Path(split_column(self.spec)[0])
        return path.resolve().name if self.spec and path.exists() else self.spec

    def open(
        self,
        tokenizer: Tokenizer,
        folder: Path | None = None,
        *,
        shard_tokens: int = SHARD_TOKENS,
        progress: OnTokens = lambda _: None,
    ) -> TokenCorpus:
        """The corpus in tokens. The first call makes its shards, in a folder of the cache.

        A folder that is named instead is itself a corpus then, on any machine. Several processes
        may call at once: one works, and the others wait.
        """
        if self.spec and is_prepared(Path(self.spec)):
            if folder is not None:
                raise CorpusError(f"{self.spec} is prepared already; use it as --data")
            return _require_tokenizer(open_prepared(Path(self.spec)), tokenizer)
        if folder is not None:
            self.require_outside(folder)
        texts = self.texts()
        key = _key(texts, tokenizer, shard_tokens)
        place = folder or self.cache_dir / "corpora" / key[:32]
        try:
            with _lock(place.with_name(f"{place.name}.lock"), keep=folder is None):
                index = tokenize(
                    self.name,
                    texts,
                    tokenizer,
                    place,
                    key=key,
                    shard_tokens=shard_tokens,
                    progress=progress,
                )
        except OSError as error:
            raise CorpusError(
                f"cannot write tokens to {place}: {explain_os_error(error)}"
            ) from None
        return TokenCorpus(index, place)

    def texts(self) -> list[SourceText]:
        """What is read; CorpusError if there is nothing to read."""
        if is_mixture(self.spec) and Path(self.spec).is_file():
            return self._mixture_texts()
        if self.spec and is_prepared(Path(self.spec)):
            raise CorpusError(
                f"{self.spec} is a prepared corpus and has no text any more: use it alone, with "
                f"--tokenizer {_own_tokenizer(open_prepared(Path(self.spec)))}"
            )
        train, valid = _inputs(self.spec, self.data_dir, self.cache_dir)
        if not any(entry.file.size for entry in train):
            raise CorpusError(f"{self.name} is empty; give a file with text in it")
        if valid and not any(entry.file.size for entry in valid):
            raise CorpusError(f"{valid[0].file.name} is empty; give a file with text in it")
        return [SourceText(self.name, 1.0, tuple(train), tuple(valid))]

    def _mixture_texts(self) -> list[SourceText]:
        texts = []
        for part in read_mixture(Path(self.spec)):
            try:
                found = replace(self, spec=part.data).texts()
            except CorpusError as error:
                raise CorpusError(f"{self.spec}: {error}") from None
            texts += [text._replace(weight=part.weight) for text in found]
        return texts


def _key(texts: Sequence[SourceText], tokenizer: Tokenizer, shard_tokens: int) -> str:
    """Changes when the shards may change."""
    identity = [
        (text.weight, [i.identity for i in text.train], [i.identity for i in text.valid])
        for text in texts
    ]
    content = repr((identity, tokenizer_hash(tokenizer), shard_tokens))
    return hashlib.sha256(content.encode()).hexdigest()


def _require_tokenizer(corpus: TokenCorpus, tokenizer: Tokenizer) -> TokenCorpus:
    index = corpus.index
    if (index.tokenizer, index.dtype) == (tokenizer_hash(tokenizer), tokenizer.dtype):
        return corpus
    raise CorpusError(
        f"{corpus.folder} was prepared with another tokenizer than {tokenizer.name}; use "
        f"--tokenizer {_own_tokenizer(corpus)}, or prepare the text again"
    )


def _own_tokenizer(corpus: TokenCorpus) -> str:
    """As the setting names it."""
    return str(corpus.folder / "tokenizer.json") if corpus.index.tokenizer else "bytes"


def training_text(source: Source, limit: int = SAMPLE_BYTES) -> Iterator[bytes]:
    """At most `limit` bytes of the text to train on, in pieces, as for learning a tokenizer.

    They come from all files by their size, from all over a large one, and by the weights of a
    mixture. Of a dataset of the hub they come from the first files.
    """
    texts = source.texts()
    whole = sum(text.weight for text in texts)
    for text in texts:
        share = int(limit * text.weight / whole)
        for entry, size in _budgets(text.train, share):
            yield from _sample(entry, size)


def _budgets(inputs: Sequence[Input], share: int) -> Iterator[tuple[Input, int]]:
    """How many bytes to take of each input."""
    total = max(sum(entry.file.size for entry in inputs), 1)
    remote = isinstance(inputs[0].file, hub.HubFile)
    for entry in inputs:
        if share <= 0:
            return
        if remote or total <= share:
            yield entry, share if remote else max(share, entry.file.size)
            share -= entry.file.size if remote else 0
        else:
            yield entry, share * entry.file.size // total + 1


def _sample(entry: Input, size: int) -> Iterator[bytes]:
    seekable = isinstance(entry, TextFile) and not entry.file.name.endswith((".gz", ".zst"))
    spans = SPANS if seekable and size < entry.file.size // 2 and size > SPANS << 10 else 1
    for number in range(spans):
        left = size // spans
        for piece in entry.pieces(Mark(entry.file.size * number // spans)):
            text = piece.text
            if number and left == size // spans:  # it begins anywhere in a line
                text = text[text.find(b"\n") + 1 :]
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def split_column(spec: str) -> tuple[str, str]:
    """PATH[:COLUMN] of what is on this machine."""
    path, _, column = spec.rpartition(":")
    if path and column and not Path(spec).exists() and Path(path).exists():
        return path, column
    return spec, ""


def absolute(spec: str) -> str:
    """A spec that works from any working directory: names stay, paths become absolute."""
    path, column = split_column(spec)
    is_name = spec == "stdlib" or spec in _WIKITEXT or spec.startswith(hub.PREFIX)
    if is_name or not spec or not Path(path).exists():
        return spec
    return str(Path(path).resolve()) + (f":{column}" if column else "")


@contextmanager
def _lock(path: Path, *, keep: bool) -> Iterator[None]:
    """One process at a time. Beside the folder of a user no file is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if not keep:
            path.unlink(missing_ok=True)


def _inputs(spec: str, data_dir: Path | None, cache: Path) -> tuple[list[Input], list[Input]]:
    """What to train on, and what to evaluate on if that is apart."""
    if spec == "stdlib":
        return _readers(sorted(_stdlib_files())), []
    if spec in _WIKITEXT:
        train, valid = _wikitext(spec, data_dir, cache)
        return _readers([train]), _readers([valid])
    if spec.startswith(hub.PREFIX):
        column = hub.parse(spec).column
        files, apart = hub.dataset_files(spec, cache)
        return [reader_of(f, column) for f in files], [reader_of(f, column) for f in apart]
    name, column = split_column(spec)
    path = Path(name)
    if path.is_dir() and name:
        if splits := _splits(path):
            return _readers(splits[0], column), _readers(splits[1], column)
        return _readers(_non_empty(path.resolve().name, _text_files(path, cache)), column), []
    if path.is_file():
        return _readers([path], column), []
    raise CorpusError(
        f"no corpus {spec!r}: it is neither a file, nor a folder, nor hf:NAME, "
        f"nor one of stdlib, {', '.join(_WIKITEXT)}"
    )


def _readers(paths: Iterable[Path], column: str = "") -> list[Input]:
    return [reader_of(LocalFile(path), column) for path in paths]


def _non_empty(name: str, files: Iterable[Path]) -> list[Path]:
    paths = sorted(files)
    if not paths:
        raise CorpusError(
            f"{name}: no text files found (.txt, .md, .py and other text, .jsonl, .parquet, "
            "also with .gz or .zst)"
        )
    if not any(path.stat().st_size for path in paths):
        raise CorpusError(
            f"{name}: all its {len(paths)} text files are empty; give some with text in them"
        )
    return paths


def _splits(folder: Path) -> tuple[list[Path], list[Path]] | None:
    """The files train.* and valid.* of a folder that has both; everything else is not read."""
    kinds = (".txt", PARQUET, *LINES_SUFFIXES)
    try:
        files = sorted(
            path for path in folder.iterdir() if suffix_of(path.name) in kinds and path.is_file()
        )
    except OSError as error:
        raise CorpusError(f"cannot read {folder}: {error.strerror or error}") from None
    train = [path for path in files if _TRAIN.fullmatch(path.name)]
    valid = [path for path in files if _VALID.fullmatch(path.name)]
    return (train, valid) if train and valid else None


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
        return (
            is_run
            or is_prepared(path)
            or path.name.startswith(".")
            or path.resolve() == cache.resolve()
        )

    return (path for path in _files(folder, ignore) if is_known(path.name) and path.is_file())


def _files(root: Path, ignore: Callable[[Path], bool]) -> Iterator[Path]:
    """All files below a folder. Ignored folders, which may be large, are not even listed."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not ignore(Path(folder, name))]
        yield from (Path(folder, name) for name in files)


def _wikitext(name: str, data_dir: Path | None, cache: Path) -> tuple[Path, Path]:
    folder, hub_name = _WIKITEXT[name]
    if data_dir is not None and (data_dir / folder / "train.txt").is_file():
        return data_dir / folder / "train.txt", data_dir / folder / "valid.txt"
    local = cache / "corpora" / folder
    if not (local / "valid.txt").is_file():
        _download(name, hub_name, local)
    return local / "train.txt", local / "valid.txt"


def _download(name: str, config: str, target: Path) -> None:
    """Fetch the splits from the Hugging Face hub and keep them as plain text."""
    try:
        train, valid = hub.dataset_files(f"hf:Salesforce/wikitext:{config}", target.parent.parent)
        target.mkdir(parents=True, exist_ok=True)
        for files, ours in ((train, "train.txt"), (valid, "valid.txt")):
            partial = target / f"{ours}.partial"
            with partial.open("wb") as out:
                for file in files:
                    for piece in reader_of(file).pieces(Mark()):
                        out.write(piece.text)
            partial.replace(target / ours)
    except CorpusError as error:
        raise CorpusError(
            f"{name} is not here and could not be downloaded ({error}); "
            f"either set BLOCKTRAIN_DATA to a folder with {target.name}/train.txt and "
            f"{target.name}/valid.txt, or connect to the Hugging Face hub and install "
            "blocktrain[hub]"
        ) from None
