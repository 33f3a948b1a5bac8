"""Words of a text that another does not have in their place."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

Part = tuple[str, bool]  # text, and whether it differs


def marked(text: str, reference: str) -> list[Part]:
    """Cut a text into parts that it shares with a reference, in order, and parts that differ."""
    words, others = (re.findall(r"\s+|[^\s]+", item) for item in (text, reference))
    found: list[Part] = []
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    for kind, first, last, _, _ in matcher.get_opcodes():
        part = "".join(words[first:last])
        if part:
            found.append((part, kind != "equal" and not part.isspace()))
    return found
