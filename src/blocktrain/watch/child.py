"""A child process that answers JSON lines. One that has died is replaced with the next question."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any


class Child:
    """The answers of `python -m MODULE`. It has torch, which its parent does not load."""

    def __init__(self, module: str) -> None:
        self._module, self._stopped = module, False
        self._process: subprocess.Popen[str] | None = None
        # Guards the process: one thread starts it, another one ends it.
        self._mutex = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Its process id, if it runs."""
        return self._process.pid if self._process else None

    def ask(self, question: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Its answer, or {"error": ...}. If that takes longer than `seconds`, it is ended."""
        with self._mutex:
            if self._stopped:
                return {"error": "stopped"}
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    process_group=0,  # Ctrl-C is not for it
                )
            process = self._process
        limit = threading.Timer(seconds, process.kill) if seconds else None
        try:
            if process.stdin is None or process.stdout is None:
                raise OSError("no pipes")
            if limit is not None:
                limit.start()
            print(json.dumps(question), file=process.stdin, flush=True)
            if answer := process.stdout.readline():
                return dict(json.loads(answer))
        except (OSError, ValueError) as error:
            process.kill()
            return {"error": str(error), "exit": process.wait()}
        finally:
            if limit is not None:
                limit.cancel()
        return {"error": f"its process ended with exit code {process.wait()}"}

    def kill(self) -> None:
        """No more answers."""
        with self._mutex:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End it, and wait for its end."""
        self.kill()
        if self._process is not None:
            with suppress(OSError), self._process:  # closes its pipes
                pass
