"""Text that an evaluation scores, prompts that its models answer: each from one source, with its name in reports."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.errors import InputError, UsageError

if TYPE_CHECKING:
    from quantforge_calibration.chat import ChatTemplate
    from quantforge_calibration.readers import UnusedColumns

BUILTIN = "builtin"
BYTES_OF_TOKEN = 32  # more than a token has: so much text is enough
OWN = "evaluation.txt"  # beside a reference: the text that is scored where none is named
PROMPT_COLUMN = "prompt"
MOST_PROMPT_BYTES = 1 << 20  # of all prompts, rendered where a template is used
MOST_PROMPTS = 1000
PROMPTS = (
    "Explain step by step why the sky is blue during the day and red in the evening.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think before you answer.",
    'def merge(first: list[int], second: list[int]) -> list[int]:\n    """Merge two sorted lists."""\n',
    "Write a short letter to a neighbour who plays the trumpet at night.",
)


def own_text(reference: Path) -> str:
    """Return the source of the text that lies beside a reference, or `BUILTIN` where there is none."""
    place = reference / OWN
    return str(place) if reference.is_dir() and place.is_file() else BUILTIN


def read_text(source: str, max_bytes: int, *, offline: bool) -> str:
    """Read the text of a source, as one document of about ``max_bytes`` at most.

    Raises:
        UsageError: more than one source, or one that the model would write itself.
        InputError: the source is missing or malformed.
    """
    from quantforge_calibration import SourceError, documents, parse_sources

    try:
        parsed = parse_sources(source)
        if len(parsed) != 1 or parsed[0].kind == "self":
            raise UsageError(
                f"--text {source}: one text is scored at a time", "give one file or source"
            )
        found = documents(parsed[0], max_bytes, corpus="evaluation", offline=offline)
        return "\n\n".join(found)
    except SourceError as error:
        raise InputError(f"--text: {error.message}", error.hint) from error


def check_text(reference: Path, source: str, length: int | None, *, offline: bool) -> None:
    """Refuse, before results are made that are to be scored, a text that has no window of ``length`` tokens.

    Raises:
        UsageError: as `read_text`.
        InputError: the text cannot be read, is too short, or the reference has no tokenizer.
    """
    from quantforge.evaluation.text_windows import LENGTH, cut_windows
    from quantforge.formats.open_model import open_model
    from quantforge.runtime.text_processing import load_model_tokenizer

    tokens = LENGTH if length is None else length
    text_name(source)
    text = read_text(source, BYTES_OF_TOKEN * tokens, offline=offline)
    cut_windows(load_model_tokenizer(open_model(reference)), text, 1, tokens)


def text_name(source: str) -> str:
    """Return the name of a text in reports: names and digests, no paths; errors as `read_text`."""
    return "builtin evaluation text" if source == BUILTIN else cited_name(source, "--text")


def read_prompts(
    source: str,
    templated_by: Path | None,
    *,
    offline: bool,
    note: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Return the prompts of a source.

    Args:
        source: ``builtin``; a text file, whose prompts are separated by empty lines; or records (``.jsonl``,
            ``.parquet``, a dataset) with a column ``prompt``, or the one that is named, or ``messages``.
        templated_by: the model whose chat template renders them, each as a question of the user.
        offline: never ask the hub.
        note: takes what a person should know: columns that are not used, templates that are not.

    Raises:
        UsageError: more than one source.
        InputError: the source is missing, malformed, too long or holds no prompt, or there is no template that renders.
    """
    from quantforge_calibration import SourceError
    from quantforge_calibration.chat import load_chat_template
    from quantforge_calibration.conversations import Conversation
    from quantforge_calibration.readers import UnusedColumns

    try:
        template, unused = None, UnusedColumns()
        if templated_by is not None:
            template = load_chat_template(templated_by)
            for said in template.notes:
                note(f"--generated: {said}")
        if source == BUILTIN:
            found, texts = list(PROMPTS), True
        else:
            found, texts = _read_prompts(source, template, unused, offline=offline)
        if len(found) > MOST_PROMPTS:
            raise _too_many_prompts(f"{len(found)} prompts, more than {MOST_PROMPTS}")
        if template is not None and texts:
            talks = (Conversation([{"role": "user", "content": text}]) for text in found)
            found = [template.render(talk) for talk in talks]
    except SourceError as error:
        raise InputError(f"--generated: {error.message}", error.hint) from error
    if said := unused.note():
        note(f"--generated: {said}")
    return found


def _read_prompts(
    source: str, template: ChatTemplate | None, unused: UnusedColumns, *, offline: bool
) -> tuple[list[str], bool]:
    """Return the prompts of a source, and whether they are texts that nobody has rendered; errors as `read_prompts`."""
    from quantforge_calibration import documents, parse_sources

    parsed = parse_sources(source)
    if len(parsed) != 1 or parsed[0].kind in ("self", "builtin"):
        raise UsageError(
            f"--generated {source}: one source of prompts", "give one file, or builtin"
        )
    more = MOST_PROMPT_BYTES + 4  # what was cut there, in a character even, is still longer
    found = list(
        documents(
            parsed[0], more, column=PROMPT_COLUMN, chat=template, offline=offline, unused=unused
        )
    )
    if sum(len(text.encode()) for text in found) > MOST_PROMPT_BYTES:
        raise _too_many_prompts(f"more than {MOST_PROMPT_BYTES} bytes")
    path = parsed[0].path
    if path is None or path.suffix in (".jsonl", ".parquet"):
        return found, template is None
    parts = [text for part in found for text in re.split(r"\n[ \t]*\n", part) if text.strip()]
    return [text.strip("\n") for text in parts], True


def _too_many_prompts(what: str) -> InputError:
    return InputError(f"--generated: {what}", "a part of them: each is answered by every model")


def prompts_name(source: str) -> str:
    """Return the name of a source of prompts in reports: names and digests, no paths; errors as `read_prompts`."""
    return "builtin prompts" if source == BUILTIN else cited_name(source, "--generated")


def cited_name(source: str, option: str) -> str:
    """Return the name of a source with its digest, for a report; ``option`` is named in errors.

    Raises:
        InputError: the source is missing.
    """
    from quantforge_calibration import SourceError
    from quantforge_calibration.citation import cite

    try:
        found = cite(source)
    except SourceError as error:
        raise InputError(f"{option}: {error.message}", error.hint) from error
    digests = [digest.partition("  ")[0] for digest in found.digests]
    return f"{found.source} (SHA-256 {', '.join(digests)})" if digests else found.source
