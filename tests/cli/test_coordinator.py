"""`blocktrain coordinator`: what it leaves behind when it cannot start."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from blocktrain.cli.coordinator import Commands, ListenFlags, _self_signed, coordinator
from blocktrain.cli.flags import BeginFlags
from blocktrain.errors import BlockTrainError, ConfigError
from support.fake_worker import begin


@pytest.fixture
def taken() -> Iterator[ListenFlags]:
    """An address on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield ListenFlags(f"127.0.0.1:{other.getsockname()[1]}")


def test_a_taken_port_leaves_no_folder(tmp_path: Path, taken: ListenFlags) -> None:
    with pytest.raises(ConfigError, match="choose another with --listen"):
        coordinator(out=tmp_path / "new", address=taken)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="choose another with --listen"):
        coordinator(out=tmp_path / "empty", address=taken)
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_corpus_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BlockTrainError, match="no-such-text"):
        coordinator(
            out=tmp_path / "new",
            begin=BeginFlags("no-such-text"),
            address=ListenFlags("127.0.0.1:0"),
        )
    assert not (tmp_path / "new").exists()


def test_a_taken_port_leaves_a_run_as_it_is(tmp_path: Path, taken: ListenFlags) -> None:
    begin(tmp_path / "run").close()
    before = {path for path in (tmp_path / "run").rglob("*") if path.suffix != ".token"}
    with pytest.raises(ConfigError, match="choose another with --listen"):
        coordinator(out=tmp_path / "run", address=taken)
    assert before <= set((tmp_path / "run").rglob("*"))


def test_commands_name_a_certificate_that_clients_do_not_know(tmp_path: Path) -> None:
    authority = trustme.CA()
    own, leaf = tmp_path / "own cert.pem", tmp_path / "leaf.pem"
    authority.cert_pem.write_to_path(str(own))  # an authority's certificate is its own issuer
    authority.issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(str(leaf))
    assert _self_signed(None) is None and _self_signed(leaf) is None
    commands = Commands("https://127.0.0.1:8470", "", tmp_path / "run", _self_signed(own))
    for command in (commands.join, commands.watch, commands.pull):
        assert shlex.split(command)[-2:] == ["--ca", str(own)]
