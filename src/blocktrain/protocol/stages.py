"""Where the stages of a model are, by their own word.

Only a hint: a stage proves what it is on its own connection.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blocktrain.protocol.messages import Message, Sha256

MAX_STAGES = 256
NOTICE_SECONDS = 5.0  # between two notices of a stage
EXPIRY_SECONDS = 20.0  # that a stage is listed after its last one


class StageNotice(Message):
    """POST /v1/stages: a stage says that it serves, and repeats this every few seconds."""

    address: Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z0-9.:\[\]_-]+:[0-9]{1,5}$")]
    """host:port, as others reach it."""
    model: Sha256
    """The hash of the model that it holds blocks of."""


class StageList(Message):
    """GET /v1/stages: the stages whose notice has not expired."""

    stages: Annotated[tuple[StageNotice, ...], Field(max_length=MAX_STAGES)]
