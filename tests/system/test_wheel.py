"""The wheel has all that the package needs, and needs no development tools."""

from __future__ import annotations

import ast
import email
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "blocktrain"
EXPORTED = PACKAGE / "runs" / "huggingface" / "exported"  # copied into exports, not imported here
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make dist` does, from a copy: building leaves files behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(PACKAGE, tree / "src" / "blocktrain", ignore=shutil.ignore_patterns("*.pyc"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (made,) = (tree / "dist").iterdir()
    return made


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    ours = {
        f"blocktrain/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == ours
    assert {"blocktrain/py.typed", "blocktrain/web/writer/index.html"} <= held
    assert wheel.name == f"blocktrain-{PROJECT['version']}-py3-none-any.whl"


def test_its_metadata_asks_for_no_development_tools(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    needed = {
        name_of(text) for text in metadata.get_all("Requires-Dist", []) if "extra" not in text
    }
    assert needed == names(PROJECT["dependencies"])
    assert not needed & {"pytest", "ruff", "mypy", "hypothesis", "openai", "lm-eval", "build"}


def test_it_starts_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """And the command line waits for no heavy library."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop()); import blocktrain.cli.app as app; "
        "from pathlib import Path; print(Path(app.__file__).parents[2]); "
        "print(*{'torch', 'matplotlib', 'jinja2', 'tokenizers'} & set(sys.modules)); "
        "app.app(['--version'], exit_on_error=False)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path), "", PROJECT["version"]]


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def names(requirements: list[str]) -> set[str]:
    return {name_of(text) for text in requirements}


def imports(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Packages that are imported with the module, and those that a function imports."""
    early: set[str] = set()
    late: set[str] = set()

    def walk(node: ast.AST, found: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                found.add((child.module or "").partition(".")[0])
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            walk(child, late if is_function else found)

    walk(tree, early)
    return early, late


def test_every_import_is_a_dependency_or_a_late_import_of_an_extra() -> None:
    core = {*names(PROJECT["dependencies"]), "pydantic-core"}  # pydantic pins its core
    extras = PROJECT["optional-dependencies"]
    optional = {name for extra, texts in extras.items() if extra != "dev" for name in names(texts)}
    distributions = {
        package: {re.sub(r"[-_.]+", "-", one).lower() for one in found}
        for package, found in packages_distributions().items()
    }

    def foreign(packages: set[str]) -> set[str]:
        return packages - set(sys.stdlib_module_names) - {"blocktrain"}

    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(EXPORTED):
            continue
        early, late = imports(ast.parse(path.read_text()))
        for package in foreign(early | late):
            allowed = core if package in early else core | optional
            if not distributions.get(package, {package}) & allowed:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {package}")
    assert wrong == []
