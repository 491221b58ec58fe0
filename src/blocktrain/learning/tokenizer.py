"""Text to token ids and back. Nothing else in the package knows what a token is. Needs no torch.

Bytes need no file. Every other vocabulary is a tokenizer.json of the `tokenizers` library, known
by its sha256: `load_tokenizer` makes it known, `tokenizer_of` finds it. Where it comes from (the
training text, a path, the hub) is said in `learning.vocabulary`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktrain.config import LARGEST_VOCABULARY, TOKENIZERS, Config
from blocktrain.errors import ConfigError
from blocktrain.learning.corpus.pieces import cut

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids, of the tokenizer's dtype."""
LARGEST_JSON = 64 << 20  # bytes of a tokenizer.json
CHUNK = 1 << 20  # bytes of a text, cut at once
PIECES = 64  # encoded in parallel
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
SAMPLE = (
    "The Quick brown fox,  it's 1,024 «années» later:\n\n\tif (x != y) { return Straße[0]; }\r\n"
    " = Ελλάς = Привет, мир! 東京は日本の首都。 한국어 مرحبا नमस्ते 🙂👩‍💻 ½ µ — …   \n"
)
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes as `surrogateescape` decodes them


class Tokenizer(ABC):
    """A vocabulary: ids are 0 to `vocabulary` - 1, and each stands for some bytes."""

    name: str
    """What settings call it."""
    vocabulary: int
    """How many ids there are."""
    end_of_text: int | None = None
    """The id between two texts; it stands for no bytes."""

    @abstractmethod
    def encode(self, text: bytes | Bytes) -> Ids:
        """The ids of a text."""

    def encode_batch(self, pieces: Sequence[bytes]) -> list[Ids]:
        """The ids of several texts, each on its own."""
        return [self.encode(piece) for piece in pieces]

    @abstractmethod
    def token(self, token_id: int) -> bytes:
        """The bytes that an id stands for; they may be part of a UTF-8 character."""

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.token(token_id) for token_id in ids)

    def decoder(self) -> TokenDecoder:
        """For ids that arrive one after another."""
        return TokenDecoder(self)

    @cached_property
    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """How many bytes each id stands for: bits per byte need no text."""
        return np.array([len(self.token(token_id)) for token_id in range(self.vocabulary)])

    def count_bytes(self, ids: Ids) -> int:
        """The length of the text that the ids stand for."""
        return int(np.bincount(ids, minlength=self.vocabulary) @ self.byte_lengths)

    @property
    def first_token(self) -> int:
        """What a text is read after, so that its first token can be predicted, too."""
        end = self.end_of_text
        return int(self.encode(b"\n")[0]) if end is None else end

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The narrowest little-endian type that holds every id, in arrays and on the wire."""
        return np.dtype(np.min_scalar_type(self.vocabulary - 1)).newbyteorder("<")

    @property
    def id_width(self) -> int:
        """Bytes of an id."""
        return self.dtype.itemsize

    @property
    def hash(self) -> str:
        """sha256 of its name and of all its tokens: models only fit the vocabulary they learned."""
        digest = hashlib.sha256(f"{self.name} {self.vocabulary}".encode())
        for token_id in range(self.vocabulary):
            token = self.token(token_id)
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()


class TokenDecoder:
    """Ids in, what is complete of their text out. Use either `bytes` or `text`, not both."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def bytes(self, ids: Iterable[int]) -> bytes:
        return self._tokenizer.decode(ids)

    def text(self, ids: Iterable[int] = (), *, final: bool = False) -> str:
        """Whole characters only: the bytes of an unfinished one wait for the next call.

        What cannot be UTF-8 becomes U+FFFD, and so does an unfinished character at the end.
        """
        return self._utf8.decode(self._tokenizer.decode(ids), final)


class ByteTokenizer(Tokenizer):
    """Every byte is a token."""

    name = "bytes"
    vocabulary = 256

    def encode(self, text: bytes | Bytes) -> Ids:
        """An array stays the same array, so a memory-mapped corpus stays on the disk."""
        return np.frombuffer(text, np.uint8) if isinstance(text, bytes) else text

    def token(self, token_id: int) -> bytes:
        return bytes((token_id,))

    def decode(self, ids: Iterable[int]) -> bytes:
        return bytes(ids)


class JsonTokenizer(Tokenizer):
    """A tokenizer.json: byte-level BPE, or pieces with `<0xAB>` for every byte.

    Every text comes back byte for byte. What the vocabulary would change (a character that it
    normalizes, a byte that is not UTF-8) is written with its tokens of single bytes.
    """

    def __init__(self, content: bytes, name: str = "tokenizer.json") -> None:
        self.content, self.name = content, name
        self._library = _parse(content, name)
        self._library.encode_special_tokens = True  # text that looks like one stays text
        rules = json.loads(content)
        special = {
            token_id: token.content
            for token_id, token in self._library.get_added_tokens_decoder().items()
            if token.special
        }
        self._tokens, self._byte_ids = _token_bytes(self._library.get_vocab(), rules, special, name)
        self.vocabulary = len(self._tokens)
        ids = {text: token_id for token_id, text in special.items()}
        self.end_of_text = next((ids[text] for text in ENDS if text in ids), None)
        _require_exact(self, self._library.encode(SAMPLE, add_special_tokens=False).ids)

    @property
    def hash(self) -> str:
        """sha256 of the file."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def plain_json(self) -> str:
        """A tokenizer.json that encodes as this class does: without a space in front, padding,
        and tokens around a text."""
        return str(self._library.to_str())

    def encode(self, text: bytes | Bytes) -> Ids:
        ids: list[Ids] = [np.zeros(0, self.dtype)]
        pieces = cut_text(text)
        while group := list(islice(pieces, PIECES)):
            ids += self.encode_batch(group)
        return np.concatenate(ids)

    def encode_batch(self, pieces: Sequence[bytes]) -> list[Ids]:
        """As `encode` each, on all cores. Long pieces take much memory: see `cut_text`."""
        texts = [piece.decode("utf-8", "surrogateescape") for piece in pieces]
        valid = [text if not _NOT_UTF8.search(text) else "" for text in texts]
        encodings = self._library.encode_batch_fast(valid, add_special_tokens=False)
        return [
            np.array(ids if self.decode(ids) == piece else self._encode_exactly(text), self.dtype)
            for piece, text, ids in zip(pieces, texts, (e.ids for e in encodings), strict=True)
        ]

    def token(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._tokens.__getitem__, ids))

    def _encode_exactly(self, text: str) -> list[int]:
        """Halved until the halves come back byte for byte, down to single characters."""
        raw = text.encode("utf-8", "surrogateescape")
        if not _NOT_UTF8.search(text):
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
            if self.decode(ids) == raw:
                return ids
        if len(text) == 1:
            return [self._byte_ids[byte] for byte in raw]
        half = len(text) // 2
        return self._encode_exactly(text[:half]) + self._encode_exactly(text[half:])


def cut_text(text: bytes | Bytes) -> Iterator[bytes]:
    """Pieces of at most PIECE bytes, cut after a line if there is one, never in a character."""
    chunks = (bytes(text[i : i + CHUNK]) for i in range(0, len(text), CHUNK))
    return (piece for piece, _ in cut(chunks) if piece)


def _parse(content: bytes, name: str) -> Any:
    """The tokenizer of the library, without what would change a text: a space in front, padding,
    tokens around it, random merges."""
    import tokenizers

    if len(content) > LARGEST_JSON:
        raise ConfigError(f"{name} has more than {LARGEST_JSON >> 20} MiB: it is no tokenizer.json")
    try:
        rules = json.loads(content)
        model = {**rules["model"], "dropout": None}
        plain = dict.fromkeys(("truncation", "padding", "post_processor"))
        parts = {part: _without_prefix(rules.get(part)) for part in ("normalizer", "pre_tokenizer")}
        return tokenizers.Tokenizer.from_str(
            json.dumps({**rules, **plain, **parts, "model": model})
        )
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{name} is damaged, or no tokenizer.json of the tokenizers library "
            f"({type(error).__name__}: {reason})"
        ) from None


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts no space in front of a text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    part = {key: value for key, value in part.items() if key != "add_prefix_space"}
    if part.get("type") == "ByteLevel":
        part["add_prefix_space"] = False
    elif part.get("type") == "Metaspace":
        part["prepend_scheme"] = "never"
    for key in ("normalizers", "pretokenizers"):
        if isinstance(part.get(key), list):
            kept = (_without_prefix(inner) for inner in part[key])
            part[key] = [inner for inner in kept if inner is not None]
    return part


def _token_bytes(
    ids: dict[str, int], rules: dict[str, Any], special: dict[int, str], name: str
) -> tuple[list[bytes], list[int]]:
    """The bytes of every id, and the ids of the 256 single bytes."""
    size = max(ids.values(), default=0) + 1
    if size > LARGEST_VOCABULARY:
        raise ConfigError(f"{name} has {size:,} tokens; at most {LARGEST_VOCABULARY:,} fit")
    byte_level = '"ByteLevel"' in json.dumps([rules.get("pre_tokenizer"), rules.get("decoder")])
    spelled = spell_bytes() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(text in ids for text in spelled):
        raise ConfigError(
            f"{name} does not give every text back: it has no tokens for single bytes; "
            "use a byte-level tokenizer, as bpe:4096 makes one"
        )
    byte_of = {text: bytes((byte,)) for byte, text in enumerate(spelled)}
    tokens = [b""] * size
    for text, token_id in ids.items():
        if token_id in special:
            continue
        if byte_level:
            known = all(character in byte_of for character in text)
            tokens[token_id] = b"".join(map(byte_of.__getitem__, text)) if known else text.encode()
        else:
            tokens[token_id] = byte_of.get(text) or text.replace("\u2581", " ").encode()
    return tokens, [ids[text] for text in spelled]


def spell_bytes() -> list[str]:
    """A printable character for every byte, as byte-level BPE writes them in its vocabulary."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _require_exact(tokenizer: JsonTokenizer, ids: list[int]) -> None:
    """Refuse a vocabulary that changes ordinary text, as one that makes all letters small."""
    given, back = SAMPLE.encode(), tokenizer.decode(ids)
    if given == back:
        return
    at = next((i for i, (a, b) in enumerate(zip(given, back, strict=False)) if a != b), len(back))
    was, now = (raw[at : at + 12].decode("utf-8", "replace") for raw in (given, back))
    raise ConfigError(
        f"{tokenizer.name} does not give every text back: it turns {was!r} into {now!r}; "
        "use a byte-level tokenizer, as bpe:4096 makes one"
    )


_TABLE: dict[str, Tokenizer] = {}
_LOADED: dict[str, JsonTokenizer] = {}


def register(tokenizer: Tokenizer) -> None:
    """Let settings name this tokenizer, which needs no file."""
    _TABLE[tokenizer.name] = tokenizer
    TOKENIZERS[tokenizer.name] = tokenizer.vocabulary


def load_tokenizer(content: bytes, name: str = "tokenizer.json") -> JsonTokenizer:
    """Make a tokenizer.json known: `tokenizer_of` finds it from now on. Errors name it."""
    digest = hashlib.sha256(content).hexdigest()
    if digest not in _LOADED:
        _LOADED[digest] = JsonTokenizer(content, name)
    return _LOADED[digest]


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer of a run. One with a file must have been loaded."""
    found = _TABLE.get(config.tokenizer) or _LOADED.get(config.tokenizer_hash)
    if found is None:
        raise ConfigError(
            f"the tokenizer {config.tokenizer!r} (sha256 {config.tokenizer_hash[:16] or 'unknown'})"
            " is not here; it is the file tokenizer.json of its run"
        )
    if found.vocabulary != config.vocabulary:
        raise ConfigError(
            f"the tokenizer {config.tokenizer!r} has {found.vocabulary:,} tokens, "
            f"and the settings say {config.vocabulary:,}"
        )
    return found


register(ByteTokenizer())
