"""Every error that a user can meet. Its message is one sentence that names the fix.

`cli` prints the sentence and exits with code 2.

BlockTrainError
├── ConfigError      a setting is wrong, alone or together with another
├── CorpusError      the text to train on is missing, empty or too short
├── RunError         a run folder is missing, damaged, of another kind, or cannot be written
│   └── FolderInUse  another process has the folder open
├── StorageFailed    a write is not durable: acknowledge nothing, exit, recover at the next start
├── Conflict         the stored state does not allow this change; nothing was changed
├── Damaged          stored bytes do not match their hash or the chain of the ledger
├── IdentityError    a key file is missing, damaged, readable by others, or cannot be written
├── Unreachable      no answer, or not in this protocol; try again later
│   └── WrongBytes   a transfer arrived with another hash than its name
├── Interrupted      the user stopped the work; everything up to the last checkpoint is saved
├── Refused          a coordinator's refusal, with a stable code (protocol/refusals.py)
├── FrameError       a frame between stages is invalid, with a stable code (protocol/frames.py)
├── StageLost        a stage has ended or does not answer in time (serving/line)
└── StageRefused     a stage's refusal, with a stable code (serving/line)
"""

from __future__ import annotations

import errno


class BlockTrainError(Exception):
    """Base of all errors that print a sentence instead of a traceback."""


class ConfigError(BlockTrainError):
    """A setting is wrong, alone or together with another."""


class CorpusError(BlockTrainError):
    """The text to train on is missing, empty or too short."""


class RunError(BlockTrainError):
    """A run folder is missing, damaged, of another kind, or cannot be written."""


class FolderInUse(RunError):
    """Another process has the folder open; `process` is its number, or "unknown"."""

    def __init__(self, sentence: str, process: str) -> None:
        super().__init__(sentence)
        self.process = process


class StorageFailed(BlockTrainError):
    """A write is not durable. Fatal: acknowledge nothing, exit, recover at the next start."""


class Conflict(BlockTrainError):
    """The stored state does not allow this change (fence, duplicate, gap); nothing was changed."""


class Damaged(BlockTrainError):
    """Stored bytes do not match their hash or the chain of the ledger."""


class IdentityError(BlockTrainError):
    """A key file is missing, damaged, readable by others, or cannot be written."""


class Unreachable(BlockTrainError):
    """No answer, or not in this protocol; try again later."""


class WrongBytes(Unreachable):
    """A transfer arrived with another hash than its name: fetch it again."""


class Interrupted(BlockTrainError):
    """The user stopped the work; everything up to the last checkpoint is saved."""


OUT_OF_MEMORY = "out of memory; use a smaller --batch, --width or --context"


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch raises a RuntimeError then."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "memory" in str(error)
    )


def explain_os_error(error: OSError) -> str:
    """An error of the system as one sentence, with the fix where there is a known one."""
    fix = {
        errno.ENOSPC: "free some space and run it again",
        errno.EDQUOT: "free some space and run it again",
        errno.EROFS: "choose a folder that can be written",
        errno.EACCES: "choose a folder that you may use",
    }
    where = f" ({error.filename})" if error.filename else ""
    advice = f"; {fix[error.errno]}" if error.errno in fix else ""
    return f"{error.strerror or error}{where}{advice}"
