"""Torch's threads: one policy, in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import blocktrain.config
from blocktrain.learning.corpus.token_corpus import TokenCorpus
from blocktrain.learning.threads import limited_threads, use_threads
from blocktrain.runs import results
from conftest import random_model, tiny_config
from support.serving import saved

ROOT = Path(blocktrain.config.__file__).parent


def test_the_number_from_before_is_restored_even_after_an_error() -> None:
    use_threads(3)
    with pytest.raises(RuntimeError, match="odd"), limited_threads():
        assert torch.get_num_threads() == 1
        raise RuntimeError("odd")
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("count", [1, 2])
def test_an_evaluation_computes_on_the_threads_that_the_user_asks_for(
    tmp_path: Path, corpus: TokenCorpus, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Torch's default, a thread per core, takes many times longer on a busy machine."""
    seen: list[int] = []

    def record_threads(*_: object, **__: object) -> dict[str, float]:
        seen.append(torch.get_num_threads())
        return {"composed": 1.0}

    use_threads(3)
    model = random_model(tiny_config())
    monkeypatch.setattr(results, "evaluate", record_threads)
    folder = saved(model, tmp_path / "run")
    threads = {} if count == 1 else {"threads": count}
    results.evaluate_run(folder, model, corpus, draws=1, progress=lambda _: None, **threads)
    assert seen == [count] and torch.get_num_threads() == 3


def test_nothing_else_decides_about_threads() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("set_num_threads", "set_num_interop_threads")
    }
    assert users == {"learning/threads.py"}
