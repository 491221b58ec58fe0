"""The table of commands, and `main`: errors become one sentence and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from cyclopts import App, CycloptsError, Group

from blocktrain.cli import (
    bench,
    coordinator,
    data,
    evaluate,
    generate,
    plan,
    run,
    serve,
    simulate,
    train,
)
from blocktrain.cli.flags import HELP_ALL, explain
from blocktrain.errors import (
    OUT_OF_MEMORY,
    BlockTrainError,
    Interrupted,
    explain_os_error,
    out_of_memory,
)

Command = Callable[..., None]
COMMANDS: dict[str, tuple[Command, ...]] = {
    "On this machine": (
        train.train,
        evaluate.evaluate,
        generate.generate,
        evaluate.export,
        evaluate.push,
        data.data,
    ),
    "Across machines": (
        plan.plan,
        coordinator.coordinator,
        run.worker,
        run.doctor,
        run.status,
        run.kick,
        run.pull,
        run.audit,
        run.replay,
        simulate.simulate,
        simulate.fuzz,
        simulate.chaos,
    ),
    "Serving": (serve.serve, serve.stage),
}
BENCHES: tuple[Command, ...] = (
    bench.quality,
    bench.gaps,
    bench.attacks,
    bench.memory,
    bench.step,
    bench.hardware,
    bench.transport,
    bench.coordinator,
    bench.corpus,
    bench.serving,
    bench.failover,
)

app = App(
    name="blocktrain",
    help="Train one language model together on machines that never meet, "
    "and serve it from those machines.",
    version_flags=["--version"],
    help_flags=["--help", "-h", HELP_ALL],
)
bench_app = App(
    name="bench",
    help="Measure. Every published figure comes from one of these commands.",
    group=Group("Measuring", sort_key=len(COMMANDS)),
)
for place, (title, commands) in enumerate(COMMANDS.items()):
    group = Group(title, sort_key=place)
    for number, command in enumerate(commands):  # help lists them in this order
        app.command(command, group=group, sort_key=number)
for number, command in enumerate(BENCHES):
    bench_app.command(command, sort_key=number)
app.command(bench_app)


def main() -> None:
    """Run a command; known errors become one sentence on stderr and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _fail(explain(error))
    except Interrupted as error:
        _fail(str(error), 130)
    except BlockTrainError as error:
        _fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        _fail(explain_os_error(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _fail(OUT_OF_MEMORY)


def _fail(sentence: str, code: int = 2) -> None:
    print(f"blocktrain: {sentence}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
