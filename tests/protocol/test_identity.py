"""Identity and ledger: golden bytes and signatures, private keys, a chain that shows changes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import Damaged, IdentityError
from blocktrain.protocol import identity, ledger
from blocktrain.protocol.messages import Lineage, Signed, Submission, Wait, read, write
from blocktrain.protocol.refusals import Code, Refused
from support.protocol_samples import JOIN, MANIFEST, RECEIPT, SUBMISSION, TASK, chain

KEY = identity.identity_from_seed(bytes(range(32)))

CANONICAL = (
    '{"base":3,"block":2,"chunks":3,"continued":{"optimizer":5,"residual":null},"fence":2,"lineage":"6a6a6a6a6a6a6a6a6a6a6a6a'
    '6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a","loss_after":1e-05,"loss_before":2.5,"nonce":"2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c'
    '","payload_length":3000000,"payload_sha256":"4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e","run":"0a'
    '0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a","seconds":12.5,"steps":40,"task":7,"time":1790000000000,"tokens":81920,"worker":"1b1b1b1b1b1b1b1b1b1b1b'
    '1b1b1b1b1b"}'
)
PUBLIC = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
WORKER_ID = "56475aa75463474c0285df5dbf2bcab7"
SIGNATURE = (
    "0fbbd10fc708d875e6e94268e85430532d3b236ebfed128fb314918b3cb77429"
    "86c28f39169d30c295c5732b66dfea95b51811a56098db61d23de6dcb0791f06"
)
DIGEST = "a91982190ab2b64c82ba10c89774c14729fe6a32673b60f9aad2f469df8081c1"
LINEAGE = "256e0133cbeedfc3992ce4b34e5c7e51d6caafa15b3534ca8bfc2935e5396641"
ENTRY = "47d1c327e5b8de2887e2eebde5bc63df26ed5477911cf2f18f9d894a6621c96e"


def test_golden_canonical_bytes_and_signature() -> None:
    assert identity.canonical(SUBMISSION) == CANONICAL.encode()
    assert identity.signing_bytes(SUBMISSION) == b"blocktrain 3 Submission\n" + CANONICAL.encode()
    assert (KEY.public_key, KEY.worker) == (PUBLIC, WORKER_ID)
    assert KEY.sign(SUBMISSION).signature == SIGNATURE
    assert identity.digest(SUBMISSION) == DIGEST
    assert ledger.lineage(None, TASK.order, Lineage()) == LINEAGE
    assert ledger.entry_hash(1, "start", '{"epoch":1}', ledger.BEGINNING) == ENTRY


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0"),
        (0.0, "0.0"),
        (0.1, "0.1"),
        (1e-5, "1e-05"),
        (1e-4, "0.0001"),
        (1e8, "100000000.0"),
        (1 / 3, "0.3333333333333333"),
    ],
)
def test_golden_floats(value: float, text: str) -> None:
    """Another implementation has to write floats so."""
    message = Wait(seconds=value, code="no_work", reason='ü "quoted" \\ \n')
    reason = '"\\u00fc \\"quoted\\" \\\\ \\n"'
    expected = f'{{"code":"no_work","kind":"wait","reason":{reason},"seconds":{text}}}'
    assert identity.canonical(message) == expected.encode()


@given(st.floats(0, 1e9, allow_nan=False))
def test_canonical_bytes_are_the_same_on_both_sides(loss: float) -> None:
    message = KEY.sign(SUBMISSION.model_copy(update={"loss_before": loss}))
    arrived = read(Submission, write(message))
    assert identity.canonical(arrived) == identity.canonical(message)
    identity.verify(arrived, KEY.public_key)


@pytest.mark.filterwarnings(
    "ignore:Pydantic serializer"
)  # some changed values are of a type that no reader lets in
@pytest.mark.parametrize(
    "message", [JOIN, SUBMISSION, RECEIPT, MANIFEST], ids=lambda message: type(message).__name__
)
def test_a_change_of_any_field_breaks_the_signature(message: Signed) -> None:
    signed = KEY.sign(message)
    identity.verify(signed, KEY.public_key)
    for name in type(message).model_fields:
        value = getattr(signed, name)
        with pytest.raises(Refused) as caught:
            identity.verify(signed.model_copy(update={name: changed(value)}), KEY.public_key)
        assert caught.value.code == Code.BAD_SIGNATURE


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return ("1" if value[:1] == "0" else "0") + value[1:]
    return value + 1 if isinstance(value, int | float) else None if value is not None else 1


@pytest.mark.parametrize(
    "key", ["00" * 32, "ff" * 32, identity.identity_from_seed(bytes(32)).public_key]
)
def test_another_key_does_not_fit(key: str) -> None:
    with pytest.raises(Refused):
        identity.verify(KEY.sign(SUBMISSION), key)
    with pytest.raises(Refused):
        identity.verify(SUBMISSION, KEY.public_key)


def test_a_signature_fits_one_kind_of_message_only() -> None:
    class Lookalike(Submission):
        """The same fields under another name."""

    same = Lookalike(**dict(KEY.sign(SUBMISSION)))
    with pytest.raises(Refused):
        identity.verify(same, KEY.public_key)


def test_a_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "worker.key"
    before = os.umask(0)
    try:
        first = identity.open_identity(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (
        identity.open_identity(path).public_key
        == first.public_key
        == identity.load_identity(path).public_key
    )
    assert [file.name for file in path.parent.iterdir()] == ["worker.key"]
    assert "PRIVATE" not in repr(first) and first.public_key in repr(first)


def test_processes_that_start_at_once_share_the_key(tmp_path: Path) -> None:
    found: list[str] = []
    starts = [
        threading.Thread(
            target=lambda: found.append(identity.open_identity(tmp_path / "key").public_key)
        )
        for _ in range(8)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_bad_key_files_are_answered_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "key"
    identity.open_identity(path)
    path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        identity.load_identity(path)
    path.chmod(0o600)
    path.write_bytes(b"garbage")
    with pytest.raises(IdentityError, match="not an ed25519 key"):
        identity.open_identity(path)
    assert path.read_bytes() == b"garbage"
    with pytest.raises(IdentityError, match="cannot read"):
        identity.load_identity(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IdentityError, match="cannot write"):
        identity.open_identity(tmp_path / "file" / "key")


def test_a_whole_chain_holds_and_can_be_continued() -> None:
    entries = chain()
    assert ledger.require_chain(entries) == entries[-1]
    middle = ledger.require_chain(entries[:4])
    assert ledger.require_chain(entries[4:], middle) == entries[-1]
    assert ledger.require_chain([]) is None


@given(st.integers(0, 8), st.sampled_from(["drop", "repeat", "swap", "kind", "body", "hash"]))
def test_a_chain_shows_every_change(index: int, change: str) -> None:
    entries = chain()
    if change == "drop":
        del entries[index]
    elif change == "repeat":
        entries.insert(index, entries[index])
    elif change == "swap":
        entries[index], entries[index + 1] = entries[index + 1], entries[index]
    else:
        entries[index] = entries[index].model_copy(
            update={change: getattr(entries[index + 1], change)}
        )
    with pytest.raises(Damaged, match="the ledger is broken"):
        ledger.require_chain(entries)


def test_lineage_names_the_whole_way() -> None:
    order = TASK.order
    fresh = ledger.lineage(None, order, Lineage())
    on = ledger.lineage(fresh, order, Lineage(optimizer=5))
    assert len({fresh, on, ledger.lineage("0" * 64, order, Lineage(optimizer=5))}) == 3
    assert ledger.lineage(None, order, Lineage(residual=4)) != fresh
    assert ledger.lineage(None, TASK, Lineage()) == fresh  # the lease makes no difference
    with pytest.raises(ValueError, match="fresh"):
        ledger.lineage(None, order, Lineage(optimizer=5))
