"""Commands that hand a model to the tools of Hugging Face: `export` and `push`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from blocktrain.cli.environment import require_model
from blocktrain.cli.flags import Json, Yes


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
