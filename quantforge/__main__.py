"""``python -m quantforge``: the same as the command ``quantforge``."""

from quantforge.cli.app import main

if __name__ == "__main__":
    main()
