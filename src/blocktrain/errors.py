"""Every error a user can meet, as one tree:

BlockTrainError            the message is one sentence that names the fix; `cli` prints it and exits 2
├── ConfigError            a setting, alone or together with another, makes no sense
├── CorpusError            the text to train on is missing, empty or too short
├── RunError               a run folder is missing, foreign, damaged, or cannot be written
├── StorageFailed          a write was not made durable; fatal: acknowledge nothing, exit, recover at the next start
├── Conflict               the stored state does not allow this change (fence, double, gap); nothing was changed
├── Damaged                stored bytes are not those that their name or chain promises
├── IdentityError          a key file is missing, damaged, readable by others, or cannot be written
├── Unreachable            nobody answered at the other end of a line, or not in this protocol; try again later
├── Refused                a coordinator's typed no, with a stable code (protocol/refusals.py)
├── FrameError             bytes between stages that are refused, with a stable code (protocol/frames.py)
├── StageLost              a stage is gone, or silent although something was due (serving/connection.py)
├── StageRefused           a stage's typed no, with a stable code (serving/connection.py)
└── Interrupted            the user stopped the work; everything up to the last checkpoint is saved
"""

from __future__ import annotations

import errno


class BlockTrainError(Exception):
    """Base of all errors that are answered with a sentence instead of a traceback."""


class ConfigError(BlockTrainError):
    """A setting, alone or together with another, makes no sense."""


class CorpusError(BlockTrainError):
    """The text to train on is missing, empty or too short."""


class RunError(BlockTrainError):
    """A run folder is missing, foreign, damaged, or cannot be written."""


class StorageFailed(BlockTrainError):
    """A write was not made durable. Fatal: acknowledge nothing, exit, recover at the next start."""


class Conflict(BlockTrainError):
    """The stored state does not allow this change (fence, double, gap); nothing was changed."""


class Damaged(BlockTrainError):
    """Stored bytes are not those that their name or chain promises."""


class IdentityError(BlockTrainError):
    """A key file is missing, damaged, readable by others, or cannot be written."""


class Unreachable(BlockTrainError):
    """Nobody answered at the other end of a line, or not in this protocol; try again later."""


class Interrupted(BlockTrainError):
    """The user stopped the work; everything up to the last checkpoint is saved."""


OUT_OF_MEMORY = "out of memory; use a smaller --batch, --width or --context"


def out_of_memory(error: Exception) -> bool:
    """Whether memory was wanting; torch says so by a RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "memory" in str(error)
    )


def broken(error: OSError) -> str:
    """What the system refused, as one sentence; what was saved before stays."""
    fix = {
        errno.ENOSPC: "free some room and call it again",
        errno.EDQUOT: "free some room and call it again",
        errno.EROFS: "choose a folder that can be written",
        errno.EACCES: "choose a folder that may be used",
    }
    where = f" ({error.filename})" if error.filename else ""
    advice = f"; {fix[error.errno]}" if error.errno in fix else ""
    return f"{error.strerror or error}{where}{advice}"
