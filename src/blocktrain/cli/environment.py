"""What the environment says: corpora, the cache, run folders, cores, and the command line."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktrain.config import TOKENIZERS, Config, bpe_size
from blocktrain.errors import RunError
from blocktrain.sizes import make_sized_config

if TYPE_CHECKING:
    from blocktrain.learning.corpus.source import Source

RUNS = Path("runs")
OPERATOR_TOKEN = "operator.token"  # in the folder of a coordinator
STAGE_KEY = "stage.key"  # beside it


def cache_folder() -> Path:
    """For files that can be fetched or made again."""
    named = os.environ.get("BLOCKTRAIN_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "blocktrain"


def data_folder() -> Path | None:
    """Where named corpora are, if the user has them."""
    named = os.environ.get("BLOCKTRAIN_DATA")
    return Path(named) if named else None


def read_config(settings: dict[str, Any], preset: str | None = None) -> Config:
    """Settings as people name them, validated; a `size` stands for what it chooses."""
    tokenizer = settings.get("tokenizer")
    if settings.get("size") and isinstance(tokenizer, str):
        make_sized_config({"tokenizer": tokenizer})  # a name that makes sense
        if vocabulary := vocabulary_in_file(tokenizer):  # how wide the model can be
            settings = {"vocabulary": vocabulary, **settings}
    return make_sized_config(settings, preset)


def vocabulary_in_file(tokenizer: str) -> int | None:
    """The size of a vocabulary that the tokenizer's name does not tell."""
    if tokenizer in TOKENIZERS or bpe_size(tokenizer) is not None:
        return None
    from blocktrain.learning.vocabulary import resolve_tokenizer

    return resolve_tokenizer(tokenizer, lambda: (), cache_folder()).vocabulary


def source(data: str) -> Source:
    """The corpus of a command, not opened yet."""
    from blocktrain.learning.corpus.source import Source

    return Source(data, data_folder(), cache_folder())


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line() -> str:
    """This command, as a figure records it."""
    return shlex.join(["blocktrain", *sys.argv[1:]])


def new_run_folder(data: str) -> Path:
    """The next number under runs/."""
    name = Path(data).stem.replace(":", "-") or "run"  # of PATH:COLUMN and hf:NAME, too
    numbers = {path.name.split("-")[0] for path in RUNS.glob("*")} if RUNS.is_dir() else set()
    number = next(n for n in range(1, 10**6) if f"{n:03}" not in numbers)
    return RUNS / f"{number:03}-{name}"


def require_model(folder: Path) -> Path:
    """The folder, unless it is a coordinator's: that one holds versions, and no composed model."""
    if (folder / OPERATOR_TOKEN).exists() and not (folder / "model").exists():
        coordinator = f"blocktrain coordinator --out {shlex.quote(str(folder))}"
        raise RunError(
            f"{folder} is a coordinator's folder and has no composed model: start `{coordinator}` "
            "if it is not running, and fetch the model with the `blocktrain pull` command it prints"
        )
    return folder


def is_pulled(run: Path) -> bool:
    """Whether a run folder holds a model that was trained elsewhere."""
    return (run / "model" / "config.json").exists() and not (run / "coordinator").exists()


def _is_finished(run: Path) -> bool:
    """Whether `train` has nothing left to do in a run folder, or cannot read it."""
    if is_pulled(run):
        return True
    from blocktrain.runs.folder import open_run, read_json

    try:
        has_reference = open_run(run).reference
        complete = all((run / name).exists() for name in ("result.json", "report.html"))
        return complete and not (
            has_reference and read_json(run / "result.json").get("gap") is None
        )
    except RunError:
        return True


def newest_unfinished() -> Path:
    """The run folder to resume when none is named."""
    folders = [p.parent for p in RUNS.glob("*/config.toml") if not _is_finished(p.parent)]
    if not folders:
        raise RunError("no unfinished run under runs/; name one with --out RUN")
    return max(folders, key=lambda folder: (folder / "config.toml").stat().st_mtime)
