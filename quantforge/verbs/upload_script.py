"""Finished variants of a release, the repositories of the hub that they go to, and the script that takes them there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantforge.results.card_figures import CARD
from quantforge.verbs.release_place import SUMS

_FILES = "GGUF"  # ends the name of the repository of all files


@dataclass(frozen=True, slots=True)
class ReleasedVariant:
    """A finished variant.

    Attributes:
        name: of the file.
        out: the directory or file.
        format, method: of its plan.
        weight_bytes: of the weight files.
        figures: measured ones; empty where nothing was scored.
        failed: the gates that it is beyond, in words.
    """

    name: str
    out: Path
    format: str
    method: str
    weight_bytes: int
    figures: Mapping[str, Any]
    failed: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the variant as plain data; its place is inside of the release."""
        return {
            **asdict(self),
            "out": f"{self.out.parent.name}/{self.out.name}",
            "failed": list(self.failed),
        }


def repository_of(begun: str, out: Path) -> str:
    """Return where a variant is uploaded to, the model's name said once; "" where no repository is stated.

    Args:
        begun: ``ORG/NAME``, with which the names of all repositories begin.
        out: the variant; files of one folder share a repository.
    """
    named = out.name.removeprefix(f"{begun.rpartition('/')[2]}-")
    return begun and f"{begun}-{_FILES if out.is_file() else named}"


def upload_command(script: Path, begun: str) -> str:
    """Return what a person types to upload a release.

    Args:
        script: by `upload_script`.
        begun: as `repository_of`; where it is empty the script is told it.
    """
    return f"sh {shlex.quote(str(script))}{'' if begun else ' ORG/NAME'}"


def upload_script(begun: str, variants: Sequence[ReleasedVariant]) -> str:
    """Return a script for a shell with one command for each repository; variants that failed are left out.

    Args:
        begun: as `repository_of`.
        variants: of the release.
    """
    named = shlex.quote(begun) if begun else '${1:?"usage: sh upload.sh ORG/NAME"}'
    lines = [
        "#!/bin/sh",
        "# Uploads this release with the command hf of huggingface_hub.",
        "set -eu",
    ]
    lines += [
        'CDPATH= cd -- "$(dirname -- "$0")"',
        f"cut -c 67- {SUMS} | while IFS= read -r file; do",
        '    test -f "$file" || { echo "$file is missing: put it back first" >&2; exit 1; }',
        "done",
        f"repository={named}",
        "begun=${repository##*/}-",
    ]
    files = [one for one in variants if one.out.is_file() and not one.failed]
    if files:
        chosen = [shlex.quote(f"{one.name}.gguf{rest}") for one in files for rest in ("", ".*")]
        taken = " ".join(f"--include {text}" for text in (CARD, *chosen))
        lines.append(f'hf upload "$repository-{_FILES}" gguf . {taken}')
    for one in variants:
        if not one.out.is_file() and not one.failed:
            lines.append(f"name={one.name}")  # the repository may begin with the same word
            lines.append(f'hf upload "$repository-${{name#"$begun"}}" {one.format}/{one.name} .')
    lines += [f"# {one.name} failed: {'; '.join(one.failed)}" for one in variants if one.failed]
    return "\n".join(lines) + "\n"
