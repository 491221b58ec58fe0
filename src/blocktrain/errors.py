"""Every error a user can meet, as one tree:

BlockTrainError            the message is one sentence that names the fix; `cli` prints it and exits 2
├── ConfigError            a setting, alone or together with another, makes no sense
├── CorpusError            the text to train on is missing, empty or too short
├── RunError               a run folder is missing, foreign, damaged, or cannot be written
└── Interrupted            the user stopped the work; everything up to the last checkpoint is saved
"""


class BlockTrainError(Exception):
    """Base of all errors that are answered with a sentence instead of a traceback."""


class ConfigError(BlockTrainError):
    """A setting, alone or together with another, makes no sense."""


class CorpusError(BlockTrainError):
    """The text to train on is missing, empty or too short."""


class RunError(BlockTrainError):
    """A run folder is missing, foreign, damaged, or cannot be written."""


class Interrupted(BlockTrainError):
    """The user stopped the work; everything up to the last checkpoint is saved."""
