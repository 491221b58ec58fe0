"""Small tokenizer.json files of the kinds that people have."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from blocktrain.learning.vocabulary import train_bpe

TEXT = (
    "the red leaf falls on the green field; every river reaches the quiet sea.\n"
    "Silver wings over a distant mountain, golden bells under the ancient bridge of stone;\n"
    "harvest winds carry yellow apples.\n"
    "1 + 1 = 2, and 12 + 30 = 42. Ärger über Öl: naïve café, 東京 and 🙂.\n"
) * 40


def byte_level(size: int = 400, text: str = TEXT) -> bytes:
    return train_bpe(text.encode(), size)


def edited(content: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(content), **changes}).encode()


def sentencepiece(*, byte_fallback: bool = True) -> bytes:
    """As Llama's: pieces that begin with ▁, `<0xAB>` for other bytes, a space put in front."""
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    library.train_from_iterator([TEXT.replace("東京 and 🙂", "")], trainer)
    rules = json.loads(library.to_str())
    learned = [token for token in rules["model"]["vocab"] if token not in ("<unk>", "<s>", "</s>")]
    first = ["<unk>", "<s>", "</s>"]
    if byte_fallback:
        first += [f"<0x{byte:02X}>" for byte in range(256)]
    rules["model"]["vocab"] = {token: i for i, token in enumerate([*first, *learned])}
    whole = Tokenizer.from_str(json.dumps(rules))
    whole.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return whole.to_str().encode()


def metaspace() -> bytes:
    """The newer form of the same."""
    rules = json.loads(sentencepiece())
    rules["normalizer"] = None
    rules["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    return json.dumps(rules).encode()


def lowercase() -> bytes:
    return edited(byte_level(), normalizer={"type": "Lowercase"})


def composing() -> bytes:
    """Normalizes to NFC, as many tokenizers on the hub do."""
    return edited(byte_level(), normalizer={"type": "NFC"})


def wordpiece() -> bytes:
    """As BERT's: whole words, [UNK] for what it does not know."""
    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]"], show_progress=False
    )
    library.train_from_iterator([TEXT], trainer)
    return library.to_str().encode()
