"""What a run begins with, as files: version 0 of every block and the two parts of the corpus.

Making them needs torch. It is imported late, so that a coordinator can have them made in another
process without loading torch itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blocktrain.config import Config, Origin
from blocktrain.processes import Channel, Job, run_jobs

if TYPE_CHECKING:
    from blocktrain.learning.corpus.source import Source

PIECE = 1 << 22  # bytes


def prepare(config: Config, source: Source, folder: Path, origin: Origin | None = None) -> None:
    """Write block-N.safetensors, train.txt and valid.txt, and parent.json if there is an origin.

    The folder, opened as a corpus, has the same parts as the source.
    """
    from blocktrain.learning.compose import build_block
    from blocktrain.learning.corpus.text import write_texts
    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.learning.train import block_weights
    from blocktrain.protocol.tensors import pack

    folder.mkdir(parents=True, exist_ok=True)
    _take_over(config, folder, origin)  # which also loads the parent's tokenizer
    tokenizer = tokenizer_of(config)
    corpus = source.open(tokenizer)
    corpus.require(config.context)
    # Opening train.txt cuts the calibration part off again.
    write_texts(corpus, tokenizer, folder)
    for index in range(1, config.blocks + 1):
        if not (path := folder / f"block-{index}.safetensors").exists():
            path.write_bytes(pack(block_weights(build_block(config, index))))


def _take_over(config: Config, folder: Path, origin: Origin | None) -> None:
    """The blocks that come from a trained model, and parent.json, which says so."""
    for path in (*folder.glob("block-*.safetensors"), folder / "parent.json"):
        path.unlink(missing_ok=True)  # of an earlier try
    if origin is None:
        return
    from blocktrain.protocol.messages import write
    from blocktrain.protocol.tensors import pack
    from blocktrain.runs.parent import open_parent, take_over

    with open_parent(Path(origin.folder)) as parent:
        facts = take_over(parent, config, origin)
        for index in facts.blocks:
            content = pack(parent.weights(index))
            (folder / f"block-{index}.safetensors").write_bytes(content)
    (folder / "parent.json").write_bytes(write(facts))


def prepare_in_process(
    config: Config,
    data: str,
    data_dir: Path | None,
    cache_dir: Path,
    folder: Path,
    origin: Origin | None = None,
) -> None:
    """`prepare` in a process of its own; `data`, `data_dir` and `cache_dir` as in `Source`."""
    job = Job("prepare", _work, (config, data, data_dir, cache_dir, folder, origin))
    run_jobs([job], 1, lambda *_: None)


def _work(
    _: Channel,
    config: Config,
    data: str,
    data_dir: Path | None,
    cache_dir: Path,
    folder: Path,
    origin: Origin | None,
) -> None:
    from blocktrain.learning.corpus.source import Source

    prepare(config, Source(data, data_dir, cache_dir), folder, origin)


class ContinuedRun(NamedTuple):
    """What a run that goes on from another one begins with."""

    config: Config
    data: str | None
    """The parent's text, if it is known where that is."""
    sentence: str
    """Which blocks begin with which weights."""


def continue_in_process(origin: Origin, named: dict[str, Any]) -> ContinuedRun:
    """`continue_run` in a process of its own."""
    answers: list[ContinuedRun] = []
    job = Job("parent", _continue, (origin, named))
    run_jobs([job], 1, lambda _, message: answers.append(ContinuedRun(**message)), "start it again")
    return answers[0]


def _continue(channel: Channel, origin: Origin, named: dict[str, Any]) -> None:
    channel.send(**continue_run(origin, named)._asdict())


def continue_run(origin: Origin, named: dict[str, Any], preset: str | None = None) -> ContinuedRun:
    """The settings of a run that goes on from another one; ConfigError says what does not fit."""
    from blocktrain.runs.parent import continued_config, describe, open_parent, take_over

    with open_parent(Path(origin.folder)) as parent:
        config = continued_config(parent, named, preset)
        facts = take_over(parent, config, origin)
        return ContinuedRun(config, parent.data, describe(parent, config, facts))
