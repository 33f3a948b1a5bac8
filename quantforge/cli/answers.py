"""Answers shown as they come, with their speed; of several models side by side, with what differs from the first."""

from __future__ import annotations

import difflib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.cli.console import Console, spoken
from quantforge.errors import UsageError
from quantforge.execution.progress import Progress
from quantforge.numerics.shared_processors import FULL_SHARE
from quantforge.results.significant import significant
from quantforge.runtime.speculation.options import NO_DRAFT, DraftOptions
from quantforge.settings import Settings
from quantforge.verbs.generate_text import has_template, open_speaker
from quantforge_kernels.cpu import program_cache

if TYPE_CHECKING:
    from rich.text import Text

    from quantforge.runtime.generated_text import Generated
    from quantforge.runtime.generation_options import AnswerLimits
    from quantforge.runtime.text_model import LiveAnswer, Messages, TextModel

LEAST_WIDTH = 30  # of a column


@dataclass(frozen=True, slots=True)
class Asked:
    """A question: what is said, under which rules; ``system`` goes before it, ``raw`` leaves out the template."""

    text: str
    limits: AnswerLimits
    system: str | None
    raw: bool
    drafts: DraftOptions = NO_DRAFT
    cache: str = ""


def ask_all(
    console: Console, models: Sequence[str], settings: Settings, asked: Asked
) -> list[Generated]:
    """Let models answer one after another (one is in memory at a time), and show it; errors as `open_speaker`.

    What cannot be read of any of them is refused before the first answers. An interruption ends the answer, and with it
    the list.
    """
    for model in models[1:]:  # the first is opened next
        if not has_template(model, settings) and asked.system is not None:
            raise _no_template(model)
    columns = len(models) > 1 and sys.stdout.isatty()
    columns = columns and console.width // len(models) >= LEAST_WIDTH
    hidden = columns or console.as_json
    found: list[Generated] = []
    for model in models:
        if len(models) > 1 and not hidden:
            console.text(f"== {model}")
        if found:  # the first was told of before all imports
            console.note(f"loading {model}")
        speaker = open_speaker(model, settings, asked.drafts, asked.cache)
        tell(console, speaker, raw=asked.raw)
        prompt = opening(speaker, asked.text, asked.system)
        answer = speaker.answer(prompt, asked.limits, raw=asked.raw)
        found.append(_collect(console, answer) if hidden else say(console, answer))
        del answer, speaker  # before the next one comes in
        if found[-1].stopped == "interrupted":
            break
    if columns and not console.as_json:
        _side_by_side(found)
    for one in found:
        label = f"{one.model}: " if len(models) > 1 else ""
        parting = _parting(found[0], one) if one is not found[0] else ""
        console.footer(f"{label}{speed_of(one, asked.limits.max_tokens)}{parting}")
    return found


def opening(speaker: TextModel, text: str, system: str | None) -> str | Messages:
    """Return the first prompt of a conversation.

    Raises:
        UsageError: a system prompt for a model without a template.
    """
    if system is None:
        return text
    if not speaker.templated:
        raise _no_template(speaker.name)
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _no_template(name: str) -> UsageError:
    return UsageError(
        f"--system: {name} has no chat template", "put it into the prompt, or leave it out"
    )


def tell(console: Console, speaker: TextModel, *, raw: bool) -> None:
    """Say what a person should know of a model before it answers."""
    for event in speaker.events:
        console.note(f"{event.kind}: {event.where}: {event.detail}")
    for note in () if raw else speaker.notes:
        console.note(note)
    if not speaker.templated and not raw:
        console.note(f"{speaker.name} has no chat template: it completes the prompt as text")


def say(console: Console, answer: LiveAnswer) -> Generated:
    """Show an answer as it comes, and further ones behind it; Ctrl-C ends it."""
    with interruptible():
        for piece in answer:
            program_cache.LISTENERS.clear()  # no note within the text
            console.piece(piece)
    console.piece("\n")
    found = answer.generated()
    for number, other in enumerate(found.choices[1:], 2):
        console.text(f"== {number} of {len(found.choices)}")
        console.piece(f"{other.text}\n")
    return found


def speed_of(one: Generated, most: int) -> str:
    """Return the figures of an answer of ``most`` tokens at most as a line."""
    prompt, steps = one.prompt_tokens_per_second, one.tokens_per_second
    longest = max(len(choice.tokens) for choice in one.choices)
    words = {
        "end": "",
        "stop": ", ended by --stop",
        "length": f", cut by {'--max-tokens' if longest >= most else 'the end of the context'}",
        "interrupted": ", interrupted",
    }
    count, several = sum(len(choice.tokens) for choice in one.choices), len(one.choices) > 1
    return (
        f"prompt {one.prompt_tokens} tokens{_rate(prompt)}; "
        f"{f'{len(one.choices)} answers' if several else 'answer'} {count} tokens{_rate(steps)}"
        f"{'' if several else words[one.stopped]}{_drafted(one)}{_displaced(one)}"
    )


def _displaced(one: Generated) -> str:
    """Return how much processor time the threads got where other programs took some, or nothing."""
    share = one.processor_share
    if share is None or share >= FULL_SHARE:
        return ""
    return f"; slowed down by other programs (the threads got {share:.0%} of the processor time)"


def _drafted(one: Generated) -> str:
    """Return what came of drafted tokens, or nothing."""
    found = one.speculation
    if found is None:
        return ""
    if found["acceptance"] is None:
        return "; nothing was drafted"
    return (
        f"; {found['acceptance']:.0%} of the drafted tokens right, {found['tokens_per_pass']:.3g} tokens a pass "
        f"({found['expected']:.3g} expected)"
    )


def _rate(value: float | None) -> str:
    return "" if value is None else f", {significant(value)} tokens/s"


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end what happens inside, and nothing else."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)


def _collect(console: Console, answer: LiveAnswer) -> Generated:
    with console.watch(), interruptible():
        for _ in answer:
            one = answer.generated()
            console.show(Progress(phase=f"answer of {one.model}", step=f"{len(one.tokens)} tokens"))
    return answer.generated()


def _parting(first: Generated, other: Generated) -> str:
    """Return where an answer parts from the first model's, in tokens."""
    same = 0
    for one, two in zip(first.tokens, other.tokens, strict=False):
        if one != two:
            break
        same += 1
    if first.tokens == other.tokens:
        return f"; the same answer as {first.model}"
    return f"; parts from {first.model} after {same} tokens"


def _side_by_side(found: Sequence[Generated]) -> None:
    """Draw a column for each model; words that the first one does not have there are marked."""
    from rich.console import Console as Rich
    from rich.table import Table

    drawn = Table(expand=True)
    for one in found:
        drawn.add_column(one.model, ratio=1, overflow="fold")
    first = _words(spoken(found[0].text))
    drawn.add_row(*(_marked(first, _words(spoken(one.text))) for one in found))
    Rich().print(drawn)


def _words(text: str) -> list[str]:
    return re.findall(r"\S+|\s+", text)


def _marked(first: Sequence[str], words: Sequence[str]) -> Text:
    from rich.text import Text

    drawn = Text()
    matcher = difflib.SequenceMatcher(None, first, words, autojunk=False)
    for kind, _, _, begin, end in matcher.get_opcodes():
        drawn.append("".join(words[begin:end]), "" if kind == "equal" else "bold underline")
    return drawn
