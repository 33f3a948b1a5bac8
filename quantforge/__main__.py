"""Entry point of ``python -m quantforge`` and of the command ``quantforge``, interruptible from the start.

Importing the command line takes long enough that a user may interrupt it. Until it handles signals itself, an
interruption ends the process at once with a one-line message, because no work has begun.
"""

import os
import signal
import sys


def _exit_on_signal(number: int, _frame: object) -> None:
    as_json = "--json-progress" in sys.argv
    os.write(2, b'{"note": "stopped"}\n' if as_json else b"stopped\n")
    os._exit(128 + number)  # modules that are being imported could convert an exception


def main() -> None:
    """Run the command line and exit with its code."""
    if (
        signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    ):  # a shell ignores SIGINT for background jobs
        signal.signal(signal.SIGINT, _exit_on_signal)
    from quantforge.cli.app import main as command_line

    command_line()


if __name__ == "__main__":
    main()
