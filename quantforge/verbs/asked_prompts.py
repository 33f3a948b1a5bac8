"""Prompts that an evaluation asks of every model: built-in ones, or those of a file."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from quantforge.errors import InputError, UsageError
from quantforge.verbs.scored_text import BUILTIN, cited_name

COLUMN = "prompt"
MOST_BYTES = 1 << 20
PROMPTS = (
    "Explain step by step why the sky is blue during the day and red in the evening.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think before you answer.",
    'def merge(first: list[int], second: list[int]) -> list[int]:\n    """Merge two sorted lists."""\n',
    "Write a short letter to a neighbour who plays the trumpet at night.",
)


def read_prompts(source: str, templated_by: Path | None, *, offline: bool) -> list[str]:
    """Return the prompts of a source.

    Args:
        source: ``builtin``; a text file, whose prompts are separated by empty lines; or records (``.jsonl``,
            ``.parquet``, a dataset) with a column ``prompt``, or the one that is named, or ``messages``.
        templated_by: the model whose chat template renders them, each as a question of the user.
        offline: never ask the hub.

    Raises:
        UsageError: more than one source.
        InputError: the source is missing, malformed or holds no prompt, or there is no template that renders.
    """
    from quantforge_calibration import SourceError, documents, parse_sources
    from quantforge_calibration.chat import load_chat_template, render

    try:
        rendered = None
        if templated_by is not None:
            rendered = partial(render, load_chat_template(templated_by))
        if source == BUILTIN:
            found = list(PROMPTS)
        else:
            parsed = parse_sources(source)
            if len(parsed) != 1 or parsed[0].kind in ("self", "builtin"):
                raise UsageError(
                    f"--generated {source}: one source of prompts", "give one file, or builtin"
                )
            found = list(
                documents(parsed[0], MOST_BYTES, column=COLUMN, render=rendered, offline=offline)
            )
            path = parsed[0].path
            if path is not None and path.suffix not in (".jsonl", ".parquet"):
                found = [
                    text for part in found for text in re.split(r"\n[ \t]*\n", part) if text.strip()
                ]
                found = [text.strip("\n") for text in found]
            elif rendered is not None:
                return found
        if rendered is not None:
            found = rendered([[{"role": "user", "content": text}] for text in found])
    except SourceError as error:
        raise InputError(f"--generated: {error.message}", error.hint) from error
    return found


def prompts_name(source: str) -> str:
    """Return the name of a source of prompts in reports: names and digests, no paths; errors as `read_prompts`."""
    return "builtin prompts" if source == BUILTIN else cited_name(source, "--generated")
