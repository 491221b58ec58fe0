"""Commands that hand a model to the tools of Hugging Face: `export` and `push`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from blocktrain.cli.environment import require_model
from blocktrain.cli.flags import Json


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
