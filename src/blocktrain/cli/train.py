"""Commands for a model on this machine: `train` and `evaluate`. (`generate`: generate.py.)"""

from __future__ import annotations

import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from blocktrain.cli.environment import (
    cache_folder,
    cores,
    is_pulled,
    new_run_folder,
    newest_unfinished,
    read_config,
    require_model,
    source,
)
from blocktrain.cli.flags import (
    RARE_FLAGS,
    EvalBytes,
    Json,
    SettingsFlags,
    Threads,
    Yes,
    at_least,
    named_settings,
)
from blocktrain.config import read_settings
from blocktrain.errors import ConfigError, CorpusError, Interrupted, RunError
from blocktrain.sizes import is_near_size

if TYPE_CHECKING:
    from blocktrain.runs.folder import RunSettings
    from blocktrain.runs.texts import TextLosses

EVAL_ADVICE = "use a longer text, a larger --eval-bytes or a smaller --context"


@dataclass(frozen=True)
class TrainFlags:
    """What `train` does beside the blocks; it may differ when a run is resumed."""

    reference: Annotated[
        bool,
        Parameter(
            help="Also train the end-to-end model of the same shape, and report the gap.",
            negative=(),
        ),
    ] = False
    threads: Annotated[Threads, Parameter(group=RARE_FLAGS)] = 1
    eval_bytes: Annotated[EvalBytes, Parameter(group=RARE_FLAGS)] = None


def train(
    *,
    data: str | None = None,
    out: Path | None = None,
    resume: Yes = False,
    flags: Annotated[TrainFlags | None, Parameter(name="*")] = None,
    preset: Annotated[str | None, Parameter(group=RARE_FLAGS)] = None,
    config: Path | None = None,
    settings: SettingsFlags = None,
    json_: Json = False,
) -> None:
    """Train all blocks of a model on this machine, each in its own process, then the fusion block.

    Ctrl-C saves; --resume continues to the same weights. Ends with a report.html to look at.

    Parameters
    ----------
    data
        stdlib (the default), wikitext2, wikitext103, or the path of a text file or folder.
    out
        The run folder; by default a new one under runs/.
    resume
        Continue the run in --out, or the newest unfinished one under runs/.
    preset
        Named settings: "paper" is the method as published.
    config
        A TOML file with settings; flags win over it.
    """
    flags = flags or TrainFlags()
    request = TrainRequest(data, preset, config, named_settings(settings), flags.reference)
    run = _resume(out, request) if resume else _begin(out, request, flags.eval_bytes)
    result, page = _train(run, flags)
    if json_:
        print(json.dumps(result))
        return
    _show_result(result, run.run.folder, page)


def _train(settings: RunSettings, flags: TrainFlags) -> tuple[dict[str, Any], Path]:
    """Train, evaluate and report, with progress bars."""
    from rich.markup import escape

    from blocktrain.runs.folder import block_name
    from blocktrain.runs.local import train_blocks
    from blocktrain.runs.reference import TrainingPlan
    from blocktrain.runs.report import write_report
    from blocktrain.runs.results import complete
    from blocktrain.terminal import StepBars, bar, console

    run, config, data, reference = settings
    slots = max(1, cores() // flags.threads)
    plan = TrainingPlan(
        run, config, source(data), reference, slots, flags.threads, flags.eval_bytes
    )
    plan.eval_corpus().require(config.context, "valid", advice=EVAL_ADVICE)
    console.print(
        f"run folder [bold]{escape(str(run.folder))}[/]  corpus {escape(data)}  "
        f"{config.blocks} blocks, {config.steps} steps each"
    )
    try:
        with StepBars(config.steps) as bars:
            train_blocks(
                plan,
                lambda index, step, loss: bars.update(block_name(index), step, loss),
                bars.warn,
            )
        with bar("evaluating") as progress:
            result = complete(plan, progress)
        return result, write_report(run.folder)
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped; everything up to here is saved: continue with --resume"
        ) from None


class TrainRequest(NamedTuple):
    """What the command line of `train` says about the run itself."""

    data: str | None
    preset: str | None
    config: Path | None
    settings: dict[str, Any]
    reference: bool


def _begin(out: Path | None, request: TrainRequest, eval_bytes: int | None) -> RunSettings:
    """Make a new run folder, once settings, device and corpus are known to be good."""
    from blocktrain.learning.corpus.source import absolute, training_text
    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.learning.train import pick_device, require_compiler
    from blocktrain.learning.vocabulary import resolve
    from blocktrain.runs.folder import create_run, open_run
    from blocktrain.terminal import bar

    from_file, of_run = read_settings(request.config)
    data = absolute(str(of_run.get("data", "stdlib")) if request.data is None else request.data)
    config = read_config({**from_file, **request.settings}, request.preset)
    device = pick_device(config.device)
    if config.compile:
        require_compiler(device)
    text = source(data)
    with bar("tokenizer") as progress:
        config = resolve(config, lambda: training_text(text), cache_folder(), progress)
    tokenizer = tokenizer_of(config)
    corpus = text.open(tokenizer)
    corpus.require(config.context)
    evaluated = corpus.limit_valid(eval_bytes, tokenizer)
    evaluated.require(config.context, "valid", advice=EVAL_ADVICE)
    reference = of_run.get("reference", False)
    if not isinstance(reference, bool) or not isinstance(of_run.get("data", ""), str):
        raise ConfigError(
            f"{request.config}: reference must be true or false, and data a text "
            f"(got {reference!r}, {of_run.get('data')!r})"
        )
    folder = out or new_run_folder(data)
    create_run(folder, config, data, reference=reference or request.reference)
    return open_run(folder)


def _resume(out: Path | None, request: TrainRequest) -> RunSettings:
    """An unfinished run. It keeps its settings, but the reference may be added later."""
    from blocktrain.learning.corpus.source import absolute
    from blocktrain.runs.folder import open_run, want_reference

    settings = open_run(out or newest_unfinished())
    if is_pulled(settings.run.folder):
        raise RunError(
            f"{settings.run.folder} holds a model and no record of its training (coordinator/): "
            "there is nothing to resume here"
        )
    named = {
        "data": request.data and absolute(request.data),
        "preset": request.preset,
        "config": request.config,
        **request.settings,
    }
    size = request.settings.get("size")
    near = size and is_near_size(settings.config, size)
    current = {"data": settings.data, "size": near and size, **settings.config.model_dump()}
    if changed := [name for name, value in named.items() if value not in (None, current.get(name))]:
        raise ConfigError(
            f"a run keeps its settings: {', '.join(changed)} cannot change on --resume; "
            "start a new run for that"
        )
    return want_reference(settings) if request.reference and not settings.reference else settings


def _show_result(result: dict[str, Any], folder: Path, page: Path) -> None:
    from blocktrain.runs.folder import valid_size
    from blocktrain.terminal import ce_table, console, printable

    corpus = result["corpus"]
    size = valid_size(corpus["valid_bytes"], corpus.get("evaluated_bytes"))
    console.print(ce_table(f"cross entropy on {size}", result["valid_ce"]))
    if result["gap"] is not None:
        console.print(f"gap to end to end: {result['gap']:+.4f} nats per byte")
    sample = result["sample"]["prompt"] + result["sample"]["text"]
    print(printable(sample) if sys.stdout.isatty() else sample)
    more = f"blocktrain generate {shlex.quote(str(folder))} --prompt 'def '"
    console.print(f"\nreport     {page}\nmore text  {more}", highlight=False, markup=False)


def evaluate(
    run: Path,
    *,
    data: str | None = None,
    text: Path | None = None,
    draws: Annotated[int, at_least(1)] = 8,
    device: str = "cpu",
    threads: Threads = 1,
    eval_bytes: EvalBytes = None,
    json_: Json = False,
) -> None:
    """Cross entropy of a trained run on its valid split.

    Of the composed model and of each block; of the paper's path and the reference if the run has
    them.

    Parameters
    ----------
    run
        The run folder.
    data
        Corpus to evaluate on; by default the one the run was trained on.
    text
        Evaluate on this whole file instead of a valid split, from its first token on, as
        evaluation harnesses do; a .jsonl has one text a line, as {"text": "..."}.
    draws
        Noise draws of the Monte-Carlo marginal of the Euler path.
    device
        cpu, cuda, cuda:N, mps or auto.
    """
    from rich.markup import escape

    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.learning.train import pick_device
    from blocktrain.runs.folder import load_model, read_manifest, valid_size
    from blocktrain.runs.results import evaluate_run
    from blocktrain.runs.texts import evaluate_texts, read_texts
    from blocktrain.terminal import bar, ce_table, console

    if text is not None and (data is not None or eval_bytes is not None):
        raise ConfigError("--text is evaluated whole: leave out --data and --eval-bytes")
    texts = read_texts(text) if text is not None else []  # first: the file may be no good
    model = load_model(require_model(run), pick_device(device))
    if text is not None:
        with bar("evaluating") as progress:
            losses = evaluate_texts(
                run, model, texts, draws=draws, threads=threads, progress=progress
            )
        return _show_losses(f"{run} on {text}", losses, json_)
    tokenizer = tokenizer_of(model.config)
    try:
        corpus = source(read_manifest(run).data if data is None else data).open(tokenizer)
    except CorpusError as error:
        raise (
            error if data is not None else CorpusError(f"{error}; name another text with --data")
        ) from None
    tokens = corpus.limit_valid(eval_bytes, tokenizer)
    tokens.require(model.config.context, "valid", advice=EVAL_ADVICE)
    with bar("evaluating") as progress:
        ce = evaluate_run(run, model, tokens, draws=draws, progress=progress, threads=threads)
    sizes = {"valid_bytes": corpus.valid_bytes, "evaluated_bytes": tokens.valid_bytes}
    if json_:
        models = {name: _units(nats) for name, nats in ce.items()}
        print(json.dumps({"data": corpus.name, **sizes, "models": models}))
        return
    title = f"{run} on {corpus.name}, {valid_size(**sizes)}"
    console.print(ce_table(escape(title), ce))
    if "euler" not in ce:
        console.print(
            "[dim]no Euler rows: the blocks were trained with objective=next "
            "and read no noised target[/]"
        )


def _show_losses(title: str, losses: TextLosses, json_: bool) -> None:
    from rich.markup import escape

    from blocktrain.terminal import console, rows_table

    sizes = {name: getattr(losses, name) for name in ("texts", "tokens", "bytes", "words")}
    models = {name: losses.units(name) for name in losses.nats}
    if json_:
        return print(json.dumps({**sizes, "models": models}))
    size = ", ".join(f"{count:,} {name}" for name, count in sizes.items())
    rows = [
        {"model": name, **{_short(unit): value for unit, value in units.items()}}
        for name, units in models.items()
    ]
    console.print(rows_table(escape(f"{title}, {size}"), rows))


def _short(unit: str) -> str:
    """nats/byte, word ppl: so that a table fits a terminal."""
    return unit.replace("_per_", "/").replace("_perplexity", " ppl")


def _units(nats: float) -> dict[str, float | None]:
    """A cross entropy in all units; JSON has no infinity, so null stands for it."""
    from blocktrain.terminal import perplexity

    units = {
        "nats_per_byte": nats,
        "bits_per_byte": nats / math.log(2),
        "perplexity": perplexity(nats),
    }
    return {name: value if math.isfinite(value) else None for name, value in units.items()}
