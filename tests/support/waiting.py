"""Poll for a condition, for as long as a busy machine may need, and fail with its name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0  # seconds


def until(
    condition: Callable[[], Any], what: str = "what was waited for", patience: float = PATIENCE
) -> Any:
    """The first true value of the condition."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen")


async def until_async(
    condition: Callable[[], Any], what: str = "what was waited for", patience: float = PATIENCE
) -> Any:
    """`until` for a test in an event loop."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if found := condition():
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not happen")
