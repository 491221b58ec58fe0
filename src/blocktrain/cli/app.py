"""The command line: one function a command, and the only place that reads arguments."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import App, CycloptsError, Parameter

from blocktrain.cli.bench import MEASURES
from blocktrain.cli.environment import cores, is_pulled, new_run_folder, newest_unfinished, source
from blocktrain.cli.flags import Json, Settings, at_least, given, refused
from blocktrain.cli.serve import serve, stage
from blocktrain.cli.together import audit, coordinator, doctor, kick, pull, replay, status, worker
from blocktrain.config import make_config, read_settings
from blocktrain.errors import (
    OUT_OF_MEMORY,
    BlockTrainError,
    ConfigError,
    CorpusError,
    Interrupted,
    RunError,
    broken,
    out_of_memory,
)

if TYPE_CHECKING:
    from blocktrain.runs.folder import Opened

app = App(
    name="blocktrain",
    help="Train one language model together on machines that never meet, and serve it from those machines.",
    version_flags=["--version"],
)
bench = App(name="bench", help="Measure: every published figure comes from one of these commands.")
app.command(bench)
for measure in MEASURES:
    bench.command(measure)
for command in (coordinator, worker, doctor, status, kick, pull, audit, replay, serve, stage):
    app.command(command)


@app.command
def train(
    *,
    data: str | None = None,
    out: Path | None = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    reference: Annotated[bool, Parameter(negative=())] = False,
    preset: str | None = None,
    config: Path | None = None,
    settings: Settings = None,
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
    reference
        Also train the end-to-end model of the same shape, and report the gap.
    preset
        Named settings: "paper" is the method as published.
    config
        A TOML file with settings; flags win over it.
    """
    from rich.markup import escape

    from blocktrain.runs.folder import block_name
    from blocktrain.runs.local import train_blocks
    from blocktrain.runs.report import write_report
    from blocktrain.runs.results import Plan, complete
    from blocktrain.terminal import StepBars, bar, console

    asked = Asked(data, preset, config, given(settings), reference)
    run, made, data, reference = _resumed(out, asked) if resume else _begun(out, asked)
    plan = Plan(run, made, source(data), reference=reference, slots=cores())
    console.print(
        f"run folder [bold]{escape(str(run.folder))}[/]  corpus {escape(data)}  {made.blocks} blocks, {made.steps} steps each"
    )
    try:
        with StepBars(made.steps) as bars:
            train_blocks(
                plan, lambda index, step, loss: bars.told(block_name(index), step, loss), bars.warn
            )
        with bar("evaluating") as progress:
            result = complete(plan, progress)
        page = write_report(run.folder)
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped; everything up to here is saved: continue with --resume"
        ) from None
    if json_:
        print(json.dumps(result))
        return
    _show_result(result, run.folder, page)


class Asked(NamedTuple):
    """What `train` was told about the run."""

    data: str | None
    preset: str | None
    config: Path | None
    settings: dict[str, Any]
    reference: bool


def _begun(out: Path | None, asked: Asked) -> Opened:
    """A new run folder, once its settings, device and corpus are known to be good."""
    from blocktrain.learning.data import absolute
    from blocktrain.learning.train import pick_device
    from blocktrain.runs.folder import create_run, open_run

    from_file, of_run = read_settings(asked.config)
    data = absolute(str(of_run.get("data", "stdlib")) if asked.data is None else asked.data)
    made = make_config({**from_file, **asked.settings}, asked.preset)
    pick_device(made.device)
    source(data).open().require(made.context)
    reference = of_run.get("reference", False)
    if not isinstance(reference, bool) or not isinstance(of_run.get("data", ""), str):
        raise ConfigError(
            f"{asked.config}: reference must be true or false, and data a text (got {reference!r}, {of_run.get('data')!r})"
        )
    return open_run(
        create_run(
            out or new_run_folder(data), made, data, reference=reference or asked.reference
        ).folder
    )


def _resumed(out: Path | None, asked: Asked) -> Opened:
    """An unfinished run; it keeps its settings, but the reference may be asked for later."""
    from blocktrain.learning.data import absolute
    from blocktrain.runs.folder import open_run, want_reference

    opened = open_run(out or newest_unfinished())
    if is_pulled(opened.run.folder):
        raise RunError(
            f"{opened.run.folder} holds a model and no record of its training (coordinator/): there is nothing to resume here"
        )
    told = {
        "data": asked.data and absolute(asked.data),
        "preset": asked.preset,
        "config": asked.config,
        **asked.settings,
    }
    kept = {"data": opened.data, **opened.config.model_dump()}
    if changed := [name for name, value in told.items() if value not in (None, kept.get(name))]:
        raise ConfigError(
            f"a run keeps its settings: {', '.join(changed)} cannot change on --resume; start a new run for that"
        )
    return want_reference(opened) if asked.reference and not opened.reference else opened


def _show_result(result: dict[str, Any], folder: Path, page: Path) -> None:
    from blocktrain.terminal import ce_table, console

    console.print(ce_table("valid cross entropy", result["valid_ce"]))
    if result["gap"] is not None:
        console.print(f"gap to end to end: {result['gap']:+.4f} nats per byte")
    print(result["sample"]["prompt"] + result["sample"]["text"])
    more = f"blocktrain generate {shlex.quote(str(folder))} --prompt 'def '"
    console.print(f"\nreport     {page}\nmore text  {more}", highlight=False, markup=False)


@app.command
def evaluate(
    run: Path,
    *,
    data: str | None = None,
    draws: Annotated[int, at_least(1)] = 8,
    device: str = "cpu",
    json_: Json = False,
) -> None:
    """Cross entropy of a trained run on the whole valid split: composed, per block, the paper's path and the reference if it has them.

    Parameters
    ----------
    run
        The run folder.
    data
        Corpus to evaluate on; by default the one the run was trained on.
    draws
        Noise draws of the Monte-Carlo marginal of the Euler path.
    device
        cpu, cuda, cuda:N, mps or auto.
    """
    from rich.markup import escape

    from blocktrain.learning.train import pick_device
    from blocktrain.runs.folder import load_model, read_manifest
    from blocktrain.runs.results import evaluate_run
    from blocktrain.terminal import bar, ce_table, console, perplexity

    model = load_model(run, pick_device(device))
    try:
        corpus = source(read_manifest(run).data if data is None else data).open()
    except CorpusError as error:
        raise (
            error if data is not None else CorpusError(f"{error}; name another text with --data")
        ) from None
    corpus.require(model.config.context, "valid", advice="use a longer text")
    with bar("evaluating") as progress:
        ce = evaluate_run(run, model, corpus.valid, draws=draws, progress=progress)
    if json_:
        values = {
            n: {"nats_per_byte": v, "bits_per_byte": v / math.log(2), "perplexity": perplexity(v)}
            for n, v in ce.items()
        }
        finite = {
            n: {name: number if math.isfinite(number) else None for name, number in told.items()}
            for n, told in values.items()
        }
        print(json.dumps({"data": corpus.name, "valid_bytes": len(corpus.valid), "models": finite}))
        return
    console.print(ce_table(escape(f"{run} on {corpus.name}, {len(corpus.valid):,} bytes"), ce))
    if "euler" not in ce:
        console.print(
            "[dim]no Euler rows: the blocks were trained with objective=next and read no noised target[/]"
        )


@app.command
def generate(
    run: Path,
    *,
    prompt: Annotated[str, Parameter(show_default=lambda _: "a line break")] = "\n",
    mode: Literal["autoregressive", "sweep"] = "autoregressive",
    sweeps: Annotated[int, at_least(1)] = 1,
    draft: Literal["first-block", "none"] = "first-block",
    max_tokens: Annotated[int, at_least(1)] = 256,
    temperature: Annotated[float, at_least(0)] = 0.8,
    seed: Annotated[int, at_least(0, 2**63 - 1)] = 0,
) -> None:
    """Write text after a prompt, streaming to the terminal. The same seed gives the same bytes.

    Parameters
    ----------
    run
        The run folder.
    prompt
        Text to continue.
    mode
        autoregressive: one traversal of the blocks per byte. sweep: a draft of the whole text, of which each traversal
        keeps what is right, corrects the first byte that is not, and has the rest drafted anew.
    sweeps
        Traversals per window of mode sweep; more come closer to the autoregressive answer.
    draft
        What mode sweep starts from: the first block's own text, or pure noise (models trained with a tail).
    max_tokens
        Bytes to write.
    temperature
        0 takes the likeliest byte; 1 samples from the model as it is.
    seed
        Seed of the sampling.
    """
    import torch

    from blocktrain.learning.generate import Sampler, autoregressive, sweep, sweep_from_noise
    from blocktrain.learning.train import one_thread
    from blocktrain.runs.folder import load_model

    if mode == "autoregressive" and (draft != "first-block" or sweeps != 1):
        raise ConfigError(
            "--sweeps and --draft are for --mode sweep: autoregressive text has one traversal per byte and no draft"
        )
    model = load_model(run, torch.device("cpu"))
    text, context = os.fsencode(prompt) or b"\n", model.config.context
    sampler = Sampler(seed, temperature)
    if mode == "autoregressive":
        written = autoregressive(
            model.scorer(seed=seed), text, max_tokens, context, sampler, model.device
        )
    elif draft == "none":
        written = sweep_from_noise(model, text, max_tokens, sampler, sweeps)
    else:
        written = sweep(
            model.scorer(seed=seed),
            model.drafter(),
            text,
            max_tokens,
            context,
            sampler,
            sweeps,
            model.device,
        )
    sys.stdout.buffer.write(text)
    with one_thread():  # on more, a byte's bits depend on how many others are computed with it
        for byte in written:
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\n")


def main() -> None:
    """Run a command; known errors become one sentence on stderr and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        print(f"blocktrain: {refused(error)}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as error:
        print(f"blocktrain: {error}", file=sys.stderr)
        sys.exit(130)
    except BlockTrainError as error:
        print(f"blocktrain: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        print(f"blocktrain: {broken(error)}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        print(f"blocktrain: {OUT_OF_MEMORY}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
