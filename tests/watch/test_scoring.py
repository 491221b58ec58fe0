"""Scores of a running run equal those of `evaluate`; the scorer's death stops nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blocktrain.learning.compose import Model, composition_of, context_predictors
from blocktrain.learning.corpus.source import Source
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.evaluate import cross_entropies, evaluate
from blocktrain.learning.pool import fit_pool_weights
from blocktrain.protocol.messages import BlockVersion
from blocktrain.protocol.tensors import unpack
from blocktrain.runs.prepare import prepare
from blocktrain.terminal import score_line
from blocktrain.watch.feed import EVENTS, Listener, read_events
from blocktrain.watch.scorer import sample_cross_entropies
from blocktrain.watch.scoring import ScoringThread
from blocktrain.watch.server import WatchedCoordinator
from blocktrain.worker.task import read_blocks
from support.fake_worker import FakeWorker, as_task, begin
from support.manual_worker import CONFIG, play
from support.waiting import until

LONG = 500.0  # seconds; a scorer gives way to everything else on a busy machine
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def trained_run(
    tmp_path_factory: pytest.TempPathFactory, corpus: TokenCorpus, corpus_folder: Path
) -> Iterator[WatchedCoordinator]:
    """Really trained, with a fusion block that has read an older version than the newest."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(CONFIG, Source(str(corpus_folder), None, folder), folder)
    coordinator = play(tmp_path_factory.mktemp("run"), corpus, folder, compression="none")
    yield coordinator
    coordinator.close()


def expected(coordinator: WatchedCoordinator, corpus: TokenCorpus) -> dict[str, float]:
    live = coordinator.run

    def model(pins: list[BlockVersion]) -> Model:
        read = live.store.blobs.read
        blocks = read_blocks(CONFIG, pins, lambda blob: unpack(read(blob.sha256)))
        composition_of(CONFIG).connect(CONFIG, blocks)
        return composition_of(CONFIG).assemble(CONFIG, blocks)

    newest = [live.newest(index) for index in sorted(live.state.blocks)]
    alone = model(newest[:-1])
    alone.pool_weights = fit_pool_weights(alone, corpus.calibration)
    found = cross_entropies(context_predictors(alone), corpus.valid, CONFIG.context)
    whole = model([*live.history.features[CONFIG.blocks], newest[-1]])
    fused = evaluate(whole, corpus.valid)["fuse"]
    return {**{name.replace("_", "-"): ce for name, ce in found.items()}, "fused": fused}


def test_scores_are_those_of_evaluate(trained_run: WatchedCoordinator, corpus: TokenCorpus) -> None:
    coordinator = trained_run
    wanted = expected(coordinator, corpus)
    listener = Listener(kinds=("score",))
    coordinator.feed.listen(listener)
    scorer = ScoringThread(coordinator, 1 << 20, pause=0.05)
    scorer.start()
    try:
        scored = until(listener.take, "a score", LONG)[0].value
        assert scored["scores"].keys() == wanted.keys() == {"block-1", "pool", "fused"}
        assert scored["scores"] == pytest.approx(wanted, abs=2e-4)
        status = coordinator.status()
        assert status.scores == scored["scores"]
        assert scored["versions"] == {str(block.block): block.version for block in status.blocks}
        assert scored["features"] == {"1": coordinator.run.history.features[2][0].version}
        assert scored["steps"] == {str(block.block): block.steps for block in status.blocks}
        assert scored["bytes_per_token"] == round(corpus.bytes_per_token, 4)
        assert "bits/byte" in score_line(scored)
        assert scored["valid_bytes"] == len(corpus.valid) and scored["bytes_in"] == status.bytes_in

        first = scorer.process
        assert first is not None
        assert os.getpriority(os.PRIO_PROCESS, first) == os.getpriority(os.PRIO_PROCESS, 0) + 10
    finally:
        scorer.close()
    until(lambda: not alive(first), "the end of the scorer")


def test_scoring_may_begin_after_a_pause(tmp_path: Path) -> None:
    coordinator = begin(tmp_path)
    scorer = ScoringThread(coordinator, 256, pause=600, whole_run=False)
    scorer.start()
    scorer.settle(0.1)
    assert scorer.process is None
    scorer.close()
    coordinator.close()


def test_a_run_continues_when_its_scorer_fails(tmp_path: Path) -> None:
    coordinator = begin(tmp_path)
    scorer = ScoringThread(coordinator, 256, pause=0.05)
    scorer.start()
    worker = FakeWorker(coordinator)
    task = worker.joined()
    scored = Listener(kinds=("score",))
    coordinator.feed.listen(scored)
    try:
        process = until(lambda: scorer.process, "a scorer")
        os.kill(process, signal.SIGKILL)  # before it has answered
        task = as_task(worker.send(task).next)
        again = until(lambda: scorer.process != process and scorer.process, "another scorer")
        until(scored.take, "a score by the second", LONG)
        os.kill(again, signal.SIGSTOP)  # as slow as can be
        for _ in range(3):
            task = as_task(worker.send(task).next)
        assert coordinator.status().blocks[task.block - 1].version == 4
    finally:
        scorer.close()
        coordinator.close()
    until(lambda: not alive(again), "the end of the scorer")
    scores = [event for event in read_events(tmp_path / EVENTS) if event["kind"] == "score"]
    assert all(set(event["scores"]) == {"block-1", "block-2", "pool"} for event in scores)


def test_a_scorer_dies_with_its_coordinator(tmp_path: Path) -> None:
    begin(tmp_path).close()
    code = f"""
import time
from pathlib import Path
from blocktrain.watch.server import open_coordinator
from blocktrain.watch.scoring import ScoringThread
coordinator = open_coordinator(Path({str(tmp_path)!r}))
scorer = ScoringThread(coordinator, 256)
scorer.start()
while scorer.process is None or not coordinator.feed.scores:
    time.sleep(0.02)
print(scorer.process, flush=True)
time.sleep(600)
"""
    coordinator = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert coordinator.stdout is not None
        scorer = int(coordinator.stdout.readline())
        assert alive(scorer)
    finally:
        coordinator.kill()
        coordinator.wait()
    until(lambda: not alive(scorer), "the end of the scorer")


def alive(process: int) -> bool:
    """Whether it runs; one that nobody has buried yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_sample_is_taken_from_all_over_a_long_split(trained: Model, corpus: TokenCorpus) -> None:
    long = np.tile(corpus.valid, 4)
    context = trained.config.context
    whole = cross_entropies(context_predictors(trained), long, context)
    some = sample_cross_entropies(context_predictors(trained), long, context, len(long) // 3)
    assert some.keys() == whole.keys()
    assert some == pytest.approx(whole, abs=0.1)
    assert sample_cross_entropies(context_predictors(trained), long, context, len(long)) == whole
