"""The report of a run: complete, self-contained, safe with any text and with missing values."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import make_config
from blocktrain.errors import RunError
from blocktrain.learning.corpus.source import Source
from blocktrain.runs.folder import create_run, open_run
from blocktrain.runs.local import train_blocks
from blocktrain.runs.reference import TrainingPlan
from blocktrain.runs.report import write_report
from blocktrain.runs.results import complete
from blocktrain.watch.feed import EventLog

TINY = {"blocks": 3, "layers_per_block": 1, "width": 32, "steps": 20, "context": 32, "batch": 4}


class Page(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def _train(tmp_path: Path, preset: str | None, *, reference: bool) -> Path:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "text.txt").write_text(
        "".join(f"line {i}: {i * i % 97} foxes jump over {i % 13} dogs\n" for i in range(900))
    )
    config = make_config(dict(TINY), preset=preset)
    run = create_run(tmp_path / "run", config, str(corpus))
    plan = TrainingPlan(
        run, config, Source(str(corpus), None, tmp_path / "cache"), reference=reference
    )
    train_blocks(plan, lambda *_: None)
    complete(plan, lambda _: None)
    return run.folder


@pytest.fixture(scope="module")
def fuse_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("fuse_run"), None, reference=True)


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("paper"), "paper", reference=False)


def _report(folder: Path) -> tuple[str, Page]:
    path = write_report(folder)
    assert path == folder / "report.html"
    source = path.read_text(encoding="utf-8")
    return source, Page(source)


def _copy_with(original: Path, copy: Path, **result: Any) -> Path:
    """The same run with other words in its result; None removes a key."""
    copy.mkdir()
    for name in ("config.toml", "events.jsonl", "result.json"):
        shutil.copy(original / name, copy / name)
    content = json.loads((copy / "result.json").read_text()) | result
    (copy / "result.json").write_text(
        json.dumps({key: value for key, value in content.items() if value is not None})
    )
    return copy


def _charts(page: Page) -> list[str | None]:
    assert sum(tag == "svg" for tag, _ in page.tags) == sum(tag == "figure" for tag, _ in page.tags)
    assert all(
        attrs.get("role") == "img" and attrs.get("aria-label")
        for tag, attrs in page.tags
        if tag == "svg"
    )
    return [attrs["id"] for tag, attrs in page.tags if tag == "figure"]


def test_fused_run_with_reference(fuse_run: Path) -> None:
    source, page = _report(fuse_run)
    composition = json.loads((fuse_run / "result.json").read_text())["composition"]
    assert _charts(page) == ["loss", "ce", "memory", "parameters"]
    for words in (
        "block 1 alone",
        "block 2 alone",
        "block 3 (fusion)",
        "pool",
        {"fuse": "composed (fusion block)", "pool": "composed (pool)"}[composition["name"]],
        composition["reason"],
        "end-to-end reference",
    ):
        assert words in page.text
    assert (
        "than a single block on average" in page.text
        and "than the end-to-end reference" in page.text
    )
    ce = json.loads((fuse_run / "result.json").read_text())["valid_ce"]["composed"]
    for number in (f"{ce:.4f}", f"{ce / math.log(2):.4f}", f"{math.exp(ce):.4f}"):
        assert f"<td>{number}</td>" in source
    for command in (
        "blocktrain evaluate run",
        "blocktrain generate run --prompt",
        "blocktrain train --config run/config.toml",
    ):
        assert command in page.text
    assert "20 *" in page.text and "feature_dropout" in page.text


def test_paper_run_without_reference(paper: Path) -> None:
    _, page = _report(paper)
    assert _charts(page) == ["loss", "ce", "ranges", "cost"]
    for n in (1, 2, 3):
        assert f"path after block {n}" in page.text
    assert "its path after the first block" in page.text
    assert "reference of the same shape" not in page.text


@pytest.mark.parametrize("kind", ["fuse_run", "paper"])
def test_needs_no_network_and_is_valid(kind: str, request: pytest.FixtureRequest) -> None:
    source, page = _report(request.getfixturevalue(kind))
    assert not {"script", "link", "iframe", "img", "image", "object", "embed", "base"} & {
        tag for tag, _ in page.tags
    }
    for _, attrs in page.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert (attrs.get(name) or "#").startswith("#")
    assert "@import" not in source
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", source))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert not re.search(
        r"#0[1-5]0[1-5]0[1-6]\b", source
    )  # every placeholder has become a variable


def test_scores_while_training_are_circles(fuse_run: Path, tmp_path: Path) -> None:
    folder = _copy_with(fuse_run, tmp_path / "scored")
    log = EventLog(folder / "events.jsonl")
    for step in (5, 10):
        steps, scores = {"1": step, "3": step}, {"block-1": 5.0, "pool": 4.0, "fused": 3.0}
        log.write("score", scores=scores, steps=steps, bytes_per_token=1.0)
    log.close()
    assert "Circles: on the valid split." in _report(folder)[1].text
    assert "Circles" not in _report(fuse_run)[1].text


def test_same_run_same_bytes(fuse_run: Path) -> None:
    assert write_report(fuse_run).read_bytes() == write_report(fuse_run).read_bytes()


def test_text_is_escaped(fuse_run: Path, tmp_path: Path) -> None:
    evil = "<script>alert('&')</script>"
    sample = {
        "prompt": f"{evil}\n",
        "text": f"</pre>{evil}\x00\x1b\ud800 $name",
        "temperature": "<i>",
    }
    folder = _copy_with(
        fuse_run,
        tmp_path / "<b>run",
        sample=sample,
        corpus={"name": evil},
        valid_ce={"composed": 1.0, evil: 2.0},
    )
    source, page = _report(folder)
    assert not {"script", "i", "b"} & {tag for tag, _ in page.tags}
    assert source.count("&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;") >= 3
    assert f"</pre>{evil}␀␛? $name" in page.text


def test_old_and_sparse_results(fuse_run: Path, tmp_path: Path) -> None:
    sparse = dict.fromkeys(
        ("gap", "corpus", "parameters", "pool_weights", "seconds", "peak_mb", "sample", "ranges")
    )
    folder = _copy_with(fuse_run, tmp_path / "sparse", **sparse, valid_ce={"composed": 1.5})
    (folder / "events.jsonl").unlink()
    _, page = _report(folder)
    assert _charts(page) == ["ce"]
    assert "2.164 bits per byte (1.500 nats per token)." in page.text
    odd = {
        "parameters": [1],
        "peak_mb": {"block-1": "much", "block-2": 12.0},
        "ranges": [[0, 1], "x", [2, 1]],
        "sample": "text",
        "seconds": 3,
    }
    assert "memory" in _charts(_report(_copy_with(fuse_run, tmp_path / "odd", **odd))[1])


def test_diverged_run(fuse_run: Path, tmp_path: Path) -> None:
    folder = _copy_with(
        fuse_run,
        tmp_path / "diverged",
        valid_ce={"composed": math.nan, "block_1": math.inf, "block_2": 900.0, "block_3": 50.0},
    )
    log = EventLog(folder / "events.jsonl")
    log.write("step", block=1, step=21, loss=math.nan)
    log.write("step", block=2, step=21, loss=0.0)
    log.close()
    _, page = _report(folder)
    assert "diverged" in page.text and "not finite" in page.text


def test_resumed_block_repeats_steps(fuse_run: Path, tmp_path: Path) -> None:
    folder = _copy_with(fuse_run, tmp_path / "resumed")
    log = EventLog(folder / "events.jsonl")
    log.write("start", fingerprint="", blocks=3, steps=20)
    log.write("step", block=1, step=10, loss=1.25)
    log.close()
    source, page = _report(folder)
    assert "loss" in _charts(page)
    assert (
        "<td>1.2500</td>" in source
    )  # the last word counts, though an earlier line has a later step


def test_many_blocks_stay_readable(paper: Path, tmp_path: Path) -> None:
    folder = _copy_with(
        paper,
        tmp_path / "many",
        valid_ce={"composed": 1.0} | {f"euler_{n}": 2 - n / 64 for n in range(1, 65)},
    )
    _, config, data, reference, _ = open_run(folder)
    (folder / "config.toml").unlink()
    create = create_run(tmp_path / "larger", config.replace(blocks=64), data, reference=reference)
    shutil.move(create.folder / "config.toml", folder / "config.toml")
    source, page = _report(folder)
    chart = source[source.index('id="ce"') : source.index('id="ranges"')]
    assert chart.count("path after block") == 24
    assert all(f"path after block {n}" in page.text for n in range(1, 65))


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"valid_ce": 3}', '{"valid_ce": {"composed": "low"}}']
)
def test_damaged_result_is_a_sentence(fuse_run: Path, tmp_path: Path, content: str) -> None:
    folder = _copy_with(fuse_run, tmp_path / "damaged")
    (folder / "result.json").write_text(content)
    with pytest.raises(RunError, match=r"result\.json"):
        write_report(folder)


def test_unfinished_run_is_a_sentence(fuse_run: Path, tmp_path: Path) -> None:
    folder = _copy_with(fuse_run, tmp_path / "unfinished")
    (folder / "result.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        write_report(folder)
    with pytest.raises(RunError, match="not a run folder"):
        write_report(tmp_path / "nowhere")
