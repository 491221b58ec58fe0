"""A process that trains updates again; it needs torch.

    python -m blocktrain.watch.checking.retrain

A question names an update and those whose states it continues. The answer says how far it is from
what comes out here.
"""

from __future__ import annotations

from typing import Any

from blocktrain.audit.replay import TrainingText, distance
from blocktrain.config import make_config
from blocktrain.errors import BlockTrainError
from blocktrain.learning.shards import read_index
from blocktrain.learning.tokenizer import load_tokenizer
from blocktrain.protocol.ledger import UpdateBody
from blocktrain.store.open import read_blobs
from blocktrain.watch.scorer import answer_lines


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        config = make_config({**question["config"], "device": "cpu"})
        blobs = read_blobs(question["store"])
        if question["tokenizer"] is not None:
            load_tokenizer(blobs.read(question["tokenizer"]))
        chain = [UpdateBody.model_validate_json(answer) for answer in question["chain"]]
        index = read_index(blobs.read(question["index"]))
        read = lambda blob: blobs.read(blob.sha256)  # noqa: E731
        text = TrainingText(config, index, read, question["alone"])
        return {"distance": distance(chain, text)}
    except (BlockTrainError, OSError, RuntimeError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    answer_lines(_answer)
