"""The Python of README and guide runs, at a tiny size and on short text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import environment

ROOT = Path(__file__).parents[2]
TINY = "blocks=2, layers_per_block=1, width=16, heads=2, context=32, batch=4, warmup=2, steps=8"


def examples(page: str) -> str:
    """The Python of a page, with little to train and to evaluate instead of what takes minutes."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    code = "\n".join(block for block in blocks if "openai" not in block)
    new = re.sub(r'("stdlib"[^)]*?)steps=\d+', rf"\1{TINY}", code)
    return re.sub(r"steps=\d{3}", "steps=6", new).replace('"stdlib"', '"code.txt"')


@pytest.mark.parametrize("page", ["README.md", "docs/guides/python.md"])
def test_examples_run(page: str, tmp_path: Path) -> None:
    (tmp_path / "my-notes.txt").write_text("a line of my notes, and another one\n" * 2000)
    (tmp_path / "code.txt").write_text(Path(subprocess.__file__).read_text())
    code = examples(page)
    assert TINY in code
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "http://127.0.0.1:" in done.stdout
