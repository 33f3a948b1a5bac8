"""``python -m quantforge`` and the command ``quantforge``: the command line, behind a start that can be interrupted.

The imports of the command line take longer than a person who has mistyped something. Until it answers signals itself,
an interruption ends the process at once, in one line: nothing has been begun.
"""

import os
import signal
import sys


def _stop(number: int, _frame: object) -> None:
    machine = "--json-progress" in sys.argv
    os.write(2, b'{"note": "stopped"}\n' if machine else b"stopped\n")
    os._exit(128 + number)  # an exception would be turned into others by what is being imported


def main() -> None:
    """Run the command line and exit with its code."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as background jobs of a shell do
        signal.signal(signal.SIGINT, _stop)
    from quantforge.cli.app import main as command_line

    command_line()


if __name__ == "__main__":
    main()
