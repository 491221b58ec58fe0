"""What to do with a trained model: `evaluate` it, `export` and `push` it for Hugging Face."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from blocktrain.cli.environment import require_model, source
from blocktrain.cli.flags import EVAL_ADVICE, EvalBytes, Json, Threads, Yes, at_least
from blocktrain.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from blocktrain.learning.compose import Model
    from blocktrain.learning.corpus.token_corpus import TokenCorpus
    from blocktrain.runs.results import EvaluatedRun
    from blocktrain.runs.texts import TextLosses


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
    from blocktrain.learning.train import pick_device
    from blocktrain.runs.folder import load_model
    from blocktrain.runs.results import evaluate_run
    from blocktrain.runs.texts import evaluate_texts, read_texts
    from blocktrain.terminal import bar

    if text is not None and (data is not None or eval_bytes is not None):
        raise ConfigError("--text is evaluated whole: leave out --data and --eval-bytes")
    texts = read_texts(text) if text is not None else []  # first: the file may be no good
    model = load_model(require_model(run), pick_device(device))
    if text is not None:
        with bar("evaluating") as progress:
            losses = evaluate_texts(
                run, model, texts, draws=draws, threads=threads, progress=progress
            )
        _show_losses(f"{run} on {text}", losses, json_)
        return
    corpus, tokens = _corpora(run, model, data, eval_bytes)
    with bar("evaluating") as progress:
        result = evaluate_run(run, model, tokens, draws=draws, progress=progress, threads=threads)
    sizes = {"valid_bytes": corpus.valid_bytes, "evaluated_bytes": tokens.valid_bytes}
    _show_ce(f"{run} on {corpus.name}", sizes, result, tokens.bytes_per_token, json_)


def _corpora(
    run: Path, model: Model, data: str | None, eval_bytes: int | None
) -> tuple[TokenCorpus, TokenCorpus]:
    """The corpus, and as much of it as is evaluated."""
    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.runs.folder import read_manifest
    from blocktrain.terminal import token_bar

    tokenizer = tokenizer_of(model.config)
    try:
        with token_bar("tokens") as update:
            corpus = source(read_manifest(run).data if data is None else data).open(
                tokenizer, progress=lambda status: update(*status)
            )
    except CorpusError as error:
        raise (
            error if data is not None else CorpusError(f"{error}; name another text with --data")
        ) from None
    tokens = corpus.limit_valid(eval_bytes, tokenizer)
    tokens.require(model.config.context, "valid", advice=EVAL_ADVICE)
    return corpus, tokens


def _show_ce(
    title: str, sizes: dict[str, int], result: EvaluatedRun, bytes_per_token: float, json_: bool
) -> None:
    from rich.markup import escape

    from blocktrain.runs.folder import valid_size
    from blocktrain.terminal import ce_table, console, rows_table

    ce, by_source = result.ce, result.bits_by_source()
    if json_:
        models = {model: _units(nats, bytes_per_token) for model, nats in ce.items()}
        data = title.rpartition(" on ")[2]
        more = {"sources": by_source} if by_source else {}
        print(json.dumps({"data": data, **sizes, "models": models, **more}))
        return
    console.print(ce_table(escape(f"{title}, {valid_size(**sizes)}"), ce, bytes_per_token))
    if by_source:
        rows = [
            {"model": model, **{name: part[model] for name, part in by_source.items()}}
            for model in ce
        ]
        console.print(rows_table("bits per byte by source", rows))
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
        print(json.dumps({**sizes, "models": models}))
        return
    size = ", ".join(f"{count:,} {name}" for name, count in sizes.items())
    rows = [
        {"model": name, **{_short(unit): value for unit, value in units.items()}}
        for name, units in models.items()
    ]
    console.print(rows_table(escape(f"{title}, {size}"), rows))


def _short(unit: str) -> str:
    """nats/byte, word ppl: so that a table fits a terminal."""
    return unit.replace("_per_", "/").replace("_perplexity", " ppl")


def _units(nats: float, bytes_per_token: float) -> dict[str, float | None]:
    """Nats per byte in all units; JSON has no infinity, so null stands for it."""
    from blocktrain.terminal import perplexity

    units = {
        "nats_per_byte": nats,
        "bits_per_byte": nats / math.log(2),
        "perplexity": perplexity(nats),
        "nats_per_token": nats * bytes_per_token,
        "token_perplexity": perplexity(nats * bytes_per_token),
    }
    return {name: value if math.isfinite(value) else None for name, value in units.items()}


def export(
    run: Path,
    *,
    format_: Literal["hf"] = "hf",
    out: Path | None = None,
    json_: Json = False,
) -> None:
    """Write a trained model as a folder that Hugging Face `transformers` loads.

    The folder holds weights, tokenizer, model card and the code of the model. Whoever loads it
    needs `transformers`, and not BlockTrain: the logits are the same.

    Parameters
    ----------
    run
        The run folder.
    format_
        hf: for Hugging Face transformers.
    out
        The folder to make; by default hf in the run folder.
    """
    from blocktrain.runs.huggingface.export import export_run
    from blocktrain.terminal import bar, console

    folder = out or run / "hf"
    with bar("exporting") as progress:
        export_run(require_model(run), folder, progress=progress)
    if json_:
        print(json.dumps({"run": str(run), "format": format_, "out": str(folder)}))
        return
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)"
    console.print(
        f"{folder}\nload it    {load}\nupload it  blocktrain push {run} NAME",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def push(run: Path, name: str, *, private: Yes = False, json_: Json = False) -> None:
    """Upload a trained model to the Hugging Face hub.

    It is exported as by `blocktrain export` and uploaded as one commit. The token comes from
    `hf auth login` or the environment's HF_TOKEN. A push that broke off can be repeated: files
    that the hub has already are not sent again.

    Parameters
    ----------
    run
        The run folder, or a folder that `export` made, whose README.md you may have edited.
    name
        MODEL or OWNER/MODEL; it is made if the hub does not have it.
    private
        Let only its owner see it. A model that is public already is not touched.
    """
    from blocktrain.runs.huggingface.push import push_run

    url = push_run(require_model(run), name, private=private)
    print(json.dumps({"run": str(run), "url": url}) if json_ else url)
