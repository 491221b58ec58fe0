"""The tokenizer of a run as the files that `AutoTokenizer` loads, without code of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.learning.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, spell_bytes
from blocktrain.runs.folder import write_json

PAD = "<|pad|>"


def pad_id(tokenizer: Tokenizer) -> int:
    """The id that fills up the rows of a batch: the end of text, or the one behind the vocabulary,
    which the model takes for padding wherever it stands."""
    end = tokenizer.end_of_text
    return tokenizer.vocabulary if end is None else end


def write_tokenizer(tokenizer: Tokenizer, context: int, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    rules = tokenizer_rules(tokenizer)
    names = {token["id"]: token["content"] for token in rules["added_tokens"]}
    end = tokenizer.end_of_text
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",  # so that every row of a batch can be continued
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text that looks like one stays text
        **({} if end is None else {"eos_token": names[end]}),
        "pad_token": names[pad_id(tokenizer)],
    }
    write_json(folder / "tokenizer.json", rules)
    write_json(folder / "tokenizer_config.json", settings)


def tokenizer_rules(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer.json."""
    if isinstance(tokenizer, JsonTokenizer):
        rules = json.loads(tokenizer.plain_json)
        rules["decoder"] = _without_strip(rules["decoder"])
    elif isinstance(tokenizer, ByteTokenizer):
        rules = byte_rules()
    else:
        raise ConfigError(f"the tokenizer {tokenizer.name!r} has no tokenizer.json to export")
    if tokenizer.end_of_text is None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        pad = {"id": pad_id(tokenizer), "content": PAD, **flags, "special": True}
        rules["added_tokens"] = [*rules["added_tokens"], pad]
    return rules


def _without_strip(decoder: Any) -> Any:
    """A decoder that keeps the space at the start of a text: no rule of ours puts one there."""
    if not isinstance(decoder, dict):
        return decoder
    if decoder.get("type") == "Metaspace":
        return {**decoder, "prepend_scheme": "never"}
    if isinstance(decoder.get("decoders"), list):
        kept = [_without_strip(part) for part in decoder["decoders"] if part["type"] != "Strip"]
        return {**decoder, "decoders": kept}
    return decoder


def byte_rules() -> dict[str, Any]:
    """The rules of a tokenizer whose id is the byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    nothing = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model: dict[str, Any] = {
        "type": "BPE",
        **dict.fromkeys(nothing),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": {character: byte for byte, character in enumerate(spell_bytes())},
        "merges": [],
    }
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [],
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": model,
    }
