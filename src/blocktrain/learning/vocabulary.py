"""Where a run's tokenizer comes from: its name, the training text, a file, or the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from blocktrain.config import TOKENIZERS, Config, bpe_size, make_config
from blocktrain.errors import ConfigError, explain_os_error
from blocktrain.files import write_atomic
from blocktrain.learning.tokenizer import (
    LARGEST_JSON,
    JsonTokenizer,
    Tokenizer,
    cut_text,
    load_tokenizer,
    tokenizer_of,
)

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"
SAMPLE_BYTES = 64 << 20  # of the training text, to learn a vocabulary from
LONGEST_TOKEN = 64  # bytes
RULES = "bpe-1"  # of the training: other rules make other vocabularies
HUB_SECONDS = 10  # to answer
Texts = Callable[[], Iterable[bytes]]
"""Gives the training text in pieces. For a large corpus they should come from all over it: only
the first SAMPLE_BYTES are read."""
Share = Callable[[float], None]


def resolve_tokenizer(
    name: str, texts: Texts, cache: Path, progress: Share = lambda _: None
) -> Tokenizer:
    """The tokenizer that a setting names, loaded: from now on `tokenizer_of` finds it."""
    if name in TOKENIZERS:
        return tokenizer_of(make_config({"tokenizer": name}))
    size = bpe_size(name)
    if size is not None:
        return _learn(name, size, texts(), cache / "tokenizers", progress)
    path = _path(name)
    return load_tokenizer(_read(path or _download(name)), name)


def settings_with(config: Config, tokenizer: Tokenizer) -> Config:
    """The settings of a run of this tokenizer. They do not depend on where its file was."""
    if not isinstance(tokenizer, JsonTokenizer):
        return config.replace(tokenizer=tokenizer.name)
    return config.replace(
        tokenizer=FILE if _path(config.tokenizer) else config.tokenizer,
        tokenizer_hash=tokenizer.hash,
        vocabulary=tokenizer.vocabulary,
    )


def resolve(config: Config, texts: Texts, cache: Path, progress: Share = lambda _: None) -> Config:
    """The settings with the hash and the vocabulary of the tokenizer that they name."""
    return settings_with(config, resolve_tokenizer(config.tokenizer, texts, cache, progress))


def _learn(
    name: str, size: int, pieces: Iterable[bytes], cache: Path, progress: Share
) -> JsonTokenizer:
    """The vocabulary that a text gives, kept by the hash of the text."""
    sample = _sample(pieces, progress)
    key = hashlib.sha256(f"{RULES} {size} ".encode() + hashlib.sha256(sample).digest()).hexdigest()
    path = cache / f"{key}.json"
    if path.is_file():
        try:
            return load_tokenizer(_read(path), name)
        except ConfigError:  # damaged: learn it again
            path.unlink(missing_ok=True)
    content = train_bpe(sample, size)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise ConfigError(f"cannot keep the tokenizer: {explain_os_error(error)}") from None
    return load_tokenizer(content, name)


def _sample(pieces: Iterable[bytes], progress: Share) -> bytes:
    """The first SAMPLE_BYTES of the text, however it comes in pieces."""
    sample = bytearray()
    for piece in pieces:
        sample += piece[: SAMPLE_BYTES - len(sample)]
        progress(len(sample) / SAMPLE_BYTES)
        if len(sample) == SAMPLE_BYTES:
            break
    return bytes(sample)


def train_bpe(text: bytes, size: int) -> bytes:
    """A tokenizer.json of at most `size` tokens: the 256 bytes, merges, and the end of a text.

    Equal texts give equal files, on any number of threads: pairs of equal count merge in the order
    of their ids.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    pieces = (piece.decode("utf-8", "ignore") for piece in cut_text(text))
    library.train_from_iterator(pieces, trainer)
    library.add_special_tokens([END_OF_TEXT])
    return library.to_str().encode()


def _path(name: str) -> Path | None:
    """The file that a name stands for; None: it is learned, or on the hub."""
    path = Path(name).expanduser()
    if path.is_dir() and bpe_size(name) is None:
        return path / FILE
    written_as_path = name.endswith(".json") or name.startswith(("/", "./", "../", "~"))
    return path if written_as_path or path.is_file() else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_JSON + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror or error}") from None


def _fetch(model: str, revision: str | None) -> Path:
    """Asks once before it downloads: the client asks a hub that does not answer for minutes."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    refusals = (
        errors.EntryNotFoundError,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    )
    answers = True
    try:
        get_hf_file_metadata(hf_hub_url(model, FILE, revision=revision), timeout=HUB_SECONDS)
    except refusals:
        pass  # the download comes to the same, or finds an earlier copy
    except Exception:
        answers = False
    return Path(hf_hub_download(model, FILE, revision=revision, local_files_only=not answers))


def _download(name: str) -> Path:
    """The tokenizer.json of a model on the Hugging Face hub, kept in the hub's own cache."""
    try:
        from huggingface_hub import errors
    except ImportError:
        raise ConfigError(
            f"tokenizer {name!r} is on the Hugging Face hub: install blocktrain[hub], "
            "or give the path of its tokenizer.json"
        ) from None
    model, _, revision = name.partition("@")
    try:
        return _fetch(model, revision or None)
    except errors.EntryNotFoundError as error:
        if not isinstance(error, errors.LocalEntryNotFoundError):
            raise ConfigError(f"the model {model} on the hub has no {FILE}") from None
        reason = "the Hugging Face hub does not answer, and it was not downloaded before"
    except errors.GatedRepoError:
        reason = "its owner must let you in first: see its page on the hub"
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        reason = "the hub does not know it; names look like gpt2 or org/model"
    except (errors.HFValidationError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
    except Exception as error:
        reason = f"the Hugging Face hub does not answer as it should ({type(error).__name__})"
    raise ConfigError(
        f"cannot get the tokenizer {name!r}: {reason}; "
        "otherwise use bpe:N or the path of a tokenizer.json"
    )
