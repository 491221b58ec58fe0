"""The profile hook of `make walk`: what is entered is logged, what an import runs is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.waiting import PATIENCE
from system.walk import HOOK, Call, files_of

SCRIPT = """
import threading
from toy import first, second
first.enter()
thread = threading.Thread(target=second.enter)
thread.start()
thread.join()
print('{"kind": "mark"}')
"""


def test_functions_are_logged_in_order_and_imports_are_not(tmp_path: Path) -> None:
    package, log = tmp_path / "toy", tmp_path / "log"
    package.mkdir()
    for name in ("first", "second"):
        text = "def enter():\n    return 1\n\nclass Toy:\n    value = enter()\n"
        (package / f"{name}.py").write_text(text)
    subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HOOK), str(tmp_path)]),
            "WALK_PACKAGE": str(package),
            "WALK_LOG": str(log),
        },
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    lines = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
    assert lines == ["first.py enter", "second.py enter", 'mark {"kind": "mark"}']


def test_a_file_is_listed_where_it_is_first_entered() -> None:
    calls = [Call(n, file, "f", "worker") for n, file in enumerate(["b.py", "a.py", "b.py"])]
    assert files_of(calls) == ["b.py", "a.py"]
