"""Sections of a results file: a script renews its own, and what other scripts wrote stays."""

from __future__ import annotations

import re
from pathlib import Path


def renew(path: Path, text: str) -> None:
    """Write the sections of a text (``## ...``) into a file, in the place of those of the same heading, or behind all.

    What stands above the first section replaces what stands there in the file, if it is anything.
    """
    top, sections = _cut(path.read_text(encoding="utf-8") if path.exists() else "")
    new_top, new_sections = _cut(text)
    parts = [new_top or top, *(sections | new_sections).values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _cut(text: str) -> tuple[str, dict[str, str]]:
    """Return what stands above the first section, and the sections by heading."""
    top, *sections = (part.strip() for part in re.split(r"^(?=## )", text, flags=re.MULTILINE))
    return top, {section.partition("\n")[0]: section for section in sections}
