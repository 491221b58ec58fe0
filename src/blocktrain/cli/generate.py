"""The command `generate`: text after one prompt or many."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

from cyclopts import Parameter

from blocktrain.cli.environment import require_model
from blocktrain.cli.flags import DeviceName, Json, Threads, Yes, at_least
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.learning.compose import Model
    from blocktrain.learning.tokenizer import Tokenizer

MAX_PROMPT = 1 << 20  # bytes of a line with a prompt


@dataclass(frozen=True)
class TextFlags:
    """How `generate` writes."""

    mode: Annotated[
        Literal["autoregressive", "exact", "sweep"],
        Parameter(
            help="autoregressive: one traversal of the blocks per token. exact: one block drafts "
            "some tokens, and one traversal checks them all; the text is the same. sweep: a draft "
            "of the whole text; each traversal keeps what is right, corrects the first wrong "
            "token, and drafts the rest again."
        ),
    ] = "autoregressive"
    sweeps: Annotated[
        int,
        at_least(1),
        Parameter(
            help="Traversals per window of mode sweep; more come closer to the "
            "autoregressive answer."
        ),
    ] = 1
    draft: Annotated[
        Literal["first-block", "none"],
        Parameter(
            help="What mode sweep starts from: the first block's own text, or pure noise "
            "(models trained with a tail)."
        ),
    ] = "first-block"
    max_tokens: Annotated[int, at_least(1), Parameter(help="Tokens to write.")] = 256
    temperature: Annotated[
        float,
        at_least(0),
        Parameter(help="0 takes the likeliest token; 1 samples from the model as it is."),
    ] = 0.8
    top_p: Annotated[
        float,
        at_least(0, 1),
        Parameter(help="Sample from the likeliest tokens that together have this probability."),
    ] = 1.0
    seed: Annotated[int, at_least(0, 2**63 - 1), Parameter(help="Seed of the sampling.")] = 0

    def check(self) -> None:
        if self.mode != "sweep" and (self.draft != "first-block" or self.sweeps != 1):
            raise ConfigError(
                "--sweeps and --draft are for --mode sweep: "
                "other modes correct a text until it is that of one traversal per token"
            )
        if not self.top_p:
            raise ConfigError("--top-p must be more than 0, and at most 1")


def generate(
    run: Path,
    *,
    prompt: Annotated[
        str | None, Parameter(show_default=lambda _: "a line break", allow_leading_hyphen=True)
    ] = None,
    prompts: Annotated[str, Parameter(show_default=False, allow_leading_hyphen=True)] = "",
    flags: Annotated[TextFlags | None, Parameter(name="*")] = None,
    device: DeviceName = "cpu",
    threads: Threads = 1,
    raw: Yes = False,
    json_: Json = False,
) -> None:
    """Write text after a prompt, as it is made. The same seed gives the same text.

    `blocktrain serve` answers with the same text, on one host or on many.

    Parameters
    ----------
    run
        The run folder.
    prompt
        Text to continue.
    prompts
        A file with many prompts, or - for stdin: one a line, or one JSON object a line, as
        {"prompt": "..."}. Each is continued as if it were alone. With --json there is one line
        for each.
    raw
        Write the bytes as they are, also to a terminal. By default a terminal gets control
        characters and bytes that are not UTF-8 in escaped form; files and pipes get the bytes.
    """
    flags = flags or TextFlags()
    flags.check()
    if prompts and prompt is not None:
        raise ConfigError("give --prompt for one text, or --prompts for many, not both")
    texts = _read_prompts(prompts) if prompts else iter([os.fsencode(prompt or "\n")])
    first = next(texts, None)  # before the model is loaded: the file may be no good
    if first is None:
        raise ConfigError(f"{prompts} has no prompts: every line is empty")

    from blocktrain.learning.threads import limited_threads
    from blocktrain.learning.tokenizer import tokenizer_of
    from blocktrain.learning.train import pick_device
    from blocktrain.runs.folder import load_model

    model = load_model(require_model(run), pick_device(device))
    tokenizer = tokenizer_of(model.config)
    show = _show_json if json_ else _show_text
    raw = raw or not sys.stdout.isatty()
    # On more threads than one, a token's bits depend on how many others are computed with it.
    with limited_threads(threads):
        show(model, tokenizer, first, flags, raw)
        for text in texts:
            if not json_:
                print(flush=True)
            show(model, tokenizer, text, flags, raw)


def _show_text(
    model: Model, tokenizer: Tokenizer, prompt: bytes, flags: TextFlags, raw: bool
) -> None:
    """The prompt and the text, as it is made."""
    from blocktrain.terminal import TextWriter

    writer = TextWriter(raw=raw)
    writer.write(prompt)
    for token in _text(model, tokenizer.encode(prompt).tolist(), flags):
        writer.write(tokenizer.token(token))
    writer.close()


def _show_json(
    model: Model, tokenizer: Tokenizer, prompt: bytes, flags: TextFlags, _: bool
) -> None:
    """The prompt and the text as one line of JSON, with the names of the API."""
    ids = tokenizer.encode(prompt).tolist()
    tokens = list(_text(model, ids, flags))
    answer = {
        "prompt": prompt.decode("utf-8", "replace"),
        "text": tokenizer.decode(tokens).decode("utf-8", "replace"),
        "finish_reason": "length" if len(tokens) == flags.max_tokens else "stop",
        "prompt_tokens": len(ids),
        "completion_tokens": len(tokens),
        "seed": flags.seed,
    }
    print(json.dumps(answer), flush=True)


def _text(model: Model, prompt: list[int], flags: TextFlags) -> Iterator[int]:
    """The tokens after the prompt, one by one."""
    from blocktrain.learning.generate import Sampler, write

    return write(
        model,
        prompt,
        flags.max_tokens,
        Sampler(flags.seed, flags.temperature, flags.top_p),
        mode=flags.mode,
        sweeps=flags.sweeps,
        draft=flags.draft,
    )


def _read_prompts(name: str) -> Iterator[bytes]:
    """The prompts of a file as they are read. The first one says whether it has JSON lines."""
    is_json: bool | None = None
    with nullcontext(sys.stdin.buffer) if name == "-" else _open(Path(name)) as file:
        lines = iter(lambda: file.readline(MAX_PROMPT + 1), b"")
        for number, line in enumerate(lines, start=1):
            place = f"{'stdin' if name == '-' else name}, line {number}"
            if len(line) > MAX_PROMPT:
                raise ConfigError(f"{place}: a prompt has at most {MAX_PROMPT} bytes")
            plain = line.rstrip(b"\r\n")
            if not plain.strip():
                continue
            text = _prompt_of(plain)
            is_json = text is not None if is_json is None else is_json
            if is_json and text is None:
                raise ConfigError(f'{place} is not a JSON object with a text "prompt"')
            yield text if is_json and text is not None else plain


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read --prompts {path}: {error.strerror or error}") from None


def _prompt_of(line: bytes) -> bytes | None:
    """The prompt of a JSON line; None if it is none."""
    try:
        fields = json.loads(line)
        return (fields["prompt"].encode() or b"\n") if isinstance(fields, dict) else None
    except (ValueError, RecursionError, KeyError, AttributeError):
        return None
