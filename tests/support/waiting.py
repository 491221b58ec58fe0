"""Waiting for what must happen, however busy the machine is: looked for again and again, and given up with a word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0  # seconds


def until(
    condition: Callable[[], Any], what: str = "what was waited for", patience: float = PATIENCE
) -> Any:
    """What the condition finds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen")


async def happening(
    condition: Callable[[], Any], what: str = "what was waited for", patience: float = PATIENCE
) -> Any:
    """What the condition finds, without holding up the loop."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if found := condition():
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not happen")
