"""The rooms and who may enter which, sizes that keep them readable, and what source code here does not do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import blocktrain.config

ROOT = Path(blocktrain.config.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}
GROUND = {"errors", "config", "events", "files", "page_files", "processes", "web"}
FLOORS = {
    "protocol": 1,
    "learning": 1,
    "terminal": 1,
    "coordination": 2,
    "serving": 2,
    "report": 2,
    "places": 2,
    "bench": 3,
    "flags": 3,
    "network": 4,
    "serving_commands": 4,
    "bench_commands": 4,
    "cli": 5,
    "__main__": 6,
}
READERS = ("cli.py", "places.py")  # of arguments and environment
Function = ast.FunctionDef | ast.AsyncFunctionDef


def room(module: str) -> str:
    """learning.model -> learning; config -> ground."""
    first = module.split(".", maxsplit=1)[0]
    return "ground" if first in GROUND else first


def floor(name: str) -> int:
    return 0 if name == "ground" else FLOORS[name]


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def public(tree: ast.Module) -> Iterator[Function]:
    """Functions and methods that others may call; `forward` is torch's and documented there."""
    for node in tree.body:
        members = (
            node.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            else [node]
        )
        yield from (
            m
            for m in members
            if isinstance(m, Function) and not m.name.startswith("_") and m.name != "forward"
        )


def test_the_whole_package_is_here() -> None:
    assert {"cli.py", "config.py", "learning/model.py"} <= set(TREES)


@pytest.mark.parametrize("name", TREES)
def test_imports_go_downward_only(name: str) -> None:
    mine = room(name.removesuffix(".py").replace("/", "."))
    for full in imports(TREES[name]):
        if full.split(".")[0] != "blocktrain":
            continue
        module = full.removeprefix("blocktrain.")
        theirs = room(module)
        assert theirs == mine or floor(theirs) < floor(mine), (
            f"{name} ({mine}) may not import {full} ({theirs})"
        )


@pytest.mark.parametrize("name", TREES)
def test_nothing_imports_the_package_root(name: str) -> None:
    for node in ast.walk(TREES[name]):
        assert not (isinstance(node, ast.ImportFrom) and node.module == "blocktrain"), (
            f"{name}:{node.lineno}"
        )
        assert not (
            isinstance(node, ast.Import) and "blocktrain" in [alias.name for alias in node.names]
        ), f"{name}:{node.lineno}"


def test_the_control_plane_does_not_know_torch() -> None:
    light = {
        "coordinator",
        "live",
        "admission",
        "closing",
        "recall",
        "overview",
        "feed",
        "telling",
        "watch_api",
        "metrics",
        "scoring",
        "http_api",
        "server",
        "client",
        "store",
        "merge",
        "rounds",
    }
    for name in light:
        found = [
            full
            for full in imports(TREES[f"coordination/{name}.py"])
            if full.startswith(("torch", "blocktrain.learning"))
        ]
        assert not found, name


def test_learning_knows_nothing_of_the_wire() -> None:
    wire = (
        "blocktrain.protocol",
        "blocktrain.coordination",
        "blocktrain.serving",
        "blocktrain.bench",
        "blocktrain.cli",
        "socket",
        "http",
    )
    for name, tree in TREES.items():
        if name.startswith("learning/"):
            assert not [full for full in imports(tree) if full.startswith(wire)], name


@pytest.mark.parametrize("name", TREES)
def test_what_source_does_not_do(name: str) -> None:
    tree = TREES[name]
    barred = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    assert not [full for full in imports(tree) if full.split(".")[0] in barred]
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), (
            f"{name}:{node.lineno} asserts; raise an error with a sentence"
        )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = f"{node.value.id}.{node.attr}"
            assert used not in ("torch.load", "torch.save", "np.load", "numpy.load"), (
                f"{name}:{node.lineno} uses {used}"
            )
            if name not in READERS:
                assert used not in ("os.environ", "os.getenv", "os.putenv", "sys.argv"), (
                    f"{name}:{node.lineno} reads {used}"
                )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "input"), (
                f"{name}:{node.lineno} calls {node.func.id}"
            )
    if name not in READERS:
        assert not {"os.environ", "os.getenv", "sys.argv"} & set(imports(tree))


@pytest.mark.parametrize("name", TREES)
def test_nothing_happens_at_import_time(name: str) -> None:
    allowed = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
        ast.If,
    )
    for node in TREES[name].body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        registration = name == "cli.py"  # the table of commands
        assert text or registration or isinstance(node, allowed), f"{name}:{node.lineno}"


@pytest.mark.parametrize("name", TREES)
def test_sizes_stay_readable(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= 400
    for function in functions(TREES[name]):
        assert (function.end_lineno or 0) - function.lineno + 1 <= 60, (
            f"{name}: {function.name} is too long"
        )
        a = function.args
        count = len(
            [p for p in [*a.posonlyargs, *a.args, *a.kwonlyargs] if p.arg not in ("self", "cls")]
        )
        assert count <= 8, f"{name}: {function.name} has {count} parameters"


@pytest.mark.parametrize("name", TREES)
def test_what_is_public_is_documented_and_typed(name: str) -> None:
    assert ast.get_docstring(TREES[name]), f"{name} does not say what it is"
    for node in TREES[name].body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}: {node.name}"
    for function in public(TREES[name]):
        assert ast.get_docstring(function), f"{name}: {function.name} does not say what it does"
    for function in functions(TREES[name]):
        a = function.args
        parameters = [
            *a.posonlyargs,
            *a.args,
            *a.kwonlyargs,
            *([a.vararg] if a.vararg else []),
            *([a.kwarg] if a.kwarg else []),
        ]
        assert function.returns is not None, f"{name}: {function.name}"
        assert all(p.annotation for p in parameters if p.arg not in ("self", "cls")), (
            f"{name}: {function.name}"
        )
