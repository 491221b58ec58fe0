"""Datasets of the Hugging Face hub: `hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]`, read without a copy.

The hub's client lists the files and reads them by ranges. `datasets` is not needed: datasets are
parquet or JSON lines, or the hub has converted them to parquet.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from blocktrain.errors import CorpusError
from blocktrain.files import write_atomic
from blocktrain.learning.corpus.readers import LINES_SUFFIXES, PARQUET, suffix_of

PREFIX = "hf:"
SECONDS = 7  # to answer; the client may take 3 more before it asks
BLOCK = 4 << 20  # bytes of a request
CONVERTED = "refs/convert/parquet"  # where the hub keeps its own conversion
VALID_SPLITS = ("validation", "valid", "dev")
_SPLIT = re.compile(r"(?:^|[-_./])(train|validation|valid|dev|test)(?=[-_./])")


class DatasetName(NamedTuple):
    """What `hf:...` says. Parts that are not named are empty."""

    repo: str
    config: str = ""
    split: str = ""
    column: str = ""


class Listing(NamedTuple):
    """The files of a dataset at one commit."""

    revision: str
    files: dict[str, int]  # path -> bytes
    configs: list[dict[str, Any]]  # as its card declares them


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset at one commit."""

    repo: str
    revision: str
    path: str
    size: int

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.repo}/{self.path}"

    @property
    def identity(self) -> tuple[str, ...]:
        return (self.repo, self.revision, self.path)

    def open(self) -> BinaryIO:
        return io.BufferedReader(_HubStream(self), BLOCK)


class _HubStream(io.RawIOBase):
    """Reads a file of the hub; what goes wrong is one sentence."""

    def __init__(self, file: HubFile) -> None:
        self._name = file.name
        path = f"datasets/{file.repo}@{file.revision}/{file.path}"
        # With its size, which is known, the client does not list the folder.
        options = {"block_size": BLOCK, "size": file.size}
        self._file = self._try(lambda: _file_system().open(path, "rb", **options))

    def _try(self, call: Any) -> Any:
        try:
            return call()
        except Exception as error:
            raise CorpusError(
                f"cannot read {self._name}: {explain(error)}; run the command again to go on "
                "where it stopped"
            ) from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._try(lambda: self._file.read(len(buffer)))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._file.seek(offset, whence)
        return int(self._file.tell())

    def tell(self) -> int:
        return int(self._file.tell())


def parse(spec: str) -> DatasetName:
    """hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]; a part may be empty."""
    parts = spec.removeprefix(PREFIX).split(":")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", parts[0]) or len(parts) > 4:
        raise CorpusError(
            f"{spec!r} is no dataset; write hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], "
            "as in hf:org/dataset or hf:org/dataset:default:train:text"
        )
    return DatasetName(*parts)


def dataset_files(spec: str, cache: Path) -> tuple[list[HubFile], list[HubFile]]:
    """Files to train on, and files to evaluate on if the dataset has them apart.

    What the hub said last is kept, so that a corpus in the cache can be used without the hub.
    """
    name = parse(spec)
    digest = hashlib.sha256(spec.encode()).hexdigest()[:32]
    record = cache / "corpora" / f"hub-{digest}.json"
    try:
        chosen = _choose(name, spec)
    except _Silent as error:
        try:
            stored = json.loads(record.read_bytes())
            return ([HubFile(*f) for f in stored[0]], [HubFile(*f) for f in stored[1]])
        except (OSError, ValueError, TypeError, LookupError):
            raise CorpusError(str(error)) from None
    record.parent.mkdir(parents=True, exist_ok=True)
    fields = [[[f.repo, f.revision, f.path, f.size] for f in files] for files in chosen]
    write_atomic(record, json.dumps(fields).encode())
    return chosen


def _choose(name: DatasetName, spec: str) -> tuple[list[HubFile], list[HubFile]]:
    listing = _list(name.repo, None)
    data = {path: size for path, size in listing.files.items() if _is_data(path)}
    if not data:
        try:
            listing = _list(name.repo, CONVERTED)._replace(configs=[])
        except CorpusError:
            raise CorpusError(
                f"{name.repo} on the hub has no parquet or JSON lines files, and the hub has not "
                "converted it to parquet; convert it yourself and name the files"
            ) from None
        data = {path: size for path, size in listing.files.items() if _is_data(path)}
    by_split = group_by_split(sorted(data), listing.configs, name.config, name.repo)
    only = next(iter(by_split)) if len(by_split) == 1 else "train"
    wanted = name.split or ("train" if "train" in by_split else only)
    if wanted not in by_split:
        raise CorpusError(
            f"{spec}: there is no split {wanted!r}; there are: "
            f"{', '.join(sorted(by_split)) or 'none'}"
        )

    def files(paths: Sequence[str]) -> list[HubFile]:
        return [HubFile(name.repo, listing.revision, path, data[path]) for path in paths]

    apart = [] if name.split else next((by_split[s] for s in VALID_SPLITS if s in by_split), [])
    return files(by_split[wanted]), files(apart)


def _is_data(path: str) -> bool:
    return path.lower().endswith(PARQUET) or suffix_of(path) in LINES_SUFFIXES


def group_by_split(
    paths: Sequence[str], configs: Sequence[dict[str, Any]], config: str, repo: str
) -> dict[str, list[str]]:
    """The files of a configuration by their split: as the card declares them, else by name."""
    if configs:
        return _declared(paths, configs, config, repo)
    folders = sorted({path.split("/")[0] for path in paths if "/" in path})
    named = [folder for folder in folders if folder not in ("data", "default", *_splits())]
    if config and config not in folders:
        raise _no_config(repo, config, named)
    if not config and len(named) > 1 and len(named) == len(folders):
        raise _no_config(repo, config, named)
    chosen = config or (named[0] if len(named) == 1 and len(folders) == 1 else "")
    groups: dict[str, list[str]] = {}
    for path in paths:
        if not chosen or path.startswith(f"{chosen}/"):
            rest = path.removeprefix(f"{chosen}/") if chosen else path
            found = _SPLIT.search(rest)
            groups.setdefault(found[1] if found else "train", []).append(path)
    return groups


def _splits() -> tuple[str, ...]:
    return ("train", "test", *VALID_SPLITS)


def _declared(
    paths: Sequence[str], configs: Sequence[dict[str, Any]], config: str, repo: str
) -> dict[str, list[str]]:
    by_name = {str(entry.get("config_name", "default")): entry for entry in configs}
    default = next((n for n, entry in by_name.items() if entry.get("default")), "default")
    only = next(iter(by_name)) if len(by_name) == 1 else default
    wanted = config or (default if default in by_name else only)
    if wanted not in by_name:
        raise _no_config(repo, config, sorted(by_name))
    declared = by_name[wanted].get("data_files")
    entries = declared if isinstance(declared, list) else [declared] if declared else []
    groups: dict[str, list[str]] = {}
    for entry in entries:
        split, patterns = (
            (str(entry.get("split", "train")), entry.get("path", []))
            if isinstance(entry, dict)
            else ("train", entry)
        )
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            groups.setdefault(split, []).extend(p for p in paths if fnmatch(p, str(pattern)))
    if not entries:  # a configuration without files: all of them
        return group_by_split(paths, [], "", repo)
    return {split: sorted(set(found)) for split, found in groups.items() if found}


def _no_config(repo: str, config: str, known: Sequence[str]) -> CorpusError:
    problem = f"has no configuration {config!r}" if config else "has several configurations"
    example = known[0] if known else "default"
    return CorpusError(
        f"{repo} on the hub {problem}; there are: {', '.join(known)[:300] or 'none'}. "
        f"Name one, as in hf:{repo}:{example}"
    )


class _Silent(CorpusError):
    """The hub does not answer."""


def _list(repo: str, revision: str | None) -> Listing:
    """Files and sizes of a dataset, in one call."""
    api, errors = _client()
    try:
        info = api.dataset_info(repo, revision=revision, timeout=SECONDS, files_metadata=True)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        if isinstance(error, errors.GatedRepoError):
            reason = "its owner must let you in first: see its page on the hub, and log in"
        else:
            reason = "the hub does not know it; names look like org/dataset"
        raise CorpusError(f"cannot get the dataset {repo}: {reason}") from None
    except Exception as error:
        raise _Silent(
            f"cannot get the dataset {repo}: {explain(error)}; check the connection, "
            "or name files on this machine"
        ) from None
    files = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
    card = info.card_data.to_dict() if info.card_data else {}
    configs = [entry for entry in card.get("configs") or () if isinstance(entry, dict)]
    return Listing(str(info.sha), files, configs)


def explain(error: Exception) -> str:
    """Why the hub gave no answer."""
    if "Offline" in type(error).__name__:
        return "HF_HUB_OFFLINE forbids to ask the Hugging Face hub"
    return f"the Hugging Face hub does not answer as it should ({type(error).__name__})"


def _client() -> tuple[Any, Any]:
    try:
        from huggingface_hub import HfApi, errors
    except ImportError:
        raise CorpusError(
            "datasets of the Hugging Face hub need its client: pip install 'blocktrain[hub]'"
        ) from None
    return HfApi(), errors


@lru_cache(1)
def _file_system() -> Any:
    _client()
    from huggingface_hub import HfFileSystem

    return HfFileSystem()
