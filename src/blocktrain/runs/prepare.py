"""What a run begins with, as files: version 0 of every block, the corpus and its tokenizer.

Making them needs torch. It is imported late, so that a coordinator can have them made in another
process without loading torch itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blocktrain.config import Config, Origin, make_config
from blocktrain.files import write_atomic
from blocktrain.processes import Channel, Job, run_jobs

if TYPE_CHECKING:
    from blocktrain.learning.corpus.source import Source

SETTINGS = "settings.json"
REPORT_SECONDS = 0.2
SourceFields = tuple[str, Path | None, Path]
"""The fields of a `Source`, which cannot be imported without torch."""
OnShare = Callable[[str, float], None]
"""What is being done, and how much of it is."""


def prepare(
    config: Config,
    source: Source,
    folder: Path,
    origin: Origin | None = None,
    progress: OnShare = lambda *_: None,
) -> Config:
    """Write block-N.safetensors, a link `corpus` to the prepared corpus, and tokenizer.json.

    With an origin also parent.json. Gives the settings with the tokenizer that was found or
    learned; they are a file, too.
    """
    from blocktrain.learning.compose import build_block
    from blocktrain.learning.corpus.source import training_text
    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.learning.train import block_weights
    from blocktrain.learning.vocabulary import resolve
    from blocktrain.protocol.tensors import pack
    from blocktrain.runs.folder import write_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    _take_over(config, folder, origin)  # which also loads the parent's tokenizer
    if not config.tokenizer_hash:
        learned = partial(progress, "tokenizer")
        config = resolve(config, lambda: training_text(source), source.cache_dir, learned)
    corpus = source.open(
        tokenizer_of(config),
        progress=lambda status: progress("corpus", status.read / max(status.size, 1)),
    )
    corpus.require(config.context)
    (folder / "corpus").unlink(missing_ok=True)
    (folder / "corpus").symlink_to(corpus.folder.resolve())
    write_tokenizer(folder, config)
    write_atomic(folder / SETTINGS, config.model_dump_json().encode())
    for index in range(1, config.blocks + 1):
        if not (path := folder / f"block-{index}.safetensors").exists():
            path.write_bytes(pack(block_weights(build_block(config, index))))
    return config


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
    place: SourceFields,
    folder: Path,
    origin: Origin | None = None,
    progress: OnShare = lambda *_: None,
) -> Config:
    """`prepare` in a process of its own."""

    def on_message(_: str, message: dict[str, Any]) -> None:
        progress(message["what"], message["share"])

    run_jobs([Job("prepare", _work, (config, place, folder, origin))], 1, on_message)
    return make_config(json.loads((folder / SETTINGS).read_bytes()))


def _work(
    channel: Channel, config: Config, place: SourceFields, folder: Path, origin: Origin | None
) -> None:
    from blocktrain.learning.corpus.source import Source

    last = 0.0

    def report(what: str, share: float) -> None:
        nonlocal last
        if time.monotonic() - last > REPORT_SECONDS:
            last = time.monotonic()
            channel.send(what=what, share=share)

    prepare(config, Source(*place), folder, origin, report)


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
