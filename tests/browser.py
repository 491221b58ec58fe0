"""A real browser on the page, and the log of a run that never was: what the tests of the page look with and look at."""

from __future__ import annotations

import json
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

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
MILLISECONDS = 60_000  # that anything may take to show up

Event = dict[str, Any]


@contextmanager
def browsing() -> Iterator[Browser]:
    """The browser of this machine, headless, as long as the block lasts."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that is being looked at, with all that it complained of and all that it asked for."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(MILLISECONDS)
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda asked: None if self._ours(asked.url) else self.elsewhere.append(asked.url))

    def _ours(self, url: str) -> bool:
        return url.startswith((self.origin, "data:", "blob:"))

    def text(self, selector: str) -> str:
        """What is written there."""
        return self.page.locator(selector).inner_text()

    def waits_for(self, selector: str, text: str) -> None:
        """Until it says so."""
        self.page.locator(selector).filter(has_text=text).first.wait_for()

    def until(self, script: str) -> None:
        """Until it is true in the page, whose own rules forbid playwright's way to wait for that."""
        deadline = time.monotonic() + MILLISECONDS / 1000
        while not self.page.evaluate(script):
            assert time.monotonic() < deadline, script
            self.page.wait_for_timeout(30)

    def drop(self, name: str, content: str) -> None:
        """Choose a file for replay."""
        self.page.set_input_files("#log-file", files=[{"name": name, "mimeType": "application/jsonl", "buffer": content.encode()}])

    def work(self, script: str) -> tuple[Any, float]:
        """What a script gives, and the seconds of processor time that the page spent until then, whatever else the machine does."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        before = _task_seconds(session)
        found = self.page.evaluate(script)
        return found, _task_seconds(session) - before

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def _task_seconds(session: CDPSession) -> float:
    found = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in found if metric["name"] == "TaskDuration"))


@contextmanager
def visiting(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """The page at an address. At the end it must have asked nobody else for anything."""
    with browser.new_context(viewport=options.pop("viewport", {"width": 1440, "height": 900}), **options) as context:
        origin = "/".join(url.split("/")[:3])
        visit = Visit(context.new_page(), origin)
        visit.page.goto(url)
        yield visit
        assert visit.elsewhere == []


def picture(visit: Visit, path: Path, *, whole: bool = False) -> None:
    """What the page looks like now, as a small PNG."""
    from PIL import Image

    visit.page.screenshot(path=path, full_page=whole)
    with Image.open(path) as image:
        image.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)


def a_log(workers: int = 5, versions: int = 30, *, blocks: int = 4, finished: bool = False, began: float = 1.78e9) -> list[Event]:
    """A plausible run with a fusion block: workers that come, go, get lost and are refused; deterministic."""
    draw, events, now = random.Random(7), list[Event](), began
    ids = [f"{0xA0 + n:02x}" * 16 if n < 90 else f"{n:032x}" for n in range(workers)]
    moved, tasks = [0, 0], dict[str, int]()

    def put(kind: str, **fields: Any) -> None:
        events.append({"seq": len(events) + 1, "time": round(now, 3), "kind": kind, **fields})

    run = {"run": "5e" * 16, "fingerprint": "fa" * 32, "corpus": "wikitext-2", "blocks": blocks, "fusion": blocks, "steps": 40 * versions}
    run |= {"compose": "fuse", "compression": "int4", "task_seconds": 20.0, "protocol": 1}
    put("run", **run)
    for n, worker in enumerate(ids):
        now += draw.random()
        put("worker", worker=worker, name=f"machine-{n + 1}", device="cuda" if n % 3 == 0 else "cpu", state="joined", reason="")
    for version in range(1, versions + 1):
        for block in range(1, blocks + 1):
            team = [worker for n, worker in enumerate(ids) if n % blocks == block - 1] or ids[:1]
            loss = 1.35 + 4.2 * 2.718 ** (-version * 7 / versions) + 0.02 * block + 0.02 * draw.random()
            for worker in team:
                now += 0.4 * draw.random()
                tasks[worker] = len(events) + 1
                task = {"worker": worker, "block": block, "task": tasks[worker], "base": version - 1, "steps": 40}
                put("task", **task, deadline=now + 60, target=len(team))
            for n, worker in enumerate(team):
                now += 2 + 3 * draw.random()
                moved = [moved[0] + 180_000, moved[1] + 1_400_000]
                told = {"worker": worker, "block": block, "task": tasks[worker], "base": version - 1, "version": version - 1, "staleness": int(n == 2)}
                told |= {"weight": 1.0, "steps": 40, "tokens": 40 * 4096, "bytes": 180_000, "loss_before": loss + 0.1, "loss_after": loss}
                put("update", **told, seconds=4.0 + n, sentence="on time")
            told = {"block": block, "version": version, "steps": 40 * version, "tokens": 40 * 4096 * version * len(team), "loss": loss}
            told |= {"updates": len(team), "clipped": 0, "dropped": {}, "reason": f"round {version - 1} of block {block} closes"}
            put("version", **told, bytes_in=moved[0], bytes_out=moved[1], weights="00" * 32, length=1_400_000)
        base = 1.32 + 4.2 * 2.718 ** (-version * 7 / versions)
        scores = {f"block-{n}": base + 0.03 * n for n in range(1, blocks)} | {"pool": base, "fused": base - 0.02}
        versioned = {str(n): version for n in range(1, blocks + 1)}
        put("score", scores=scores, versions=versioned, valid_bytes=65536, bytes_in=moved[0], bytes_out=moved[1], seconds=1.5)
        if version == versions // 3:
            put("worker", worker=ids[-1], name=f"machine-{workers}", device="cpu", state="lost", reason="nothing heard for 30 s")
            told = {"block": 2, "version": version, "outcome": "extended", "deadline": now + 60}
            put("round", **told, reason=f"round {version} of block 2 is extended once by 60.0 s: 0 of at least 1 replicas by the deadline")
        if version == versions // 2:
            sentence = "the block has moved on too far since this task's base version; ask for the next task"
            put("refused", code="too_stale", sentence=sentence, worker=ids[-1], block=2, count=3)
            put("refused", code="bad_signature", sentence="the signature does not fit the message and the key", worker="", block=0, count=1)
            put("worker", worker=ids[-1], name=f"machine-{workers}", device="cpu", state="back", reason="")
            put("run", **run, restart=True)
    if finished:
        put("finish", reason="the run is finished: every block has spent its budget")
    return events


def as_lines(events: list[Event]) -> str:
    """The content of an events.jsonl."""
    return "".join(json.dumps(event) + "\n" for event in events)
