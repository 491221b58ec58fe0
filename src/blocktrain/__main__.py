"""Where the command begins: Ctrl-C ends it without a word also while it is still being loaded."""

from __future__ import annotations

import sys


def main() -> None:
    """`blocktrain`, and `python -m blocktrain`."""
    try:
        from blocktrain.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
