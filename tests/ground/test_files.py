"""Secrets and training states are private from their first byte on, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blocktrain.cli.coordinator import ListenFlags, RunningCoordinator
from blocktrain.cli.environment import OPERATOR_TOKEN
from blocktrain.files import make_private, replace_file, write_atomic
from blocktrain.learning.train import write_state
from blocktrain.worker.state import own_identity


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_private_before_it_has_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for _ in range(2):  # new, then replaced
        with replace_file(path, private=True) as partial:
            assert mode(partial) == 0o600 and partial.stat().st_size == 0
            partial.write_bytes(b"x")
        assert mode(path) == 0o600
    write_atomic(tmp_path / "public", b"x")
    assert mode(tmp_path / "public") == 0o666


def test_what_a_killed_process_left_is_not_written_into(tmp_path: Path) -> None:
    left = tmp_path / f".secret.{os.getpid()}.partial"
    left.write_bytes(b"old")
    with left.open("rb") as opened_by_another:
        write_atomic(tmp_path / "secret", b"new", private=True)
        assert opened_by_another.read() == b"old"


def test_the_operator_token_is_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A16: another user of the machine reads the operator's token before its mode is set."""
    seen: dict[str, int] = {}
    rename = Path.replace

    def watched(path: Path, target: Path) -> Path:
        seen[Path(target).name] = mode(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    with RunningCoordinator(tmp_path / "run", ListenFlags("127.0.0.1:0")) as running:
        running.coordinator.feed.put("finish", reason="so that the folder stays")
        assert seen[OPERATOR_TOKEN] == mode(running.folder / OPERATOR_TOKEN) == 0o600
        assert mode(running.folder / "coordinator.pem") == 0o600


def test_a_worker_keeps_its_cache_to_itself(tmp_path: Path) -> None:
    """A16: another user reads a worker's key and cache."""
    cache = tmp_path / "new" / "cache"
    with own_identity(cache):
        for folder in (cache.parent, cache, cache / "identities"):
            assert mode(folder) == 0o700
        assert mode(cache / "identities" / "0.pem") == 0o600
    tmp_path.chmod(0o755)
    make_private(tmp_path / "cache")
    assert mode(tmp_path) == 0o755, "a folder that was there stays as it is"


def test_a_training_state_is_private(tmp_path: Path) -> None:
    """A16: another user reads a training state."""
    write_state(tmp_path / "state.safetensors", {"a": torch.zeros(2)}, "note")
    assert mode(tmp_path / "state.safetensors") == 0o600
