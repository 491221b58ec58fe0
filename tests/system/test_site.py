"""The documentation site: it builds without a warning, and all its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from blocktrain.config import Config
from blocktrain.protocol.calls import CALLS, WATCH_CALLS

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """The links, loaded files and anchors of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given or (tag == "link" and given.get("rel") != "canonical"):
            self.loads.append(given.get("src") or given.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["--strict", "--quiet", "--site-dir", str(folder)]
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_links_lead_to_pages_files_and_anchors(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 15
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are from the root of a server
            continue
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            lost = target in pages and anchor and anchor not in pages[target].anchors
            if not target.exists() or lost:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_pages_load_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    elsewhere = [
        f"{path.relative_to(site)}: {load}"
        for path, page in pages.items()
        for load in page.loads
        if urlsplit(load).scheme not in ("", "data") or load.startswith("//")
    ]
    assert elsewhere == []


def test_the_reference_has_every_command_call_and_setting(site: Path) -> None:
    from blocktrain.cli.app import app

    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for name in app:
        assert name.startswith("-") or f'id="blocktrain-{name}"' in commands, name
    settings = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    for name in Config.model_fields:
        assert f"<code>{name}</code>" in settings, name
    calls = (site / "reference" / "http.html").read_text(encoding="utf-8")
    for call in (*CALLS, *WATCH_CALLS):
        assert f"<code>{call.method} {call.path}</code>" in calls, call.path


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts make it."""
    words = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower())
    return words.replace(" ", "-")


def test_links_of_the_sources_lead_to_files_and_anchors() -> None:
    """Read on a code host or in an editor, not as a site."""
    made = {
        "docs/reference",
        "docs/notebooks",
        *(f"docs/{name}.md" for name in ("changelog", "contributing")),
    }
    broken = []
    sources = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
    ]
    for page in sources:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            inside = target.relative_to(ROOT.resolve()).as_posix()
            if any(inside.startswith(place) for place in made):
                continue
            if not target.exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
            elif anchor and target.suffix == ".md":
                headings = re.findall(
                    r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE
                )
                if anchor not in {slug(heading) for heading in headings}:
                    broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_the_architecture_page_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    questions = text.split("## Where is, how do I")[1].split("\n### ")[1:]
    assert len(questions) >= 8
    for answer in questions:
        assert 1 <= len(set(files_named(answer))) <= 4, answer
    for name in files_named(text):
        assert (ROOT / "src" / "blocktrain" / name).is_file() or (ROOT / name).is_file(), name


def files_named(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", text)
