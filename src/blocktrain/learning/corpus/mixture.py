"""A weighted mixture of texts, as a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.config import sentence
from blocktrain.errors import CorpusError
from blocktrain.learning.shards import PATTERN

LARGEST_FILE = 1 << 20


class MixtureSource(BaseModel):
    """One `[[source]]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    data: Annotated[str, Field(min_length=1)]
    """As in `--data`; a path is relative to the folder of the file."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the sequences that come from it, relative to the other weights."""


class Mixture(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: Annotated[list[MixtureSource], Field(min_length=1, max_length=PATTERN)]


def read_mixture(path: Path) -> list[MixtureSource]:
    """The sources of a mixture, with absolute paths; CorpusError says what is wrong with it."""
    try:
        with path.open("rb") as file:
            mixture = Mixture.model_validate(tomllib.loads(file.read(LARGEST_FILE).decode()))
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from None
    except ValidationError as error:
        raise CorpusError(
            f"{path} is no mixture: {sentence(error)}; it has a [[source]] for each text, with "
            "data and weight, and nothing else"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} is no TOML file: {error}") from None
    sources = []
    for source in mixture.source:
        if is_mixture(source.data):
            raise CorpusError(
                f"{path}: {source.data} is a mixture, too; name its sources here instead"
            )
        beside = path.parent / source.data
        name, _, column = source.data.rpartition(":")
        exists = _exists(beside) or (bool(column and name) and _exists(path.parent / name))
        data = str(beside.resolve()) if exists else source.data
        sources.append(source.model_copy(update={"data": data}))
    return sources


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no path at all: too long
        return False


def is_mixture(spec: str) -> bool:
    return spec.lower().endswith(".toml")
