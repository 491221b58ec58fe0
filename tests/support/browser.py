"""A real browser for the tests of the pages, and the log of an invented run."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP rebound.example 127.0.0.1",
)
MILLISECONDS = 60_000  # that anything may take to show up

Event = dict[str, Any]


@contextmanager
def browsing() -> Iterator[Browser]:
    """The machine's browser, headless."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """An open page, with its errors and its requests."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(MILLISECONDS)
        self.page.on(
            "console",
            lambda said: (
                self.complaints.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "request",
            lambda asked: None if self._ours(asked.url) else self.elsewhere.append(asked.url),
        )

    def _ours(self, url: str) -> bool:
        return url.startswith((self.origin, "data:", "blob:"))

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def waits_for(self, selector: str, text: str) -> None:
        self.page.locator(selector).filter(has_text=text).first.wait_for()

    def counts(self, selector: str, number: int) -> None:
        self.until(f"document.querySelectorAll({json.dumps(selector)}).length === {number}")

    def until(self, script: str) -> None:
        """Poll a script. The page's security policy forbids playwright's own way to wait."""
        deadline = time.monotonic() + MILLISECONDS / 1000
        while not self.page.evaluate(script):
            assert time.monotonic() < deadline, script
            self.page.wait_for_timeout(30)

    def resize(self, width: int, height: int) -> None:
        self.page.set_viewport_size({"width": width, "height": height})

    def drop(self, name: str, content: str) -> None:
        """Choose a file for replay."""
        self.page.set_input_files(
            "#log-file", {"name": name, "mimeType": "application/jsonl", "buffer": content.encode()}
        )

    def work(self, script: str) -> tuple[Any, float]:
        """A script's value, and the processor seconds that the page spent on it."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        before = _task_seconds(session)
        found = self.page.evaluate(script)
        return found, _task_seconds(session) - before

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(
            self.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )


def _task_seconds(session: CDPSession) -> float:
    found = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in found if metric["name"] == "TaskDuration"))


@contextmanager
def visiting(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """The page at an address. It must not have asked any other server."""
    with browser.new_context(
        viewport=options.pop("viewport", {"width": 1440, "height": 900}), **options
    ) as context:
        origin = "/".join(url.split("/")[:3])
        visit = Visit(context.new_page(), origin)
        visit.page.goto(url)
        yield visit
        assert visit.elsewhere == []


def picture(visit: Visit, path: Path, *, whole: bool = False) -> None:
    """A screenshot as a small PNG."""
    from PIL import Image

    visit.page.screenshot(path=path, full_page=whole)
    with Image.open(path) as image:
        image.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)


class Story:
    """The log of an invented run: workers join, get lost and are refused. Deterministic."""

    def __init__(self, workers: int, versions: int, blocks: int, began: float) -> None:
        self.versions, self.blocks, self.now = versions, blocks, began
        self.ids = [f"{0xA0 + n:02x}" * 16 if n < 90 else f"{n:032x}" for n in range(workers)]
        self.draw = random.Random(7)
        self.events: list[Event] = []
        self.bytes_in = self.bytes_out = 0
        self.run = {
            "run": "5e" * 16,
            "fingerprint": "fa" * 32,
            "corpus": "wikitext-2",
            "blocks": blocks,
            "fusion": blocks,
        }
        self.run |= {
            "steps": 40 * versions,
            "compose": "fuse",
            "compression": "int4",
            "task_seconds": 20.0,
            "protocol": 1,
        }

    def put(self, kind: str, **fields: Any) -> None:
        self.events.append(
            {"seq": len(self.events) + 1, "time": round(self.now, 3), "kind": kind, **fields}
        )

    def worker(self, n: int, state: str, reason: str = "") -> None:
        """A worker joins or leaves."""
        known = {
            "worker": self.ids[n],
            "name": f"machine-{n + 1}",
            "device": "cpu" if n % 3 else "cuda",
        }
        self.put("worker", **known, state=state, reason=reason)

    def loss(self, version: int) -> float:
        return 1.3 + 4.2 * math.exp(-version * 7 / self.versions)

    def round(self, block: int, version: int) -> None:
        """Tasks, updates, and the version that they become."""
        team = [
            worker for n, worker in enumerate(self.ids) if n % self.blocks == block - 1
        ] or self.ids[:1]
        loss = self.loss(version) + 0.02 * block + 0.02 * self.draw.random()
        leased = {}
        for worker in team:
            self.now += 0.4 * self.draw.random()
            leased[worker] = {
                "worker": worker,
                "block": block,
                "task": len(self.events) + 1,
                "base": version - 1,
                "steps": 40,
            }
            self.put("task", **leased[worker], deadline=self.now + 60, target=len(team))
        for n, worker in enumerate(team):
            self.now += 2 + 3 * self.draw.random()
            self.bytes_in, self.bytes_out = self.bytes_in + 180_000, self.bytes_out + 1_400_000
            told: Event = {
                "version": version - 1,
                "staleness": int(n == 2),
                "weight": 1.0,
                "tokens": 40 * 4096,
                "bytes": 180_000,
            }
            told |= {
                "loss_before": loss + 0.1,
                "loss_after": loss,
                "seconds": 4.0 + n,
                "sentence": "on time",
            }
            self.put("update", **leased[worker], **told)
        told = {
            "block": block,
            "version": version,
            "steps": 40 * version,
            "tokens": 40 * 4096 * version * len(team),
            "loss": loss,
        }
        told |= {
            "updates": len(team),
            "clipped": 0,
            "dropped": {},
            "reason": f"round {version - 1} of block {block} closes",
        }
        self.put(
            "version",
            **told,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            weights="00" * 32,
            length=1_400_000,
        )

    def score(self, version: int) -> None:
        """All blocks at one version are scored."""
        base = self.loss(version)
        scores = {f"block-{n}": base + 0.03 * n for n in range(1, self.blocks)} | {
            "pool": base,
            "fused": base - 0.02,
        }
        told = {
            "scores": scores,
            "versions": {str(n): version for n in range(1, self.blocks + 1)},
            "valid_bytes": 65536,
            "seconds": 1.5,
        }
        self.put("score", **told, bytes_in=self.bytes_in, bytes_out=self.bytes_out)

    def trouble(self, version: int) -> None:
        """What goes wrong: after a third and after half of the run."""
        last = len(self.ids) - 1
        if version == self.versions // 3:
            self.worker(last, "lost", "nothing heard for 30 s")
            reason = (
                f"round {version} of block 2 is extended once by 60.0 s: "
                "0 of at least 1 replicas by the deadline"
            )
            self.put(
                "round",
                block=2,
                version=version,
                outcome="extended",
                deadline=self.now + 60,
                reason=reason,
            )
        if version == self.versions // 2:
            sentence = (
                "the block has moved on too far since this task's base version; "
                "ask for the next task"
            )
            self.put(
                "refused",
                code="too_stale",
                sentence=sentence,
                worker=self.ids[last],
                block=2,
                count=3,
            )
            sentence = (
                "the signature does not fit the message and the key; sign with the key that joined"
            )
            self.put(
                "refused", code="bad_signature", sentence=sentence, worker="", block=0, count=1
            )
            self.worker(last, "back")
            self.put("run", **self.run, restart=True)


def a_log(
    workers: int = 5,
    versions: int = 30,
    *,
    blocks: int = 4,
    finished: bool = False,
    began: float = 1.78e9,
) -> list[Event]:
    """The events of a plausible run with a fusion block."""
    story = Story(workers, versions, blocks, began)
    story.put("run", **story.run)
    for n in range(workers):
        story.now += story.draw.random()
        story.worker(n, "joined")
    for version in range(1, versions + 1):
        for block in range(1, blocks + 1):
            story.round(block, version)
        story.score(version)
        story.trouble(version)
    if finished:
        story.put("finish", reason="the run is finished: every block has spent its budget")
    return story.events


def as_lines(events: list[Event]) -> str:
    """The content of an events.jsonl."""
    return "".join(json.dumps(event) + "\n" for event in events)
