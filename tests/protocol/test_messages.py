"""Messages: every kind survives the wire, bad ones do not, every refusal has a sentence."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import make_config
from blocktrain.protocol import messages
from blocktrain.protocol.messages import (
    MAX_JSON,
    Message,
    Order,
    Receipt,
    Submission,
    TaskReply,
    read,
    write,
)
from blocktrain.protocol.refusals import RULES, Code, Refused, Then
from support.protocol_samples import CONFIG, JOIN, MANIFEST, MESSAGES, RECEIPT, SUBMISSION, TASK

KINDS = {type(message): message for message in MESSAGES}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert read(type(message), write(message), messages.MAX_REPLY) == message


def test_every_message_is_in_the_samples() -> None:
    defined = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message)
    }
    inner = {"Message", "Signed", "Blob", "CorpusBlobs", "BlockVersion", "Lineage", "Held"}
    assert {kind.__name__ for kind in defined - KINDS.keys()} == inner


@pytest.mark.parametrize("message", KINDS.values(), ids=lambda message: type(message).__name__)
def test_unknown_fields_are_refused(message: Message) -> None:
    body = json.loads(write(message)) | {"surprise": 1}
    assert refusal_of(type(message), body) == Code.MALFORMED


def refusal_of(kind: type[Message], body: Any) -> Code:
    with pytest.raises(Refused) as caught:
        read(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert len(caught.value.sentence) <= 500
    return caught.value.code


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", 0),
        ("task", "7"),
        ("task", 7.0),
        ("task", True),
        ("task", 2**53),
        ("block", 257),
        ("base", -1),
        ("run", "../../etc/passwd"),
        ("run", "0A" * 16),
        ("run", "0a" * 16 + "\n"),
        ("payload_sha256", "4e" * 31),
        ("payload_length", 0),
        ("chunks", 1 << 17),
        ("tokens", None),
        ("loss_after", float("nan")),
        ("loss_after", float("inf")),
        ("loss_after", -0.5),
        ("loss_after", "1"),
        ("signature", "00"),
        ("signature", "G" * 128),
        ("nonce", ""),
        ("continued", {"optimizer": 0}),
        ("continued", None),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: Any) -> None:
    assert refusal_of(Submission, json.loads(write(SUBMISSION)) | {field: value}) == Code.MALFORMED


def test_sizes_are_refused_before_parsing() -> None:
    assert refusal_of(Submission, b"[" * (MAX_JSON + 1)) == Code.TOO_LARGE
    assert refusal_of(Submission, b"[" * MAX_JSON) == Code.MALFORMED
    assert refusal_of(Submission, b"\xff\xfe") == Code.MALFORMED


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        JOIN.name = "other"


def test_the_config_on_the_wire_has_the_same_fingerprint() -> None:
    arrived = read(messages.Manifest, write(MANIFEST))
    assert (
        make_config(dict(arrived.config)).fingerprint == arrived.fingerprint == CONFIG.fingerprint
    )


def test_the_largest_honest_requests_and_manifests_fit_the_limits() -> None:
    version = messages.BlockVersion(
        block=256, version=10**6, weights=messages.Blob(sha256="0" * 64, length=1 << 40)
    )
    assert len(write(MANIFEST.model_copy(update={"blocks": (version,) * 256}))) < MAX_JSON
    assert len(write(TASK.model_copy(update={"features": (version,) * 255}))) < MAX_JSON
    everything = messages.UploadState(task=1, have=tuple(range(1 << 16)))
    assert len(write(everything)) < messages.MAX_REPLY


def test_next_is_a_task_or_wait_by_its_kind() -> None:
    body = json.loads(write(TaskReply(next=TASK)))
    assert body["next"]["kind"] == "task"
    assert refusal_of(TaskReply, {"next": body["next"] | {"kind": "wait"}}) == Code.MALFORMED
    assert refusal_of(TaskReply, {"next": body["next"] | {"kind": "other"}}) == Code.MALFORMED


def test_an_order_is_a_task_without_its_lease() -> None:
    order = TASK.order
    assert (
        type(order) is Order and order.task == TASK.task and "ticket" not in write(order).decode()
    )


def test_a_receipt_says_one_thing() -> None:
    body = json.loads(write(RECEIPT))
    assert refusal_of(Receipt, body | {"code": "too_stale"}) == Code.MALFORMED
    assert refusal_of(Receipt, body | {"weight": 1.5}) == Code.MALFORMED
    assert refusal_of(Receipt, body | {"accepted": False}) == Code.MALFORMED
    no = read(
        Receipt, json.dumps(body | {"accepted": False, "code": "too_stale", "weight": 0.0}).encode()
    )
    assert no.code is Code.TOO_STALE


def test_an_update_is_named_by_its_task_and_payload() -> None:
    assert (
        SUBMISSION.update == hashlib.sha256(f"7:{SUBMISSION.payload_sha256}".encode()).hexdigest()
    )


def test_the_chunks_of_a_submission_fit_its_length() -> None:
    assert SUBMISSION.plan(1 << 20).chunks == 3
    with pytest.raises(Refused) as caught:
        SUBMISSION.plan(1 << 21)
    assert caught.value.code == Code.MALFORMED


def test_every_code_has_a_status_and_a_sentence_that_names_the_fix() -> None:
    assert RULES.keys() == set(Code)
    for code, rule in RULES.items():
        assert 200 <= rule.status < 600 and isinstance(rule.then, Then)
        assert (
            ";" in rule.sentence and rule.sentence[0].islower() and not rule.sentence.endswith(".")
        ), code
        body = messages.refusal(Refused(code, "x" * 1000))
        assert len(body.sentence) <= 500 and read(messages.Refusal, write(body)) == body
    assert len({rule.sentence for rule in RULES.values()}) == len(RULES)


def test_the_document_has_every_code_and_message() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    for code, rule in RULES.items():
        assert f"| `{code}` | {rule.status} | `{rule.then}` | {rule.sentence} |" in text
    for kind in KINDS:
        assert kind.__name__.endswith("Facts") or f"**{kind.__name__}**" in text, kind
        if issubclass(kind, messages.Signed | messages.Order):
            assert [
                name
                for name in kind.model_fields
                if f"`{name}`" not in text and f"`{name}?`" not in text
            ] == []


def test_codes_are_stable() -> None:
    assert sorted(Code) == [
        "bad_signature",
        "bad_token",
        "block_finished",
        "busy",
        "damaged",
        "disk_limit",
        "duplicate",
        "hash_mismatch",
        "kicked",
        "lease_expired",
        "length_required",
        "malformed",
        "missing_chunks",
        "not_finite",
        "not_found",
        "not_your_task",
        "over_quota",
        "replayed",
        "run_finished",
        "stale_fence",
        "storage_failed",
        "task_answered",
        "too_large",
        "too_many_requests",
        "too_slow",
        "too_stale",
        "unknown_block",
        "unknown_task",
        "unknown_worker",
        "wrong_base",
        "wrong_encoding",
        "wrong_fingerprint",
        "wrong_host",
        "wrong_origin",
        "wrong_protocol",
        "wrong_run",
        "wrong_shape",
        "wrong_stage_key",
        "wrong_steps",
        "wrong_type",
        "wrong_weight",
    ]


def test_the_room_needs_no_torch() -> None:
    names = "compression, identity, ledger, messages, refusals, status, transfer"
    code = (
        f"import sys; from blocktrain.protocol import {names};"
        " sys.exit('torch' in sys.modules or 'blocktrain.learning' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
