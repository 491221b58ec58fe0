"""What attackers make of honest updates, and that they speak the protocol as workers do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from blocktrain.bench.attacks.member import AttackingWorker, attacking_payload
from blocktrain.bench.attacks.policies import ATTACKS, HonestUpdate, norm, read_mirrored
from blocktrain.coordinator.policy import Policy
from blocktrain.learning.shards import SequenceOrder, batches
from blocktrain.protocol.compression import METHODS, decompress
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.tensors import schema_of
from blocktrain.watch.checking.judge import MOST_SEQUENCES
from blocktrain.web.client import LocalClient
from support.worker_run import WorkerRun, worker_runs

DELTA = {
    name: np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    for name, shape in (("a", (40, 8)), ("head", (130,)))
}


def honest(number: int = 0) -> HonestUpdate:
    return HonestUpdate(DELTA, number, np.random.default_rng(7), 3, [{"a": -DELTA["a"]}])


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_repeat_and_keep_what_they_are_given(name: str) -> None:
    before = {key: tensor.copy() for key, tensor in DELTA.items()}
    first, again = (ATTACKS[name].change(honest()) for _ in range(2))
    assert set(first) == set(again)
    for key, tensor in first.items():
        assert tensor.dtype == np.float32 and tensor.shape == DELTA[key].shape
        np.testing.assert_array_equal(tensor, again[key])
    for key, tensor in before.items():
        np.testing.assert_array_equal(tensor, DELTA[key])


def test_lengths_of_attacks() -> None:
    usual = norm(DELTA)
    lengths = {"zeros": 0.0, "noise": 1.0, "flat": 1.0, "drift": 1.0, "sign-flip": 1.0}
    lengths |= {"scale-100": 100.0, "flip-100": 100.0, "giant-first": 1e4, "shrink": 1e-3}
    for name, factor in lengths.items():
        assert norm(ATTACKS[name].change(honest())) == pytest.approx(factor * usual, rel=1e-4), name
    assert norm(ATTACKS["turncoat"].change(honest(10))) == pytest.approx(3 * usual, rel=1e-4)
    assert norm(ATTACKS["giant-first"].change(honest(1))) == pytest.approx(usual, rel=1e-4)
    ids = np.array([[0, 3, 255]])
    assert read_mirrored(ids, 256).tolist() == [[255, 252, 0]]


@pytest.mark.parametrize("method", METHODS)
def test_numbers_that_are_not_finite_reach_the_wire(method: str) -> None:
    broken = ATTACKS["nan"].change(honest())
    payload = attacking_payload(broken, method)
    with pytest.raises(Refused) as refused:
        decompress(payload, schema_of(DELTA), method=method)
    assert refused.value.code.value in ("not_finite", "malformed")


@pytest.fixture
def runs(tmp_path: Path, corpus_folder: Path) -> Iterator[Callable[..., WorkerRun]]:
    with worker_runs(tmp_path, corpus_folder) as make:
        yield make


@pytest.mark.parametrize("name", ["sign-flip", "label-flip", "random-weights"])
def test_an_attacking_worker_sends_what_its_row_says(
    name: str, runs: Callable[..., WorkerRun]
) -> None:
    run = runs(Policy(task_steps=5, replicas=1, undefended=True), blocks=1, compose="pool")
    worker = AttackingWorker(
        LocalClient(run.coordinator),
        run.folder / "cache",
        run.identity,
        lambda *_, **__: None,
        attack=name,
    )
    worker.run()
    assert worker.summary.accepted == 2
    parts = [json.loads(e.body) for e in run.coordinator.ledger().entries if e.kind == "version"]
    assert [body["version"] for body in parts] == [0, 1, 2]
    losses = [update.loss_before for update in run.updates()]
    assert losses[1] < losses[0] if name == "label-flip" else losses[1] > losses[0]


def test_an_attacking_worker_can_train_on_the_text_of_the_last_judgement(
    runs: Callable[..., WorkerRun],
) -> None:
    run = runs(Policy(task_steps=5, replicas=1, undefended=True), blocks=1, compose="pool")
    client, cache = LocalClient(run.coordinator), run.folder / "cache"
    silent = lambda *_, **__: None  # noqa: E731
    worker = AttackingWorker(client, cache, run.identity, silent, attack="canary-overfit")
    worker.run()
    assert worker.summary.accepted == 2 and worker._canary_text(1) is None
    worker._canaries[1] = 5  # as a version of a defended run reveals it
    known = worker._canary_text(1)
    assert known is not None
    order = SequenceOrder(worker.corpus, run.config.context, 5, 1)
    expected = batches(order, run.config.batch, worker._shards.open)
    np.testing.assert_array_equal(known(0), expected(0))
    np.testing.assert_array_equal(known(MOST_SEQUENCES // run.config.batch), expected(0))
    worker._close_shards()
