"""The live page in a real browser, with a real coordinator: it stays usable and harmless."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from blocktrain.clock import SimulatedClock
from blocktrain.protocol.messages import Kick, Task, Wait
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.watch.server import Listen, WatchedCoordinator, open_coordinator, serve_coordinator
from blocktrain.watch.stream import find_log, replay_app
from blocktrain.web.client import HttpClient
from blocktrain.web.server import AppServer, Where
from support.browser import CHROMIUM, Visit, a_log, as_lines, browsing, visiting
from support.fake_worker import OPERATOR, TOKEN, FakeWorker, as_task, begin, beginning

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PHONE = (375, 812)
HOSTILE = '<img src=x onerror="window.hurt = 1">'


@dataclass
class Site:
    """A coordinator with its page, at an address."""

    coordinator: WatchedCoordinator
    clock: SimulatedClock
    url: str
    clients: list[HttpClient] = field(default_factory=list)

    @property
    def page(self) -> str:
        return f"{self.url}/#token={TOKEN}"

    def client(self, token: str = TOKEN) -> HttpClient:
        self.clients.append(HttpClient(self.url, token))
        return self.clients[-1]

    def worker(self, seed: int) -> FakeWorker:
        return FakeWorker(self.client(), seed)

    def score(self, **scores: float) -> None:
        live = self.coordinator.run
        named = {name.replace("_", "-"): value for name, value in scores.items()}
        with live.lock:
            versions = {str(n): block.version for n, block in live.state.blocks.items()}
            self.coordinator.feed.put(
                "score",
                scores=named,
                versions=versions,
                valid_bytes=4096,
                seconds=0.1,
                bytes_in=live.traffic.total[0],
                bytes_out=live.traffic.total[1],
            )


ASK = """async ([url, options]) => {
  try { return await (await fetch(url, options)).text(); } catch { return "failed"; }
}"""


@contextmanager
def serving(folder: Path, port: int = 0, **policy: Any) -> Iterator[Site]:
    """A run in a folder, new or continued, with a clock that moves when a test says so."""
    clock = SimulatedClock(1000.0)
    new = not (folder / "run.sqlite").exists()
    coordinator = begin(folder, clock, **policy) if new else open_coordinator(folder, clock)
    try:
        with serve_coordinator(coordinator, Listen("127.0.0.1", port, TOKEN, OPERATOR)) as url:
            site = Site(coordinator, clock, url)
            yield site
            for client in site.clients:
                client.close()
    finally:
        coordinator.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine; `make browser` installs it as root")
    pytest.importorskip("playwright.sync_api")
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One on which nothing happens: for what needs a page and no run."""
    with serving(tmp_path_factory.mktemp("site")) as found:
        yield found


def cells(visit: Visit, table: str, row: str) -> dict[str, str]:
    """A row of a table by the first class of its cells."""
    found = (
        visit.page.locator(f"#{table} tbody tr")
        .filter(has=visit.page.locator("th", has_text=row))
        .first
    )
    script = (
        "row => Object.fromEntries([...row.cells]"
        ".map(cell => [cell.className.split(' ')[0], cell.innerText]))"
    )
    return dict(found.evaluate(script))


def painted(visit: Visit, figure: str) -> int:
    """Pixels of a chart that are not empty."""
    script = """box => {
        const canvas = box.querySelector("canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, n) => n % 4 === 3 && value > 0).length;
    }"""
    return int(visit.page.locator(f"#{figure} .plot").evaluate(script))


def replaying(visit: Visit, events: list[dict[str, Any]]) -> None:
    visit.page.wait_for_selector("#pill.live")
    visit.drop("events.jsonl", as_lines(events))
    visit.page.wait_for_selector("#player:not([hidden])")


def folded(visit: Visit, events: list[dict[str, Any]], script: str) -> Any:
    """What fold.js makes of events. The script sees `state` and the exports of fold.js."""
    start = (
        "const fold = await import('/page/fold.js');"
        " const state = events.reduce(fold.fold, fold.begin());"
    )
    return visit.page.evaluate(f"async events => {{ {start} {script} }}", events)


def test_a_run_is_shown_as_it_happens(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path / "run", max_staleness=0) as site, visiting(browser, site.page) as visit:
        visit.waits_for("#no-workers", "Nobody has joined yet")
        assert visit.text("#run-name") == "words"
        ada, bob, cay, dan = (site.worker(n) for n in (1, 2, 3, 4))
        named = {"ada": ada, "bob": bob, "cay": cay, "dan": dan}
        tasks = {worker.id: as_task(worker.join(name=name).next) for name, worker in named.items()}
        mine, late = tasks[ada.id], tasks[cay.id]
        assert mine.block == late.block == 1
        ada.beat(mine, 1)
        visit.waits_for("#workers", "cay")
        visit.waits_for("#workers .task", "1 / 2")
        visit.waits_for("#blocks .round", "0 of 1 replica")
        assert "left" in cells(visit, "blocks", "Block 1")["round"]

        stale = cay.submission(late, payload := cay.payload(late))
        cay.upload(late, payload)
        for _ in range(3):
            mine = as_task(ada.send(mine).next)
            site.clock.now += 2
        assert mine.base == 3
        with pytest.raises(Refused) as refused:
            cay.client.submit(stale)
        assert refused.value.code == Code.TOO_STALE
        with pytest.raises(Refused):
            bob.client.submit(
                bob.submission(tasks[bob.id], b"x" * 64).model_copy(update={"signature": "00" * 64})
            )
        site.client(OPERATOR).kick(Kick(worker=dan.id, reason="too slow for us"))
        site.score(block_1=2.5, block_2=2.6, pool=2.4)
        site.score(block_1=2.3, block_2=2.4, pool=2.2)

        visit.waits_for("#refusals", "bad_signature")
        visit.waits_for("#refusals", "too_stale")
        visit.waits_for("#workers .refused", "too_stale")
        visit.waits_for("#blocks .version", "3")
        visit.waits_for("#figures", "2.200")  # the last that happened: all before it is shown now
        assert cells(visit, "blocks", "Block 2")["version"] == "0"
        assert "which is 3 behind" in visit.text("#refusals")
        assert "cay 1 ×" in visit.text("#refusals")
        assert cells(visit, "workers", "ada")["accepted"] == "3"
        assert cells(visit, "workers", "dan")["condition"] == "kicked"
        assert "dan was removed: too slow for us" in visit.text("#feed")
        assert "Block 1 is at version 3 from 1 update" in visit.text("#feed")
        assert "kB" in cells(visit, "workers", "ada")["moved"]
        assert "kB in" in visit.text("#figures")
        visit.page.wait_for_selector('#loss .plot[data-points="3"]')
        visit.page.wait_for_selector('#ce .plot[data-points="6"]')
        assert painted(visit, "loss") > 1000
        assert painted(visit, "ce") > 1000
        visit.page.locator("#record").scroll_into_view_if_needed()
        visit.waits_for("#ledger", "kick")
        assert visit.complaints == []


def test_a_killed_worker_is_lost_and_may_come_back(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path / "run") as site, visiting(browser, site.page) as visit:
        ada = site.worker(1)
        task = ada.joined()
        visit.waits_for("#workers .condition", "training")
        site.clock.now += 1000  # nothing was heard since
        visit.waits_for("#workers .condition", "lost")
        visit.waits_for("#feed .trouble", "fake 1 is lost: nothing heard for 1000 s")
        visit.waits_for("#why", "All workers have left")
        visit.page.check("#group input[value=gone]")
        visit.counts("#workers tbody tr", 1)
        ada.send(task)  # late, but given to nobody else
        site.clock.now += 2
        visit.waits_for("#feed", "fake 1 is back")
        visit.waits_for("#no-workers", "No worker matches")
        assert visit.complaints == []


def test_the_join_command_is_copied_with_its_token_and_shows_it_only_when_asked(
    browser: Browser, site: Site
) -> None:
    with visiting(browser, site.page, permissions=["clipboard-read", "clipboard-write"]) as visit:
        visit.waits_for("#join-command", "blocktrain worker")
        assert TOKEN not in visit.page.url
        assert TOKEN not in visit.page.content()
        visit.page.click("#join-copy")
        visit.waits_for("#join-copy", "Copied")
        assert (
            visit.page.evaluate("navigator.clipboard.readText()")
            == f"blocktrain worker {site.url} --token {TOKEN}"
        )
        visit.page.click("#join-reveal")
        visit.waits_for("#join-command", f"--token {TOKEN}")
        visit.page.reload()  # the tab still knows it
        visit.waits_for("#join-command", "••••")
        assert visit.complaints == []


def test_a_page_without_a_token_asks_for_it(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as visit:
        visit.waits_for("#sign-in-title", "This run needs its token")
        visit.until("document.activeElement.id === 'token'")
        visit.page.keyboard.type("a guess")
        visit.page.keyboard.press("Enter")
        visit.waits_for("#sign-in-wrong", "join token is missing or wrong")
        visit.page.fill("#token", TOKEN)
        visit.page.keyboard.press("Enter")
        visit.waits_for("#run-name", "words")
        visit.page.wait_for_selector("#sign-in", state="hidden")


def test_it_comes_back_after_a_restart_and_says_what_is_old(
    browser: Browser, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with visiting_after_a_round(browser, folder) as (visit, port, ada):
        visit.waits_for("#notice-text", "The coordinator does not answer")
        visit.waits_for("#pill", "away")
        visit.page.click("#try-now")
        visit.counts("body.old", 1)
        assert cells(visit, "blocks", "Block 1")["version"] == "1"
        with serving(folder, port) as again:
            ada.client = again.client()
            visit.waits_for("#pill", "live")
            visit.waits_for("#feed", "The coordinator was started again")
            ada.send(as_task(ada.ask()))
            visit.waits_for("#blocks .version", "2")
            visit.page.wait_for_selector("#notice", state="hidden")
            assert visit.page.locator("#feed li", has_text="Block 1 is at version 1 ").count() == 1
            visit.page.wait_for_selector('#loss .plot[data-points="2"]')
        assert [said for said in visit.complaints if "Failed to load resource" not in said] == []


@contextmanager
def visiting_after_a_round(
    browser: Browser, folder: Path
) -> Iterator[tuple[Visit, int, FakeWorker]]:
    """A page whose coordinator has gone."""
    with serving(folder) as site:
        ada = site.worker(1)
        ada.send(ada.joined())
        visited = visiting(browser, site.page)
        visit = visited.__enter__()
        visit.waits_for("#blocks .version", "1")
        visit.page.wait_for_selector("#pill.live")
    try:
        yield visit, int(site.url.rsplit(":", 1)[1]), ada
    finally:
        visited.__exit__(None, None, None)


def test_a_finished_run_says_how_to_take_the_model_out(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path / "run", rounds=1) as site, visiting(browser, site.page) as visit:
        ada = site.worker(1)
        following: Task | Wait = ada.joined()
        while isinstance(following, Task):
            following = ada.send(following).next
        visit.waits_for("#finished-text", "every block has spent its budget")
        visit.waits_for("#pill", "finished")
        assert f"blocktrain pull {site.url} --out runs/pulled --token" in visit.text(
            "#pull-command"
        )
        assert TOKEN not in visit.text("#pull-command")
        visit.waits_for("#share", "100 %")
        visit.page.wait_for_selector("#join", state="hidden")


def test_a_log_is_replayed_by_hand_and_by_itself(browser: Browser, site: Site) -> None:
    events = a_log(versions=6, finished=True)
    length = events[-1]["time"] - events[0]["time"]
    with visiting(browser, site.page) as visit:
        replaying(visit, events)
        visit.waits_for("#run-name", "wikitext-2")
        visit.waits_for("#share", "100 %")
        visit.page.focus("#position")
        visit.page.keyboard.press("Home")
        visit.waits_for("#share", "0 %")
        visit.page.wait_for_selector("#ce .plot", state="hidden")
        visit.page.keyboard.press("End")
        visit.page.wait_for_selector('#ce .plot[data-points="30"]')
        visit.page.keyboard.press("Home")
        visit.page.keyboard.press("]")
        visit.waits_for("#workers", "machine-1")
        visit.counts("#workers tbody tr", 1)
        visit.page.keyboard.press("[")
        visit.waits_for("#no-workers", "Nobody")
        visit.page.select_option("#speed", "60")
        visit.page.focus("#main")
        visit.page.keyboard.press(" ")
        visit.waits_for("#play", "Pause")
        visit.until(f"Number(document.querySelector('#position').value) >= {int(length)}")
        visit.waits_for("#play", "Play")
        visit.waits_for("#ledger-title", "Last events of the log")
        visit.counts("#ledger li", 12)
        visit.page.click("#back-to-live")
        visit.waits_for("#run-name", "words")
        visit.page.wait_for_selector("#player", state="hidden")
        assert visit.complaints == []


def test_late_updates_are_explained_and_counted_apart(browser: Browser, site: Site) -> None:
    run = {"kind": "run", "seq": 1, "time": 1.0, "run": "r", "blocks": 1, "steps": 10}
    late = [
        {"kind": "update", "seq": n + 2, "time": 2.0 + n, "worker": "w", "block": 1, "staleness": s}
        for n, s in enumerate((0, 1, 1, 2, 4))
    ]
    score = {"kind": "score", "seq": 9, "time": 9.0, "scores": {"pool": 2.5}}
    end = {"kind": "worker", "seq": 10, "time": 49.0, "worker": "w", "state": "left"}
    with visiting(browser, site.page) as visit:
        replaying(visit, [run, *late, score, end])
        visit.waits_for("#blocks .updates small", "2 one version behind, 2 later")
        title = visit.page.locator("#blocks td.updates").get_attribute("title") or ""
        assert "one version behind counts in full" in title
        visit.waits_for("#figures", "scored 40 s ago")


def test_a_served_log_is_replayed_without_a_coordinator(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(as_lines(a_log(versions=3, finished=True)))
    server = AppServer(replay_app(find_log(tmp_path)), Where())
    server.start()
    try:
        with visiting(browser, server.url) as visit:
            visit.waits_for("#moment", "0:55 / 0:55")
            visit.waits_for("#finished-text", "every block has spent its budget")
            assert visit.text("#pill") == "replay"
            assert visit.page.is_hidden("#join")
            assert visit.page.is_hidden("#back-to-live")
            assert visit.page.is_hidden("#pull"), "there is no coordinator at this address"
            assert "pull" not in visit.text("#finished")
            visit.waits_for("#figures", "scored")
            assert visit.complaints == []
    finally:
        server.stop()


def test_a_page_from_elsewhere_reads_and_changes_nothing(browser: Browser, tmp_path: Path) -> None:
    """Of a coordinator without a token: by its address, and under a name that points here."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "events.jsonl").write_text(as_lines(a_log(versions=1)))
    elsewhere = AppServer(replay_app(tmp_path / "elsewhere" / "events.jsonl"), Where())
    elsewhere.start()
    with (
        beginning(tmp_path / "run") as coordinator,
        serve_coordinator(coordinator, Listen()) as url,
        browser.new_context(bypass_csp=True) as context,
    ):
        page = context.new_page()
        page.goto(elsewhere.url)
        notice = {"address": "192.0.2.1:1", "model": "ab" * 32, "issued": 1}
        for path, options in (
            ("/v1/status", {}),
            ("/v1/events", {"mode": "no-cors"}),
            ("/v1/stages", {"mode": "no-cors", "method": "POST", "body": json.dumps(notice)}),
        ):
            said = page.evaluate(ASK, [url + path, options])
            assert said in ("failed", ""), said
        assert coordinator.run.refusals[Code.WRONG_ORIGIN] == 3
        rebound = url.replace("127.0.0.1", "rebound.example")
        answer = page.goto(rebound)
        assert answer is not None and answer.status == 421
        assert "wrong_host" in page.evaluate(ASK, [f"{rebound}/v1/status", {}])
        with closing(HttpClient(url)) as client:
            assert client.stages().stages == () and client.status().state == "running"
    elsewhere.stop()


def test_text_from_others_stays_text(browser: Browser, site: Site) -> None:
    events = a_log(workers=2, versions=3)
    for event in events:
        for name in ("name", "reason", "corpus", "sentence", "code", "device"):
            if name in event:
                event[name] = HOSTILE
    kinds = ("run", "worker", "task", "update", "refused", "round", "version", "score", "finish")
    fields = (
        "worker",
        "name",
        "block",
        "version",
        "steps",
        "loss",
        "loss_before",
        "scores",
        "dropped",
        "reason",
        "count",
        "seconds",
        "deadline",
    )
    anything: tuple[Any, ...] = (HOSTILE, {}, [1], None, -1e300)
    events += [
        {"kind": kind, "time": "noon", **dict.fromkeys(fields, value)}
        for kind in kinds
        for value in anything
    ]
    with visiting(browser, site.page) as visit:
        replaying(visit, events)
        visit.waits_for("#workers", HOSTILE)
        visit.waits_for("#refusals", HOSTILE)
        visit.page.check("#tone input[value=all]")
        visit.waits_for("#feed", HOSTILE)
        assert visit.page.locator("main img").count() == 0
        assert visit.page.evaluate("window.hurt") is None
        assert visit.complaints == []


def test_a_file_that_is_no_log_is_refused(browser: Browser, site: Site) -> None:
    with visiting(browser, site.page) as visit:
        visit.page.wait_for_selector("#pill.live")
        visit.drop("holiday.txt", "sun\n{}\n[1]\nnull\n")
        visit.waits_for("#notice-text", "holiday.txt holds no events")
        assert visit.page.is_hidden("#player")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_at_both_sizes(browser: Browser, site: Site, scheme: Any) -> None:
    with visiting(browser, site.page, color_scheme=scheme) as visit:
        replaying(visit, a_log(workers=12, versions=12, blocks=8))
        assert visit.overflow == 0
        background = "getComputedStyle(document.body).backgroundColor"
        system = visit.page.evaluate(background)
        visit.resize(*PHONE)
        visit.until("document.querySelector('#ce .plot .uplot').clientWidth < 375")
        assert visit.overflow == 0
        other = "dark" if scheme == "light" else "light"
        while visit.text("#theme") != other:
            visit.page.click("#theme")
        assert visit.page.evaluate(background) != system
        visit.page.reload()
        visit.page.wait_for_selector("#pill.live")
        visit.waits_for("#theme", other)
        assert visit.page.evaluate(background) != system
        assert visit.overflow == 0
        assert visit.complaints == []


def test_the_keyboard_reaches_everything(browser: Browser, site: Site) -> None:
    with visiting(browser, site.page) as visit:
        visit.waits_for("#join-command", "blocktrain worker")
        passed = tabbed(visit, "join-copy")
        assert passed[0] == "Skip to the run"
        assert {"theme", "open-log", "axis", "span", "filter"} <= set(passed)
        outline = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        replaying(visit, a_log(versions=3))
        assert {"play", "hop-back", "position", "speed"} <= set(tabbed(visit, "speed"))


def tabbed(visit: Visit, last: str) -> list[str]:
    """What gets the focus one after another, by id, name or text, until `last` has it."""
    found: list[str] = []
    visit.page.evaluate("document.activeElement.blur()")
    while last not in found:
        visit.page.keyboard.press("Tab")
        found.append(
            visit.page.evaluate("(e => e.id || e.name || e.textContent)(document.activeElement)")
        )
        assert len(found) < 150, found
    return found


def test_many_workers_and_a_long_history_stay_quick(browser: Browser, site: Site) -> None:
    events = a_log(workers=200, versions=10)
    assert len(events) > 4000
    with visiting(browser, site.page) as visit:
        replaying(visit, events)
        visit.waits_for("#more-workers", "Show all 200 workers")
        visit.page.fill("#filter", "machine-19")
        visit.until("document.querySelectorAll('#workers tbody tr').length === 11")
        visit.page.fill("#filter", "")
        visit.page.click("#more-workers")
        visit.until("document.querySelectorAll('#workers tbody tr').length === 200")
        visit.page.focus("#workers thead th:first-child button")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector('#workers th.name[aria-sort="ascending"]')
        assert visit.text("#workers tbody tr:first-child th span") == "machine-1"
        script = """async () => {
            const row = document.querySelector("#workers tbody tr");
            const slider = document.querySelector("#position");
            for (let n = 0; n < 10; n++) {
                slider.value = Number(slider.max) * (0.5 + n / 20);
                slider.dispatchEvent(new Event("input"));
                await new Promise(requestAnimationFrame);
            }
            return [row.isConnected, document.activeElement.textContent];
        }"""
        (same_row, focused), seconds = visit.work(script)
        assert same_row
        assert focused == "worker"
        assert seconds / 10 < 0.25  # for a twentieth of the run at once: everything changes
        assert visit.complaints == []


def test_the_fold_is_the_same_in_pieces_and_forgives_what_it_does_not_know(
    browser: Browser, site: Site
) -> None:
    events = a_log(versions=4, finished=True)
    torn: list[dict[str, Any]] = [
        {"kind": "unheard of"},
        {},
        {"kind": "version"},
        {"kind": "score", "scores": {"pool": None, "__proto__": 1}},
    ]
    summary = """const summary = (s) => JSON.stringify([
        s.seq, s.rounds, fold.progress(s),
        [...s.blocks.values()].map((block) => [block.version, block.steps]),
        [...s.workers.values()].map((w) => [w.name, w.state, w.accepted, w.refused]),
        [...s.scores].map(([name, curve]) => [name, curve.value]),
    ]);"""
    with visiting(browser, site.page) as visit:
        twice = (
            f"{summary} const before = summary(state);"
            " events.forEach((e) => fold.fold(state, e)); return [before, summary(state)]"
        )
        before, after = folded(visit, events, twice)
        assert before == after  # sent twice, after a reconnection
        seq, rounds, progress, blocks, workers, scores = json.loads(before)
        assert (seq, rounds, progress) == (len(events), 16, 1)
        assert blocks == [[4, 160]] * 4
        assert [w[0] for w in workers] == [f"machine-{n}" for n in range(1, 6)]
        assert workers[-1][3] == 3
        assert dict(scores).keys() == {"block-1", "block-2", "block-3", "pool", "fused"}
        assert folded(visit, [*events, *torn], f"{summary} return summary(state)") == before
        other = [{"seq": 1, "time": 5.0, "kind": "run", "run": "ab" * 16, "blocks": 2, "steps": 10}]
        assert folded(
            visit, [*events, *other], "return [state.seq, state.workers.size, state.blocks.size]"
        ) == [1, 0, 2]


def test_what_the_fold_says_of_a_round(browser: Browser, site: Site) -> None:
    run: dict[str, Any] = {"kind": "run", "run": "ab" * 16, "blocks": 1, "steps": 100, "time": 0.0}
    facts = {"worker": "w", "block": 1, "task": 7, "base": 0, "steps": 10}
    task = {"kind": "task", **facts, "deadline": 60.0, "target": 2, "time": 1.0}
    update = {"kind": "update", **facts, "staleness": 2, "seconds": 5.0, "tokens": 10, "time": 6.0}
    version = {
        "kind": "version",
        "block": 1,
        "version": 1,
        "steps": 10,
        "loss": 3.5,
        "bytes_in": 3,
        "bytes_out": 4,
        "time": 7.0,
    }
    seen = """const b = state.blocks.get(1), w = state.workers.get("w");
        return [b.round.target, b.round.deadline, b.round.updates.size, b.round.leased.size,
        w.state, w.staleness, w.speed, b.version, state.bytesIn + state.bytesOut];"""
    with visiting(browser, site.page) as visit:
        assert folded(visit, [run, task], seen) == [2, 60, 0, 1, "training", None, 0, 0, 0]
        assert folded(visit, [run, task, update], seen) == [2, 60, 1, 0, "waiting", 2, 2, 0, 0]
        assert folded(visit, [run, task, update, version], seen) == [
            None,
            None,
            0,
            0,
            "waiting",
            2,
            2,
            1,
            7,
        ]
        script = (
            "return fold.curveGain({ value: [3, 2.5], bytes: [1e9, 3e9],"
            " time: [0, 1], steps: [0, 1] })"
        )
        assert folded(visit, [], script) == {"now": 2.5, "gain": -0.5, "perByte": -0.25e-9}
        later = [
            {**version, "version": n, "steps": 10 * n, "time": 7.0 + 10 * n} for n in range(1, 6)
        ]
        assert folded(visit, [run, *later], "return Math.round(fold.remaining(state, 57))") == 50
        status = {
            "kind": "status",
            "time": 9.0,
            "state": "running",
            "rounds": 1,
            "bytes_in": 10,
            "bytes_out": 20,
        }
        assert folded(
            visit, [run, version, status], "return [state.phase, state.bytesOut, state.seq]"
        ) == ["running", 20, 0]
