"""The command that makes token shards of a text ahead of time: `data`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from blocktrain.cli.environment import cache_folder, source
from blocktrain.cli.flags import Json, at_least
from blocktrain.config import LARGEST_SHARD, make_config
from blocktrain.errors import Interrupted

LEAST_SHARD = 1 << 16


def data(
    spec: str,
    *,
    tokenizer: str = "bytes",
    out: Path | None = None,
    shard_tokens: Annotated[int | None, at_least(LEAST_SHARD, LARGEST_SHARD)] = None,
    json_: Json = False,
) -> None:
    """Turn text into token shards, and say how much there is of it.

    Commands that train do so by themselves, and keep the shards in the cache. Use this to prepare a
    large text once, to look at it, or to take its shards to another machine. May be stopped and
    called again: it goes on where it was.

    Parameters
    ----------
    spec
        What to read, as in --data of train: stdlib, wikitext2, wikitext103; a text file, .jsonl or
        .parquet file, also with .gz or .zst, or a folder of them (PATH:COLUMN names the column);
        hf:NAME[:CONFIG[:SPLIT[:COLUMN]]] on the Hugging Face hub; or mix.toml, a weighted mixture.
    tokenizer
        bytes, bpe:N (learned from the text), the path of a tokenizer.json, or a name on the hub.
    out
        Folder for the shards; by default one in the cache. The folder is a --data then.
    shard_tokens
        Tokens of a shard, by default 4194304. Workers fetch whole shards.
    """
    from blocktrain.learning.corpus.source import training_text
    from blocktrain.learning.shards import SHARD_TOKENS
    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.learning.vocabulary import resolve
    from blocktrain.terminal import bar, token_bar

    text = source(spec)
    config = make_config({"tokenizer": tokenizer})
    try:
        with bar("tokenizer") as progress:
            config = resolve(config, lambda: training_text(text), cache_folder(), progress)
        vocabulary = tokenizer_of(config)
        with token_bar("tokens") as update:
            corpus = text.open(
                vocabulary,
                out,
                shard_tokens=shard_tokens or SHARD_TOKENS,
                progress=lambda status: update(*status),
            )
    except KeyboardInterrupt:
        raise Interrupted("stopped; call the same command again to go on where it was") from None
    result = {
        "name": corpus.name,
        "folder": str(corpus.folder),
        "index": corpus.index.hash,
        "tokenizer": tokenizer,
        "tokenizer_hash": corpus.index.tokenizer,
        **corpus.sizes(),
    }
    if json_:
        print(json.dumps(result))
        return
    _show(result)


def _show(result: Mapping[str, object]) -> None:
    for name, value in result.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):18} {shown}")
    folder = shlex.quote(str(result["folder"]))
    named = f" --tokenizer {folder}/tokenizer.json" if result["tokenizer_hash"] else ""
    print(f"\ntrain on it         blocktrain train --data {folder}{named}")
