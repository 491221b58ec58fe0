"""The worker's loop against a real coordinator.

It is exact, can be resumed at any point, waits for a coordinator that is away, and says honestly
which state it continues.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocktrain.audit.audit import audit
from blocktrain.audit.evidence import open_folder
from blocktrain.config import Config
from blocktrain.coordinator.policy import Policy
from blocktrain.errors import RunError, Unreachable
from blocktrain.learning.compose import independent
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.model import Block
from blocktrain.learning.train import Trainer, block_weights, read_state, write_state
from blocktrain.protocol import messages as m
from blocktrain.protocol.calls import Calls
from blocktrain.protocol.identity import new_identity
from blocktrain.protocol.refusals import Code, Refused
from blocktrain.watch.server import Listen, serve_coordinator
from blocktrain.web.client import HttpClient, LocalClient
from blocktrain.worker import loop as worker_module
from blocktrain.worker.loop import Machine
from blocktrain.worker.state import BlockFolder
from support.worker_run import SkippingClock, WorkerRun, worker_runs


@pytest.fixture
def place(tmp_path: Path, corpus_folder: Path) -> Iterator[Callable[..., WorkerRun]]:
    with worker_runs(tmp_path, corpus_folder) as make:
        yield make


def plain(config: Config, corpus: TokenCorpus) -> list[Block]:
    """What the plain loop gives, block by block."""
    blocks: dict[int, Block] = {}
    for index in range(1, config.blocks + 1):
        trainer = Trainer(config, index, independent(blocks) if config.reads(index) else [])
        for _ in trainer.run(corpus.batches(config, trainer.index), config.steps):
            pass
        blocks[index] = trainer.block
    return list(blocks.values())


def assert_plain(place: WorkerRun, corpus: TokenCorpus) -> None:
    for index, block in enumerate(plain(place.config, corpus), start=1):
        found = place.weights(index)
        for name, tensor in block_weights(block).items():
            assert np.array_equal(found[name], tensor), f"block {index}: {name}"


@pytest.mark.parametrize(
    "changes",
    [{}, {"objective": "denoise", "compose": "pool", "blocks": 2}],
    ids=["fuse", "denoise"],
)
def test_one_exact_worker_gives_the_bits_of_the_plain_loop(
    place: Callable[..., WorkerRun], corpus: TokenCorpus, changes: dict[str, Any]
) -> None:
    here = place(Policy.exact(4), **changes)
    summary = here.worker().run()
    assert summary.accepted == 3 * here.config.blocks
    assert summary.refused == 0
    assert here.coordinator.finished
    assert_plain(here, corpus)


class Disturbed:
    """A client whose calls can be made to fail, before or after the coordinator has them."""

    def __init__(self, client: Calls) -> None:
        self._client = client
        self.before: dict[str, Callable[[Any], None]] = {}
        self.after: dict[str, Callable[[Any], None]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.before.get(name, lambda _: None)(arguments)
            answer = getattr(self._client, name)(*arguments, **named)
            self.after.get(name, lambda _: None)(answer)
            return answer

        return call


@pytest.mark.parametrize(
    "when", ["before join", "before put_chunk", "after put_chunk", "before submit", "after submit"]
)
def test_a_worker_that_is_killed_goes_on_to_the_same_bits(
    place: Callable[..., WorkerRun], corpus: TokenCorpus, when: str
) -> None:
    here = place(Policy.exact(5), blocks=2)
    shared = when == "after submit"
    side, name = when.split()
    for _ in range(20):
        dead, calls = threading.Event(), 0

        def die(_: Any, dead: threading.Event = dead) -> None:
            nonlocal calls
            calls += 1
            # The second time: every life gets a little further.
            if calls == 2 or dead.is_set() or name == "join":
                dead.set()
                raise Unreachable("killed")

        client = Disturbed(LocalClient(here.coordinator))
        getattr(client, side)[name] = die
        here.worker(client, shared=shared).run(dead.is_set)
        if not dead.is_set() or name == "join":
            break
        here.restart()
    if name == "join":
        here.worker(shared=shared).run()
    assert here.coordinator.finished
    assert len(here.updates()) == 4
    assert all(update.continued.optimizer == update.continued.residual for update in here.updates())
    assert [update.continued.optimizer is None for update in here.updates()].count(True) == 2
    assert_plain(here, corpus)


def test_another_worker_takes_over_a_shared_state(
    place: Callable[..., WorkerRun], corpus: TokenCorpus
) -> None:
    here = place(Policy.exact(3), blocks=2)
    trained = threading.Event()
    here.worker(shared=True).run(finishing=lambda: len(here.events("accepted")) >= 2)
    client = Disturbed(LocalClient(here.coordinator))

    def die(_: Any) -> None:
        trained.set()
        raise Unreachable("killed")

    client.before["submit"] = die
    here.worker(client, shared=True).run(trained.is_set)  # leaves a pending update behind
    assert trained.is_set()
    here.coordinator.kick(m.Kick(worker=here.identity.worker))
    here.worker(identity=new_identity(), shared=True).run()
    assert here.events("resending")
    assert_plain(here, corpus)


def test_two_replicas_over_http_with_small_chunks(place: Callable[..., WorkerRun]) -> None:
    here = place(
        Policy(compression="int4", task_steps=4, chunk_bytes=1024, replicas=2),
        compose="pool",
        blocks=1,
        steps=12,
    )
    with serve_coordinator(here.coordinator, Listen(token="secret")) as url:
        identities = [new_identity(), new_identity()]
        workers = [
            here.worker(HttpClient(url, "secret"), identity, cache=identity.worker)
            for identity in identities
        ]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    assert here.coordinator.finished
    assert {update.worker for update in here.updates()} == {
        identity.worker for identity in identities
    }
    assert min(update.chunks for update in here.updates()) > 1
    assert sum(worker.summary.accepted for worker in workers) == len(here.updates())
    for identity in identities:
        mine = [update for update in here.updates() if update.worker == identity.worker]
        assert [u.continued.optimizer for u in mine] == [None, *(u.task for u in mine[:-1])]
        kept = list((here.folder / identity.worker / "runs").glob("*/weights/*/*"))
        assert len(kept) == 1, "the base of its last task"


def slow_upload(here: WorkerRun, *, refuse: bool) -> Disturbed:
    """The first update stays in transit until the second task is in training."""
    client = Disturbed(LocalClient(here.coordinator))
    first: list[int] = []

    def hold(arguments: Any) -> None:
        task = arguments[0].task
        first.append(task)
        if task == first[0]:
            for _ in range(2000):
                if len({fields["task"] for fields in here.events("step")}) > 1:
                    break
                threading.Event().wait(0.01)
            if refuse:
                raise Refused(Code.TOO_STALE)

    client.before["submit"] = hold
    return client


def test_the_next_task_is_trained_while_the_update_is_on_its_way(
    place: Callable[..., WorkerRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "ANSWER_SECONDS", 0.01)
    here = place(
        Policy(compression="int8", task_steps=30, replicas=1), compose="pool", blocks=1, steps=90
    )
    here.worker(slow_upload(here, refuse=False)).run()
    first, second, *_ = here.updates()
    assert here.events("sending")[0]["task"] == first.task
    assert (second.continued.optimizer, second.continued.residual) == (first.task, first.task)
    assert here.coordinator.finished


def test_nothing_of_a_refused_update_is_continued(
    place: Callable[..., WorkerRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "ANSWER_SECONDS", 0.01)
    here = place(
        Policy(compression="int8", task_steps=30, replicas=1), compose="pool", blocks=1, steps=60
    )
    here.worker(slow_upload(here, refuse=True)).run()
    refused = here.events("refused")[0]["task"]
    assert here.events("abandoned")
    assert refused not in {update.task for update in here.updates()}
    assert all(refused not in (u.continued.optimizer, u.continued.residual) for u in here.updates())
    assert here.updates()[0].continued == m.Lineage()


def test_a_coordinator_that_is_away_is_waited_for_and_named_once(
    place: Callable[..., WorkerRun], corpus: TokenCorpus
) -> None:
    here = place(Policy.exact(5), compose="pool", blocks=1)
    client = Disturbed(LocalClient(here.coordinator))
    calls = dict.fromkeys(("join", "upload_state", "put_chunk", "submit", "blob"), 0)

    def away(name: str) -> Callable[[Any], None]:
        def fail(_: Any) -> None:
            calls[name] += 1
            if calls[name] <= 1:
                raise Unreachable("nobody") if name != "submit" else Refused(Code.BUSY)

        return fail

    client.before = {name: away(name) for name in calls}
    here.worker(client, clock=SkippingClock()).run()
    # Joining, fetching, uploading; between two failures of an upload a heartbeat may get through.
    assert 3 <= len(here.events("away")) == len(here.events("back")) <= 4
    assert_plain(here, corpus)


def test_a_worker_joins_again_on_request(
    place: Callable[..., WorkerRun], corpus: TokenCorpus
) -> None:
    here = place(Policy.exact(5), compose="pool", blocks=1)
    client = Disturbed(LocalClient(here.coordinator))
    forgotten = [Refused(Code.UNKNOWN_WORKER), Refused(Code.MISSING_CHUNKS)]

    def forget(_: Any) -> None:
        if forgotten:
            raise forgotten.pop(0)

    client.before["submit"] = forget
    here.worker(client, clock=SkippingClock()).run()
    assert len(here.events("joined")) == 2
    assert_plain(here, corpus)


def test_what_a_worker_refuses(place: Callable[..., WorkerRun]) -> None:
    here = place(Policy.exact(5), blocks=2)
    with pytest.raises(RunError, match="--memory allows"):
        here.worker(machine=Machine(memory=1000)).run()

    def changed(**fields: Any) -> Disturbed:
        client = Disturbed(LocalClient(here.coordinator))
        whole = client._client.join
        client._client.join = (  # type: ignore[method-assign]
            lambda message: whole(message).model_copy(update=fields)
        )
        return client

    with pytest.raises(RunError, match="mean something else here"):
        here.worker(changed(fingerprint="0" * 64)).run()
    with pytest.raises(RunError, match="cannot read the run's settings"):
        here.worker(changed(config={"colour": 3})).run()
    with pytest.raises(RunError, match="protocol 7"):
        here.worker(changed(protocol=7)).run()
    with pytest.raises(RunError, match="not the coordinator that the run began with"):
        here.worker(changed(coordinator="ab" * 32)).run()
    with pytest.raises(Refused, match="operator removed"):
        here.coordinator.kick(m.Kick(worker=here.identity.worker))
        here.worker().run()


def test_a_forged_receipt_is_not_believed(place: Callable[..., WorkerRun]) -> None:
    here = place(Policy.exact(5), blocks=2)
    client = LocalClient(here.coordinator)
    whole = client.submit

    def forge(message: m.Submission) -> m.SubmitReply:
        reply = whole(message)
        return reply.model_copy(
            update={"receipt": reply.receipt.model_copy(update={"sentence": "thanks"})}
        )

    client.submit = forge  # type: ignore[method-assign]
    with pytest.raises(Refused) as refused:
        here.worker(client).run()
    assert refused.value.code is Code.BAD_SIGNATURE


def test_a_worker_that_finishes_its_task_leaves_and_comes_back(
    place: Callable[..., WorkerRun], corpus: TokenCorpus
) -> None:
    here = place(Policy.exact(4), blocks=2)
    assert here.worker().run(finishing=lambda: bool(here.events("task"))).accepted == 1
    state = next(
        (here.folder / "cache" / "runs").glob(f"*/{here.identity.worker}/block-1/state.safetensors")
    )
    assert [path.name for path in state.parent.iterdir()] == ["state.safetensors"]
    state.write_bytes(b"damaged")  # then it begins afresh, and says so
    here.worker().run()
    assert here.updates()[1].continued == m.Lineage()
    assert here.coordinator.finished
    assert here.worker().run().ended  # a run that is finished has nothing to do


def test_a_damaged_copy_of_the_corpus_is_fetched_again(
    place: Callable[..., WorkerRun], corpus: TokenCorpus
) -> None:
    here = place(Policy.exact(4), blocks=2)
    here.worker().run(finishing=lambda: bool(here.events("task")))
    (copy,) = (here.folder / "cache" / "shards").glob("*.tok")
    with copy.open("r+b") as file:
        file.write(b"?")
    here.worker().run()
    assert_plain(here, corpus)


def test_a_shard_that_is_damaged_at_the_coordinator_ends_the_worker_with_its_name(
    place: Callable[..., WorkerRun],
) -> None:
    here = place(Policy.exact(4), blocks=2)
    name = here.coordinator.run.corpus.index.sources[0].shards[0].sha256
    stored = here.folder / "coordinator" / "blobs" / "linked" / name
    content = stored.read_bytes()
    stored.unlink()
    stored.write_bytes(content[::-1])
    with pytest.raises(Refused, match=f"shard {name} of the corpus: .*restores the file"):
        here.worker().run()
    stored.write_bytes(content)
    here.worker().run()
    assert len(here.updates()) == 6


def test_a_cache_that_is_too_small_is_told_in_a_sentence(
    place: Callable[..., WorkerRun],
) -> None:
    here = place(Policy.exact(4), blocks=2)
    with pytest.raises(RunError, match=r"of one task take .*--cache-limit allows 1 kB; allow more"):
        here.worker(machine=Machine(cache_limit=1000)).run()


def test_pieces_of_a_pending_update_do_not_count(
    tmp_path: Path, place: Callable[..., WorkerRun]
) -> None:
    here = place(Policy.exact(4), blocks=2)
    client, dead = Disturbed(LocalClient(here.coordinator)), threading.Event()

    def die(_: Any) -> None:
        dead.set()
        raise Unreachable("killed")

    client.before["submit"] = die
    here.worker(client).run(dead.is_set)
    found = next((here.folder / "cache" / "runs").glob(f"*/{here.identity.worker}/block-1"))
    folder = BlockFolder(found)
    assert folder.pending() is not None
    (found / "pending.safetensors").replace(found / "state.safetensors")  # killed right after this
    assert folder.pending() is None
    assert sorted(path.name for path in found.iterdir()) == ["state.safetensors"]
    assert folder.load().origin.step == 4
    (found / "pending.json").write_text("{")
    (found / "pending.safetensors").touch()
    assert folder.pending() is None
    assert sorted(path.name for path in found.iterdir()) == ["state.safetensors"]


@pytest.mark.parametrize("found_later", ["as it was", "damaged", "of another task"])
def test_a_task_is_continued_where_its_worker_was_stopped(
    place: Callable[..., WorkerRun], corpus: TokenCorpus, found_later: str
) -> None:
    here = place(Policy.exact(4), blocks=2)
    here.worker().run(lambda: len(here.events("step")) == 6)  # in the middle of the second task
    (kept,) = here.folder.glob("cache/runs/*/*/block-*/paused.safetensors")
    if found_later == "damaged":
        content = bytearray(kept.read_bytes())
        content[-1] ^= 1  # of a tensor
        kept.write_bytes(content)
    elif found_later == "of another task":
        tensors, note = read_state(kept)
        told = json.loads(note)
        told["order"]["task"] += 7
        write_state(kept, tensors, json.dumps(told))
    block, made = here.events("step")[-1]["block"], here.events("step")[-1]["step"]
    here.worker().run()
    again = next(event["step"] for event in here.events("step")[6:] if event["block"] == block)
    assert again == (made + 1 if found_later == "as it was" else made - 1)
    assert not list(here.folder.glob("cache/runs/*/*/block-*/paused.safetensors"))
    assert_plain(here, corpus)


COARSE: dict[str, Any] = {
    "compression": "int2",
    "version_compression": "int2",
    "replicas": 1,
    "clip": None,
    "undefended": True,
    "exclusive": True,
}


def assert_repeatable(here: WorkerRun) -> None:
    """The audit trains all updates again to the same bytes."""
    sent = len(here.updates())
    here.coordinator.close()
    found = audit(open_folder(here.folder / "coordinator"), retrain=True)
    assert found.ok and found.retrained == sent, found.findings


def test_a_lone_worker_trains_on_with_what_it_has_not_sent_yet(
    place: Callable[..., WorkerRun],
) -> None:
    """So it trains as without compression, but for rounding."""
    shape = {"compose": "pool", "blocks": 1, "steps": 24}
    exact = place(Policy.exact(4), **shape)
    coarse = place(Policy(task_steps=4, **COARSE), **shape)
    for here in (exact, coarse):
        here.worker().run()
    losses = [[u.loss_after for u in here.updates()] for here in (exact, coarse)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    assert_repeatable(coarse)


def test_a_task_that_is_continued_keeps_what_it_began_with(
    place: Callable[..., WorkerRun],
) -> None:
    here = place(Policy(task_steps=4, **COARSE), compose="pool", blocks=1, steps=12)
    here.worker().run(lambda: len(here.events("step")) == 6)  # in the middle of the second task
    here.worker().run()
    assert here.coordinator.finished
    assert [event["step"] for event in here.events("step")] == list(range(1, 13))
    assert_repeatable(here)
