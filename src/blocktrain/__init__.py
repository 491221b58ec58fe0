"""BlockTrain: train one language model together on machines that never meet.

The Python API; each name is loaded when it is first used:

    import blocktrain as bt

    model = bt.train("stdlib", size="2M", steps=200)
    print(model.generate("def "))
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blocktrain.api.coordination import CoordinatedRun, coordinate
    from blocktrain.api.model import CrossEntropy, TrainedModel
    from blocktrain.api.network import pull, work
    from blocktrain.api.serving import ModelServer, serve
    from blocktrain.api.training import Training, train
    from blocktrain.errors import BlockTrainError

__all__ = [
    "BlockTrainError",
    "CoordinatedRun",
    "CrossEntropy",
    "ModelServer",
    "TrainedModel",
    "Training",
    "coordinate",
    "pull",
    "serve",
    "train",
    "work",
]
_MODULES = {
    "coordination": ("CoordinatedRun", "coordinate"),
    "model": ("CrossEntropy", "TrainedModel"),
    "network": ("pull", "work"),
    "serving": ("ModelServer", "serve"),
    "training": ("Training", "train"),
}
_HOMES = {name: f"blocktrain.api.{module}" for module, names in _MODULES.items() for name in names}
_HOMES["BlockTrainError"] = "blocktrain.errors"

try:
    __version__ = version("blocktrain")
except PackageNotFoundError:  # run from a source tree
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'blocktrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
