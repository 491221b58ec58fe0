"""Every command that a program prints works as it is printed, pasted into a shell."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import environment
from support.waiting import until

TOKEN = "two words & a $sign"
TINY = "--blocks 2 --layers-per-block 1 --width 16 --heads 2 --context 16 --batch 4 --steps 8"


def _environment(folder: Path) -> dict[str, str]:
    """With `blocktrain` on the path."""
    program = folder / "bin" / "blocktrain"
    if not program.exists():
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m blocktrain "$@"\n')
        program.chmod(0o755)
    found = environment(folder)
    return {**found, "PATH": f"{program.parent}{os.pathsep}{found['PATH']}"}


def _shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        errors="backslashreplace",  # an untrained model writes any byte
        timeout=280,
        check=False,
    )


def _printed(log: Path, label: str) -> str:
    found = re.search(rf"^{label} +(blocktrain .*)$", log.read_text(), re.MULTILINE)
    return found[1] if found else ""


def test_the_commands_of_a_coordinator(tmp_path: Path) -> None:
    """join, watch, kick, evaluate's advice, pull, and what pull prints in turn."""
    (tmp_path / "notes.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(2000)))
    log = tmp_path / "coordinator.log"
    command = "exec blocktrain coordinator --data notes.txt --out 'my run' --listen 127.0.0.1:0 "
    command += f"--token {shlex.quote(TOKEN)} --score-bytes 0 {TINY}"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, shell=True, cwd=tmp_path, env=_environment(tmp_path), stderr=errors
        )
    try:
        until(lambda: "2 blocks" in log.read_text(), "a coordinator that is ready", 200)
        worker = _shell(_printed(log, "join with"), tmp_path)
        assert worker.returncode == 0, worker.stderr
        assert "the run is finished" in worker.stderr
        watch = _printed(log, "watch with").replace(" --watch", "")
        status = _shell(watch, tmp_path)
        assert (status.returncode, "finished" in status.stderr) == (0, True), status.stderr

        url = watch.split()[2]
        for wrong in ("", f"--token {shlex.quote(TOKEN)}"):
            kicked = _shell(f"blocktrain kick {url} nobody {wrong}", tmp_path)
            assert kicked.returncode == 2
        kick = f"blocktrain kick {url} {_first_worker(url, tmp_path)}"
        refused = _shell(f"{kick} --token {shlex.quote(TOKEN)}", tmp_path)
        advice = re.search(r"--token \"\$\(cat FOLDER/operator.token\)\"", refused.stderr)
        assert refused.returncode == 2 and advice, refused.stderr
        kicked = _shell(f"{kick} {advice[0]}".replace("FOLDER", "'my run'"), tmp_path)
        assert (kicked.returncode, kicked.stdout[:7]) == (0, "kicked "), kicked.stderr

        for command in ("evaluate", "generate", "serve", "stage"):
            told = _shell(f"blocktrain {command} 'my run'", tmp_path)
            assert told.returncode == 2
            assert "blocktrain coordinator --out 'my run'" in told.stderr
            assert "`blocktrain pull`" in told.stderr
        pulled = _shell(_printed(log, "fetch the model with:"), tmp_path)
        assert pulled.returncode == 0, pulled.stderr
        assert _printed(log, "fetch the model with:") == _printed(log, "fetch with")
        printed = re.findall(r"blocktrain (?:evaluate|generate) .*", pulled.stderr)
        assert len(printed) == 2
        for each in printed:
            done = _shell(each, tmp_path)
            assert done.returncode == 0, done.stderr
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _first_worker(url: str, folder: Path) -> str:
    """The id that the table shows."""
    told = _shell(f"blocktrain status {url} --token {shlex.quote(TOKEN)}", folder).stderr
    lines = told.splitlines()
    header = next(n for n, line in enumerate(lines) if line.startswith("worker "))
    return lines[header + 1].split()[0]


@pytest.mark.parametrize("label", ["more text"])
def test_the_commands_of_train(tmp_path: Path, label: str) -> None:
    (tmp_path / "notes.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(2000)))
    done = _shell(f"blocktrain train --data notes.txt --out 'my run' {TINY}", tmp_path)
    assert done.returncode == 0, done.stderr
    command = re.search(rf"^{label} +(blocktrain .*)$", done.stderr, re.MULTILINE)
    assert command, done.stderr
    written = _shell(f"{command[1]} --max-tokens 5", tmp_path)
    assert written.returncode == 0 and written.stdout.startswith("def "), written.stderr
