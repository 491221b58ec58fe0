"""The command `train`: all blocks of a model on this machine."""

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
    source,
)
from blocktrain.cli.flags import (
    EVAL_ADVICE,
    RARE_FLAGS,
    BeginFlags,
    EvalBytes,
    Json,
    ScoreBytes,
    ScoreSeconds,
    SettingsFlags,
    Threads,
    Track,
    Yes,
    named_settings,
    named_text,
)
from blocktrain.config import read_new_settings, read_origin
from blocktrain.errors import ConfigError, Interrupted, RunError
from blocktrain.sizes import is_near_size

if TYPE_CHECKING:
    from blocktrain.runs.folder import RunSettings
    from blocktrain.runs.reference import TrainingPlan


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
    track: Track = ()
    score_bytes: Annotated[ScoreBytes, Parameter(group=RARE_FLAGS)] = 65536
    score_seconds: Annotated[ScoreSeconds, Parameter(group=RARE_FLAGS)] = 30.0


def train(
    *,
    begin: Annotated[BeginFlags | None, Parameter(name="*")] = None,
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
    request = TrainRequest(
        begin or BeginFlags(), preset, config, named_settings(settings), flags.reference
    )
    if flags.track:
        from blocktrain.watch.trackers import require_trackers

        require_trackers(flags.track)  # before a folder is made
    run = resume_run(out, request) if resume else begin_run(out, request, flags.eval_bytes)
    result, page = _train(run, flags)
    if json_:
        print(json.dumps(result))
        return
    _show_result(result, run.run.folder, page)


def _train(settings: RunSettings, flags: TrainFlags) -> tuple[dict[str, Any], Path]:
    """Train, evaluate and report, with progress bars."""
    from rich.markup import escape

    from blocktrain.runs.local import train_blocks
    from blocktrain.runs.report import write_report
    from blocktrain.runs.results import complete
    from blocktrain.terminal import StepBars, bar, console
    from blocktrain.watch.trackers import tracking

    plan, folder = plan_training(settings, flags), settings.run.folder
    console.print(
        f"run folder [bold]{escape(str(folder))}[/]  corpus {escape(settings.data)}  "
        f"{plan.config.blocks} blocks, {plan.config.length}"
    )
    try:
        with (
            StepBars(plan.config.steps_of) as bars,
            tracking(flags.track, folder, plan.config.model_dump(), bars.warn) as track,
        ):

            def show(event: dict[str, Any]) -> None:
                track(event)
                bars.show(event)

            train_blocks(plan, show, bars.warn)
        with bar("evaluating") as progress:
            result = complete(plan, progress)
        return result, write_report(folder)
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped; everything up to here is saved: continue with --resume"
        ) from None


def plan_training(settings: RunSettings, flags: TrainFlags) -> TrainingPlan:
    """What to train; refused if there is too little text to evaluate on."""
    from blocktrain.runs.reference import TrainingPlan

    run, config, data, reference, origin = settings
    slots = max(1, cores() // flags.threads)
    plan = TrainingPlan(
        run,
        config,
        source(data),
        reference,
        slots,
        flags.threads,
        flags.eval_bytes,
        origin,
        flags.score_bytes,
        flags.score_seconds,
    )
    plan.eval_corpus().require(config.context, "valid", advice=EVAL_ADVICE)
    return plan


class TrainRequest(NamedTuple):
    """What the command line of `train` says about the run itself."""

    begin: BeginFlags
    preset: str | None
    config: Path | None
    settings: dict[str, Any]
    reference: bool


def begin_run(out: Path | None, request: TrainRequest, eval_bytes: int | None) -> RunSettings:
    """Make a new run folder, once settings, device and corpus are known to be good."""
    from blocktrain.learning.corpus.source import absolute, training_text
    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.learning.train import pick_device, require_compiler
    from blocktrain.learning.vocabulary import resolve
    from blocktrain.runs.folder import create_run, open_run
    from blocktrain.runs.prepare import continue_run
    from blocktrain.terminal import bar, console, token_bar

    from_file, of_run = read_new_settings(request.config)
    origin = request.begin.origin(read_origin(of_run, request.config), out)
    named = {**from_file, **request.settings}
    before: str | None = "stdlib"
    if origin is None:
        config = read_config(named, request.preset)
    else:
        config, before, sentence = continue_run(origin, named, request.preset)
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    data = absolute(named_text(request.begin.data, of_run, before))
    device = pick_device(config.device)
    if config.compile:
        require_compiler(device)
    text = source(data)
    if origin is None:
        with bar("tokenizer") as progress:
            config = resolve(config, lambda: training_text(text), cache_folder(), progress)
    tokenizer = tokenizer_of(config)
    with token_bar("tokens") as update:
        corpus = text.open(tokenizer, progress=lambda status: update(*status))
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
    create_run(folder, config, data, reference=reference or request.reference, origin=origin)
    return open_run(folder)


def resume_run(out: Path | None, request: TrainRequest) -> RunSettings:
    """An unfinished run. It keeps its settings, but the reference may be added later."""
    from blocktrain.learning.corpus.source import absolute
    from blocktrain.runs.folder import open_run, want_reference

    settings = open_run(out or newest_unfinished())
    if is_pulled(settings.run.folder):
        raise RunError(
            f"{settings.run.folder} holds a model and no record of its training (coordinator/): "
            "there is nothing to resume here"
        )
    if request.begin.origin(None, None):
        raise ConfigError(
            "--from starts a new run and --resume goes on with an unfinished one: leave one out"
        )
    named = {
        "data": request.begin.data and absolute(request.begin.data),
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
    console.print(
        ce_table(f"cross entropy on {size}", result["valid_ce"], corpus["bytes_per_token"])
    )
    if result["gap"] is not None:
        bits = result["gap"] / math.log(2)
        console.print(f"gap to end to end: {bits:+.4f} bits per byte")
    sample = result["sample"]["prompt"] + result["sample"]["text"]
    print(printable(sample) if sys.stdout.isatty() else sample)
    more = f"blocktrain generate {shlex.quote(str(folder))} --prompt 'def '"
    console.print(f"\nreport     {page}\nmore text  {more}", highlight=False, markup=False)
