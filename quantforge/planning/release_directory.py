"""A directory that is given where a release file is wanted: which file was meant."""

from __future__ import annotations

import shlex
from pathlib import Path

from quantforge.errors import InputError

EXAMPLE = 'e.g. two lines, model = "demo" and sets = ["gguf-ladder"]: it is a release file, in TOML'
_MOST = 3


def is_directory(path: Path) -> InputError:
    """Return the error of a directory, with the release files that may be meant by it."""
    own = path / "release.toml"
    if own.is_file() and (path / "release.json").is_file():
        hint = (
            f"to go on with the release in it: {shlex.quote(str(own))} -o {shlex.quote(str(path))}"
        )
        return InputError(f"{path}: is a directory", hint)
    files = [own] if own.is_file() else sorted(path.glob("*.toml"))[:_MOST]
    named = " or ".join(shlex.quote(str(file)) for file in files)
    hint = f"name the file: {named}" if named else f"it holds no .toml file; {EXAMPLE}"
    return InputError(f"{path}: is a directory", hint)
