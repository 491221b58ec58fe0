"""The same with atheris, which sees what lines an input reaches and keeps those that reach more.

It takes over its process and never gives it back, so it gets one of its own. What it finds comes
back in lines of JSON; an input that kills the process is left behind as a file.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HANG_SECONDS = 60  # after which an input counts as one that never ends
_CHILD = "from blocktrain.fuzzing.guided import run; run({names!r}, {seconds}, {seed}, {folder!r})"
OnLine = Callable[[dict[str, object]], None]
OnKilled = Callable[[str, bytes], None]


def is_available() -> bool:
    return importlib.util.find_spec("atheris") is not None


def guide(
    names: Sequence[str], seconds: float, seed: int, on_line: OnLine, on_killed: OnKilled
) -> None:
    """Run atheris. `on_killed` gets what the process did not survive."""
    with tempfile.TemporaryDirectory(prefix="blocktrain-atheris-") as folder:
        code = _CHILD.format(names=list(names), seconds=seconds, seed=seed, folder=folder)
        command = [sys.executable, "-c", code]
        with (
            (Path(folder) / "log").open("wb") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
        ):
            try:
                for line in process.stdout or ():
                    if line.startswith(b'{"'):
                        on_line(json.loads(line))
            finally:
                process.kill()
        for path in sorted(Path(folder).glob("killed-*")):
            content = path.read_bytes()
            on_killed(names[content[0] % len(names)] if content else names[0], content[1:])


def run(names: Sequence[str], seconds: float, seed: int, folder: str) -> None:
    """In the process of its own. The first byte of an input says for which target it is."""
    import atheris

    with atheris.instrument_imports(include=["blocktrain"]):
        from blocktrain.fuzzing.campaign import TARGETS
        from blocktrain.fuzzing.mutate import LARGEST, mutate
        from blocktrain.fuzzing.target import try_input
    targets = [TARGETS[name] for name in names]
    corpus = Path(folder) / "corpus"
    corpus.mkdir()
    for number, target in enumerate(targets):
        for place, content in enumerate(target.seeds()):
            (corpus / f"{number}-{place}").write_bytes(bytes([number]) + content)
    tried: dict[str, int] = {}
    told = time.monotonic()

    def feed(content: bytes) -> None:
        nonlocal told
        if not content:
            return
        target = targets[content[0] % len(targets)]
        tried[target.name] = tried.get(target.name, 0) + 1
        if problem := try_input(target, content[1:]).problem:
            found = {"target": target.name, "problem": problem, "content": content[1:].hex()}
            print(json.dumps(found), flush=True)
        if time.monotonic() - told > 0.2:
            told = time.monotonic()
            print(json.dumps({"tried": tried}), flush=True)

    def change(content: bytes, largest: int, number: int) -> bytes:
        draw = random.Random(number)
        if not content or draw.random() < 0.05:
            return bytes([draw.randrange(len(targets))]) + content[1:]
        if draw.random() < 0.5:
            return content[:1] + mutate(content[1:], draw)[: largest - 1]
        return content[:1] + bytes(atheris.Mutate(content[1:], largest - 1))

    options = {
        "max_total_time": max(1, round(seconds)),
        "max_len": LARGEST,
        "seed": seed % 2**31 or 1,
        "timeout": HANG_SECONDS,
        "rss_limit_mb": 0,  # each input has its own limit
        "artifact_prefix": f"{folder}/killed-",
    }
    flags = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup(["fuzz", *flags, str(corpus)], feed, custom_mutator=change)
    atheris.Fuzz()
