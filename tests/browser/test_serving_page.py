"""The page of `serve`, in a real browser on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from blocktrain.learning.compose import Model
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.generate import Sampler
from blocktrain.learning.generate import write as write_locally
from support.browser import CHROMIUM, Visit, browsing, picture, visiting
from support.serving import Process, saved, small_model, started
from support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium")

KEY = "a-key-for-the-page"
HERE = ("--listen", "127.0.0.1:0")
SIZES = {
    "desktop": {"width": 1440, "height": 900},
    "phone": {"width": 390, "height": 844},
    "small phone": {"width": 320, "height": 640},
}


@pytest.fixture(scope="module")
def model(corpus: TokenCorpus) -> Model:
    return small_model(corpus)


@pytest.fixture(scope="module")
def run(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("page") / "small")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@contextmanager
def serving(run: Path, *options: str) -> Iterator[Process]:
    with started("serve", str(run), *HERE, *options, cwd=run.parent) as process:
        yield process


@pytest.fixture(scope="module")
def entry(run: Path) -> Iterator[Process]:
    """In front of one stage."""
    with (
        started("stage", str(run), "--blocks", "1-3", *HERE, cwd=run.parent) as stage,
        serving(run, "--route", stage.said["address"]) as process,
    ):
        yield process


@contextmanager
def opened(browser: Browser, process: Process, **options: Any) -> Iterator[Visit]:
    """The page, ready to write; at the end it must have complained of nothing."""
    with visiting(browser, f"{process.url}/", **options) as visit:
        visit.page.locator("#model").wait_for()
        yield visit
        assert visit.complaints == []
        assert visit.overflow <= 0


def write(visit: Visit, prompt: str, length: int = 30, **fields: str) -> str:
    """Let the model go on; what it adds."""
    page = visit.page
    page.fill("#text", prompt)
    for name, value in {"length": str(length), **fields}.items():
        page.fill(f"#{name}", value)
    page.locator("#text").press("Control+Enter")
    visit.waits_for("#ending", "tokens in")
    return str(page.input_value("#text"))[len(prompt) :]


def expected(model: Model, prompt: bytes, count: int, seed: int) -> str:
    written = write_locally(model, prompt, count, Sampler(seed, 0.8))
    return bytes(written).decode(errors="replace")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_writes(
    browser: Browser, entry: Process, model: Model, tmp_path: Path, size: str, scheme: str
) -> None:
    with opened(browser, entry, viewport=SIZES[size], color_scheme=scheme) as visit:
        text = write(visit, "the ", 40, seed="6")
        assert text == expected(model, b"the ", 40, 6)
        assert "".join(visit.page.locator("#ink .by-model").all_inner_texts()) == text
        assert visit.text("#ending").startswith("40 tokens in")
        sweeps = visit.page.locator("#strip i").count()
        assert f"{sweeps} sweep" in visit.text("#ending")
        assert float(visit.page.locator("#figures dd").first.inner_text()) > 0
        assert visit.page.locator("#figures dt").first.inner_text().lower() == "tokens per second"
        assert visit.text("#answers tbody tr").split()[0] == "exact"
        picture(visit, tmp_path / "page.png", whole=True)
        assert (tmp_path / "page.png").stat().st_size < 300_000


def test_hosts_are_shown_with_what_they_hold(browser: Browser, entry: Process) -> None:
    name = next(host["name"] for host in entry.status()["hosts"] if host["rtt_ms"] > 0)
    with opened(browser, entry) as visit:
        row = visit.page.locator("#hosts tbody tr").filter(has_text=name)
        assert row.locator(".block").all_inner_texts() == ["1", "2", "3"]
        assert (
            row.locator(".state").inner_text() == "up" and "ms" in row.locator(".trip").inner_text()
        )


def test_the_way_of_writing_is_chosen(browser: Browser, entry: Process) -> None:
    with opened(browser, entry) as visit:
        page = visit.page
        assert page.locator("#sweeps").is_disabled()
        page.locator("#mode label", has_text="sweep").click()
        page.locator("#sweeps:enabled").wait_for()
        with page.expect_request("**/v1/completions") as asked:
            write(visit, "the ", 24, sweeps="3")
        body: dict[str, Any] = asked.value.post_data_json or {}
        assert (body["mode"], body["sweeps"], body["max_tokens"], body["prompt"]) == (
            "sweep",
            3,
            24,
            "the ",
        )
        assert visit.text("#answers tbody tr").startswith("sweep × 3")
        page.fill("#temperature", "9")
        page.locator("#write").click()
        assert not page.locator("#temperature").evaluate("field => field.validity.valid")
        visit.waits_for("#pill", "ready")
        visit.counts("#answers tbody tr", 1)


def test_what_was_written_can_be_taken_back_and_edited(
    browser: Browser, entry: Process, model: Model
) -> None:
    with opened(browser, entry) as visit:
        page = visit.page
        assert page.locator("#back").is_disabled()
        first = write(visit, "<b>the</b> ", seed="1")
        assert page.locator("#ink b").count() == 0 and visit.text("#ink").startswith("<b>the</b>")
        page.fill("#seed", "2")
        page.locator("#again").click()
        visit.counts("#answers tbody tr", 2)
        second = page.input_value("#text").removeprefix("<b>the</b> ")
        assert [first, second] == [expected(model, b"<b>the</b> ", 30, seed) for seed in (1, 2)]
        page.locator("#text:not([readonly])").evaluate(
            "area => { area.focus(); area.setSelectionRange(13, 15); }"
        )
        page.keyboard.insert_text("MINE")
        marked = "".join(page.locator("#ink .by-model").all_inner_texts())
        assert marked == second[:2] + second[4:]
        page.locator("#back:disabled").wait_for()
        write(visit, "the ")
        page.locator("#back").click()
        assert page.input_value("#text") == "the "


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_frees_the_hosts(browser: Browser, entry: Process, how: str) -> None:
    with opened(browser, entry) as visit:
        page = visit.page
        page.locator("#mode label", has_text="one by one").click()
        page.fill("#text", "the ")
        page.fill("#length", "8000")
        page.locator("#write").click()
        page.locator("#ink .by-model").first.wait_for()
        visit.waits_for("#pill", "writing")
        page.locator("#text[readonly]").wait_for()
        if how == "button":
            # Not click(): on a busy machine a page that is being written to never holds still.
            page.locator("#write").dispatch_event("click")
        else:
            page.keyboard.press("Escape")
        visit.waits_for("#ending", "Stopped after")
        page.locator("#text:not([readonly])").wait_for()
        assert len(page.input_value("#text")) > 4
    until(lambda: not entry.status()["sessions"], "the end of the answer")


def test_the_keyboard_is_enough(browser: Browser, entry: Process) -> None:
    with opened(browser, entry) as visit:
        page = visit.page
        reached = []
        for _ in range(11):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "(({id, value, textContent}) => id || value || textContent)"
                    "(document.activeElement)"
                )
            )
        assert reached[:2] == ["Skip to the text", "theme"]
        named = ["text", "write", "exact", "length", "seed", "code"]
        assert [name for name in reached if name in named] == named


def test_a_key_is_asked_for(browser: Browser, run: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    with serving(
        run, "--api-keys", str(tmp_path / "keys"), "--max-requests", "1", "--queue", "0"
    ) as process:
        with visiting(browser, f"{process.url}/") as visit:
            page = visit.page
            page.locator("#sign-in").wait_for()
            for wrong in ("something", KEY):
                page.fill("#key", wrong)
                page.keyboard.press("Enter")
                visit.waits_for(
                    "#sign-in-wrong" if wrong != KEY else "#model-name",
                    "not an API key" if wrong != KEY else "small",
                )
        with visiting(browser, f"{process.url}/#key={KEY}") as visit:
            visit.waits_for("#model-name", "small")
            assert KEY not in visit.page.url and KEY not in visit.text("#code")
            _refused_while_busy(visit, process)


def _refused_while_busy(visit: Visit, process: Process) -> None:
    body = {"model": "small", "stream": True, "max_tokens": 8192, "mode": "autoregressive"}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx2.stream(
        "POST", f"{process.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as other:
        pieces = other.iter_bytes()
        next(pieces)
        visit.page.fill("#text", "mine")
        visit.page.locator("#write").click()
        visit.waits_for("#wrong", "Try again in")
        assert visit.page.input_value("#text") == "mine"
    del visit.complaints[:]  # the browser tells of every 4xx


def test_lost_stages_are_shown(browser: Browser, run: Path) -> None:
    with (
        started("stage", str(run), "--blocks", "2", *HERE, cwd=run.parent) as stage,
        serving(run, "--route", stage.said["address"]) as process,
        visiting(browser, f"{process.url}/") as visit,
    ):
        write(visit, "the ")
        assert visit.page.locator("#degraded").is_hidden()
        stage.process.kill()
        visit.waits_for("#hosts .state", "lost")
        visit.waits_for("#pill", "degraded: block 2")
        assert "partial" in str(visit.page.locator("#pill").get_attribute("class"))
        text = write(visit, "the ")
        assert "Block 2 did not take part" in visit.text("#degraded") and len(text) == 30
        assert "degraded" in visit.text("#answers tbody tr:first-child")
        process.process.kill()
        visit.waits_for("#notice", "does not answer")
        assert visit.text("#pill") == "away" and visit.page.locator("#write").is_disabled()
        assert visit.page.input_value("#text") == "the " + text
