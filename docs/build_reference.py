"""Pages of the site that are made from the program itself, and those that live beside docs/.

MkDocs calls `on_files` while it builds. Commands come from the command table, calls from the call
table, settings from the models that validate them: none of them can be out of date.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, is_typeddict

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from blocktrain.protocol.calls import Argument, Call

ROOT = Path(__file__).parents[1]
# Files at the root of the repository that are pages of the site too, by their name there.
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
HEX = re.compile(r"\^\(?\[0-9a-f\]\{(\d+)\}\)?\??\$")
ENUMS = {
    "Code": "a [code](../protocol.md#refusals)",
    "Then": "a [next step](../protocol.md#refusals)",
}
BYTES = "application/octet-stream"
ANSWERS = {"application/json": "JSON", "text/event-stream": "events", "text/plain": "text"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=root_page(ROOT / name)))
    pages = {"commands": commands, "http": calls, "settings": settings, "python": python_api}
    for page, make in pages.items():
        files.append(File.generated(config, f"reference/{page}.md", content=make()))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, page, content=notebook(path)))
    return files


def notebook(path: Path) -> str:
    """The cells of a notebook as a page, with a link to the notebook itself."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    parts = [
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell, text in zip(cells, texts, strict=True)
    ]
    link = f"[Download this notebook]({path.name})"
    return "\n\n".join([parts[0], link, *parts[1:]]) + "\n"


def python_api() -> str:
    """What the package exports: signatures and docstrings."""
    import blocktrain

    parts = [
        "# Python API\n\nAll names of `import blocktrain as bt`. "
        "[Use it from Python](../guides/python.md) shows them at work."
    ]
    for name in blocktrain.__all__:
        exported = getattr(blocktrain, name)
        parts.append(_entry(f"## {name}", name, exported))
        if inspect.isclass(exported):
            parts += [
                _entry(f"### {name}.{key}", key, member)
                for key, member in vars(exported).items()
                if not key.startswith("_") and callable(_function(member))
            ]
    return "\n\n".join([*parts, *_options()]) + "\n"


def _options() -> Iterator[str]:
    """The sets of options that signatures name as `Unpack[...]`."""
    from blocktrain.api import options

    yield "## Options"
    kinds = {name: kind for name, kind in vars(options).items() if is_typeddict(kind)}
    for name, kind in kinds.items():
        keys = kind.__annotations__
        # Python 3.11 does not keep the bases of a TypedDict.
        bases = [base for base in kinds if kinds[base].__annotations__.items() < keys.items()]
        inherited = {key for base in bases for key in kinds[base].__annotations__}
        own = [f"    {key}: {a.__forward_arg__}" for key, a in keys.items() if key not in inherited]
        code = "\n".join([f"class {name}({', '.join(bases[-1:]) or 'TypedDict'}):", *own])
        yield f"### {name}\n\n{inspect.getdoc(kind)}\n\n```python\n{code}\n```"


def _function(member: object) -> object:
    """What a property or a cached property computes; other members are themselves."""
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, cached_property) else member


def _entry(title: str, name: str, member: object) -> str:
    target = _function(member)
    doc = inspect.getdoc(target) or ""
    if inspect.isclass(target) and issubclass(target, Exception):
        return f"{title}\n\n{doc}"
    if target is not member:  # a property
        return f"{title}\n\n{doc}"
    return f"{title}\n\n```python\n{name}{_signature(target)}\n```\n\n{doc}"


def _signature(target: object) -> str:
    """One parameter a line."""
    signature = inspect.signature(target)  # type: ignore[arg-type]
    kept = [p for key, p in signature.parameters.items() if key != "self"]
    plain = str(signature.replace(parameters=kept))
    if len(plain) < 80:
        return plain.replace("'", "")
    lines, star = [], False
    for parameter in kept:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            lines.append("    *,")
        lines.append(f"    {parameter},")
    result = signature.return_annotation
    return "(\n" + "\n".join(lines).replace("'", "") + f"\n) -> {result}".replace("'", "")


def root_page(path: Path) -> str:
    """The file, with links as they are inside docs/."""
    text = path.read_text(encoding="utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
    for name, page in ROOT_PAGES.items():
        text = text.replace(f"]({name}", f"]({page}")
    return text


def commands() -> str:
    from blocktrain.cli.app import app

    text = app.generate_docs()
    # The lists of commands follow, a title in bold for each group.
    text = re.sub(r"## Table of Contents\n.*?(?=\n\*\*)", "", text, count=1, flags=re.DOTALL)
    text = text.replace("# blocktrain\n", "# Commands\n", 1)
    # Settings are flags of several commands: they have a page of their own.
    return re.sub(
        r"^\*\*((?:Settings|Coordination)[^*\n]*)\*\*:\n\n(?:\* .*\n)+",
        r"**\1**: see [settings](settings.md).\n",
        text + "\n",
        flags=re.MULTILINE,
    )


def settings() -> str:
    from blocktrain.config import PRESETS, TOKENIZERS, TRAITS, Config
    from blocktrain.coordinator.policy import Policy
    from blocktrain.protocol.compression import METHODS
    from blocktrain.sizes import SIZES

    # Tables of the program, to which a class can be added.
    tables: Mapping[str, Iterable[str]] = {
        "compose": TRAITS,
        "tokenizer": TOKENIZERS,
        "compression": METHODS,
    }
    sizes = ", ".join(f"`{name}`" for name in SIZES)
    presets = "\n".join(
        f"- `{name}`: " + ", ".join(f"`{key} = {toml(value)}`" for key, value in values.items())
        for name, values in PRESETS.items()
    )
    return f"""# Settings

Every setting is a flag (`layers_per_block` is `--layers-per-block`) and a key of the file that
`--config` names. Flags win over the file, the file over the preset, the preset over
the size, and the size over the defaults.
A value out of range is refused before anything starts.

## The model and its training

Of `train` and `coordinator`. The file may also hold `data` (a corpus) and `reference` (true or
false).

{table(Config, tables)}

## Coordination

Of `coordinator`. In the file they are in the table `[coordination]`.

{table(Policy, tables)}

## Sizes

`size` is one of {sizes}: it stands for the settings that it chooses. See [choose a
size](../guides/sizes.md).

## Presets

{presets}
"""


def table(model: type[BaseModel], tables: Mapping[str, Iterable[str]]) -> str:
    rows = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        names = ", ".join(f"`{choice}`" for choice in tables.get(name, ()))
        rows.append(f"| `{name}` | {default(field)} | {names or allowed(field)} | {meaning} |")
    return "\n".join(rows)


def default(field: FieldInfo) -> str:
    return "none" if field.default is None else f"`{toml(field.default)}`"


def toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def allowed(field: FieldInfo) -> str:
    """The choices of a literal, or the bounds of a number."""
    choices = [c for c in get_args(field.annotation) if isinstance(c, str)]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    return ", ".join(
        f"{sign} {bound:,}"
        for limit in field.metadata
        for name, sign in signs
        if (bound := getattr(limit, name, None)) is not None
    )


def calls() -> str:
    """All calls of a coordinator, then the messages that they carry, as fields with their types."""
    from pydantic import BaseModel

    from blocktrain.protocol import events, ledger, messages, status
    from blocktrain.protocol.calls import CALLS, WATCH_CALLS

    kinds = [
        kind
        for module in (messages, status, ledger)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, BaseModel)
        and kind.__module__ == module.__name__
        and kind.model_fields.keys() - {"signature"}
    ]
    described = "\n\n".join(message(kind) for kind in kinds)
    event_kinds = "\n\n".join(
        f"### Event {name}\n\n{fields(kind, ('field', 'type', 'meaning'))}"
        for name, kind in events.KINDS.items()
    )
    return f"""# HTTP calls

The calls of a coordinator and the fields of every message. [The protocol](../protocol.md) explains
what they mean, in which order they come, and which bytes they carry. Unknown fields and values of
another type are refused.

## Calls of workers and tools

{call_table(CALLS)}

*token*: the join token in `Authorization: Bearer TOKEN`, if the run has one. *ticket*: also the
task's ticket. *operator*: the operator's token instead.

## Calls of people and pages

{call_table(WATCH_CALLS)}

## Messages

{described}

## Events

Lines of `events.jsonl`, and what `GET /v1/events` sends: `seq`, `time`, `kind`, and these fields.
[Events](../protocol.md#events) says when each one is written.

{event_kinds}
"""


def call_table(rows: Sequence[Call[Any]]) -> str:
    lines = ["| call | needs | request | answer | what it does |", "|---|---|---|---|---|"]
    for call in rows:
        request = ["raw bytes"] if call.body == BYTES else []
        request += [link(call.request)] if call.request else []
        request += [argument(a) for a in call.arguments if a.place != "path"]
        answer = link(call.reply) if call.reply else ANSWERS.get(call.content, "raw bytes")
        lines.append(
            f"| `{call.method} {call.path}` | {call.needs} | {', '.join(request)} | {answer} "
            f"| {call.about} |"
        )
    return "\n".join(lines)


def link(kind: type[BaseModel]) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def argument(value: Argument) -> str:
    if value.place == "header":
        return f"header `{value.header}`"
    return f"`?{value.name}=`" + ("" if value.default is None else f" (default {value.default})")


def message(kind: type[BaseModel]) -> str:
    about = " ".join((kind.__doc__ or "").split())
    table = fields(kind, ("field", "type", "required", "meaning"))
    return f"### {kind.__name__}\n\n{about}\n\n{table}"


def fields(kind: type[BaseModel], columns: Sequence[str]) -> str:
    schema = kind.model_json_schema(by_alias=False)
    required = schema.get("required", [])
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, part in schema["properties"].items():
        cells = {
            "field": f"`{name}`",
            "type": json_type(part),
            "required": "yes" if name in required else "no",
            "meaning": " ".join(part.get("description", "").split()).replace("|", "\\|"),
        }
        rows.append(f"| {' | '.join(cells[column] for column in columns)} |")
    return "\n".join(rows)


def json_type(part: dict[str, Any]) -> str:
    """A JSON schema in a few words, with links to the messages inside."""
    match part:
        case {"$ref": ref}:
            name = ref.rsplit("/", 1)[1]
            return f"[{name}](#{name.lower()})" if name not in ENUMS else ENUMS[name]
        case {"anyOf": parts} | {"oneOf": parts}:
            return " or ".join(json_type(inner) for inner in parts)
        case {"const": value}:
            return f'`"{value}"`'
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "array", "items": inner}:
            return f"list of {json_type(inner)}"
        case {"type": "string", "pattern": pattern} if digits := HEX.fullmatch(pattern):
            return f"{digits[1]} hex digits"
        case {"type": kind}:
            return str(kind)
    return "any"
