"""What a worker keeps on its disk; how it is used after a kill is tested in test_loop."""

from __future__ import annotations

from pathlib import Path

from blocktrain.worker.state import own_identity


def test_workers_of_one_machine_have_keys_of_their_own(tmp_path: Path) -> None:
    with own_identity(tmp_path) as first, own_identity(tmp_path) as second:
        assert first.worker != second.worker
    with own_identity(tmp_path) as again:
        assert again.worker == first.worker
