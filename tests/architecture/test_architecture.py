"""The rooms of the package: who may import whom, and what source code here does not do.

`pytest tests/architecture -s` prints modules per package and lines per file. Nothing here is a
list of file names: a new module is judged by the package that it stands in.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import blocktrain.config

ROOT = Path(blocktrain.config.__file__).parent
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
}
# Imports go to a smaller number, or stay inside the package.
FLOORS = {
    "ground": 0,
    "protocol": 1,
    "learning": 1,
    "store": 2,
    "web": 2,
    "coordinator": 3,
    "worker": 3,
    "audit": 3,
    "serving": 3,
    "watch": 4,
    "runs": 5,
    "bench": 6,
    "simulation": 6,
    "fuzzing": 7,
    "cli": 8,
    "api": 9,
    "__init__": 10,  # the names that the package exports
    "__main__": 10,
}
WITHOUT_TORCH = ("coordinator", "store", "protocol", "web", "watch")
MOST_MODULES = 14  # of a package: about a dozen
MOST_LINES = 600  # of a file that is one thing
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


def dotted(name: str) -> str:
    """learning/model.py -> blocktrain.learning.model"""
    return "blocktrain." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {"blocktrain" if name == "__init__.py" else dotted(name): name for name in TREES}


def package(name: str) -> str:
    """learning/model.py -> learning; config.py -> ground."""
    first, _, rest = name.partition("/")
    return first if rest or first in ("__main__.py", "__init__.py") else "ground"


def room(name: str) -> str:
    return package(name).removesuffix(".py")


def folder(name: str) -> str:
    return name.rpartition("/")[0] or "ground"


def leaves(name: str) -> bool:
    """Whether a file is copied out of the package, to be used without it."""
    return folder(name).endswith("/exported")


def imported(node: ast.AST) -> Iterator[str]:
    """Full names of what one statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(tree: ast.AST) -> Iterator[str]:
    """Everything that is imported, wherever in the file, except for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield from imported(node)
        yield from imports(node)


def module_of(full: str) -> str | None:
    """The file behind an imported name: blocktrain.config.Config -> config.py."""
    while full and full not in MODULES:
        full = full.rpartition(".")[0]
    return MODULES.get(full)


@cache
def neighbours(name: str) -> frozenset[str]:
    """Files of the package that this one imports."""
    found = {module_of(full) for full in imports(TREES[name]) if full.startswith("blocktrain")}
    return frozenset(found - {None, name})  # type: ignore[arg-type]


def runs_alone(name: str) -> bool:
    """Whether a module is the beginning of a process."""
    return name == "__main__.py" or any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        for node in TREES[name].body
    )


def torch_path(name: str, seen: set[str]) -> list[str] | None:
    """How torch is reached from a file, if it is."""
    if any(full.split(".")[0] == "torch" for full in imports(TREES[name])):
        return [name, "torch"]
    for other in sorted(neighbours(name) - seen):
        seen.add(other)
        if found := torch_path(other, seen):
            return [name, *found]
    return None


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def test_the_whole_package_is_here() -> None:
    assert {"config.py", "learning/model.py", "cli/__init__.py"} <= set(TREES)
    assert {room(name) for name in TREES} <= set(FLOORS)


@pytest.mark.parametrize("name", TREES)
def test_imports_go_downward_only(name: str) -> None:
    for node in ast.walk(TREES[name]):
        relative = isinstance(node, ast.ImportFrom) and bool(node.level)
        assert not relative or leaves(name), f"{name}: a relative import"
        for full in imported(node):
            if full.split(".")[0] == "blocktrain":
                other = module_of(full)
                assert other and other != "__init__.py", f"{name} imports the package root"
                mine, theirs = room(name), room(other)
                assert mine == theirs or FLOORS[theirs] < FLOORS[mine], f"{name} imports {other}"


@pytest.mark.parametrize("name", [name for name in TREES if leaves(name)])
def test_what_leaves_the_package_does_not_need_it(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if not (isinstance(node, ast.ImportFrom) and node.level == 1):
            for full in imported(node):
                assert full.split(".")[0] in ("typing", "torch", "transformers"), full


@pytest.mark.parametrize("name", [name for name in TREES if room(name) in WITHOUT_TORCH])
def test_the_control_plane_does_not_know_torch(name: str) -> None:
    if not runs_alone(name):
        path = torch_path(name, {name})
        assert path is None, " -> ".join(path or ())


def type_names(tree: ast.Module) -> Iterator[str]:
    """Classes, and aliases at the top of a file: names of types are the ones in CamelCase."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in [*targets, *([node.target] if isinstance(node, ast.AnnAssign) else [])]:
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][a-z]\w*", target.id):
                yield target.id


def test_no_type_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for name, tree in TREES.items():
        for type_name in type_names(tree):
            places[type_name].append(name)
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_no_module_is_there_for_tests_alone() -> None:
    used = {other for name in TREES for other in neighbours(name)}
    # The package loads what it exports when it is used, so only the type checker sees imports.
    exports = (full for node in ast.walk(TREES["__init__.py"]) for full in imported(node))
    used |= {other for full in exports if (other := module_of(full))}
    left = {
        name
        for name in TREES
        if not (name.endswith("__init__.py") or runs_alone(name) or leaves(name))
    }
    assert left <= used, f"imported by tests alone, or by nobody: {sorted(left - used)}"


def test_packages_and_files_stay_small() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for name in TREES:
        if not name.endswith("__init__.py"):
            modules[folder(name)].append(name)
    for where, names in sorted(modules.items()):
        print(f"{where}: {len(names)} modules")
        for name in names:
            print(f"  {name}: {len((ROOT / name).read_text().splitlines())} lines")
    assert not {where: len(names) for where, names in modules.items() if len(names) > MOST_MODULES}
    long = {name: len((ROOT / name).read_text().splitlines()) for name in TREES}
    assert not {name: lines for name, lines in long.items() if lines > MOST_LINES}


@pytest.mark.parametrize("name", TREES)
def test_functions_stay_readable(name: str) -> None:
    for function in functions(TREES[name]):
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= MOST_FUNCTION_LINES, f"{name}: {function.name} has {lines} lines"
        a = function.args
        named = [*a.posonlyargs, *a.args, *a.kwonlyargs]
        count = len([p for p in named if p.arg not in ("self", "cls")])
        assert count <= MOST_PARAMETERS, f"{name}: {function.name} has {count} parameters"


@pytest.mark.parametrize("name", TREES)
def test_what_source_does_not_do(name: str) -> None:
    tree = TREES[name]
    barred = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    assert not [full for full in imports(tree) if full.split(".")[0] in barred]
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), f"{name}:{node.lineno} asserts: raise an error"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = f"{node.value.id}.{node.attr}"
            loads = ("torch.load", "torch.save", "np.load", "numpy.load")
            assert used not in loads, f"{name}:{node.lineno} uses {used}"
            if room(name) != "cli":  # the only reader of arguments and environment
                read = ("os.environ", "os.getenv", "os.putenv", "sys.argv")
                assert used not in read, f"{name}:{node.lineno} reads {used}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "input"), f"{name}:{node.lineno}"


@pytest.mark.parametrize(
    "name",
    [n for n in TREES if room(n) in ("coordinator", "worker", "store", "protocol")],
)
def test_time_comes_from_a_clock(name: str) -> None:
    for full in imports(TREES[name]):
        assert full.split(".")[0] != "time", f"{name} imports time; use blocktrain.clock"


@pytest.mark.parametrize("name", TREES)
def test_what_depends_on_a_composition_is_in_its_table(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Compare):
            text = ast.unparse(node.left)
            assert not text.endswith("compose"), f"{name}:{node.lineno} compares compose"


@pytest.mark.parametrize("name", TREES)
def test_everything_is_typed(name: str) -> None:
    for function in functions(TREES[name]):
        a = function.args
        stars = [p for p in (a.vararg, a.kwarg) if p]
        named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *stars]
        assert function.returns is not None, f"{name}: {function.name}"
        left = [p.arg for p in named if not p.annotation and p.arg not in ("self", "cls")]
        assert not left, f"{name}: {function.name} {left}"
