"""``quantforge generate``: a model continues a text or answers; without a prompt, a terminal gets a chat.

Answers are shown as they come, with their speed; those of several models one after another, with where they differ.
"""

from __future__ import annotations

import inspect
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantforge.artifacts.number_text import significant
from quantforge.cache_kinds import FORM, WORDS, completions, parse_cache_kind
from quantforge.cli import options, processes
from quantforge.cli.console import Console
from quantforge.errors import InputError, QuantForgeError, UsageError
from quantforge.files.hub import is_hub_name
from quantforge.numerics.shared_processors import FULL_SHARE
from quantforge.runtime.generation_options import MAX_TOKENS, CompletionOptions, completion_options
from quantforge.runtime.speculation.options import DRAFT_TOKENS, NO_DRAFT, DraftOptions
from quantforge.settings import Settings, under_torchrun
from quantforge_kernels.cpu import program_cache

if TYPE_CHECKING:
    from quantforge.runtime.generated_text import Generated
    from quantforge.runtime.text_model import Messages, StreamingCompletion, TextModel

EXAMPLE = 'Example: quantforge generate demo "Explain json."'
INTERRUPTED = 130
MOST_BYTES = 1 << 22  # of a prompt that is piped in: more than any model has positions for

EARLY_STOPPING: dict[str, bool | Literal["never"]] = {
    "false": False,
    "true": True,
    "never": "never",
}
ANSWERS = "Who answers, and to what"

Prompt = Annotated[
    str | None,
    typer.Argument(
        help="What is said (default: what is piped in, on a terminal a chat).", metavar="[PROMPT]"
    ),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare",
        metavar="MODEL",
        help="Let this model answer too (repeatable).",
        rich_help_panel=ANSWERS,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system", metavar="TEXT", help="Said to a chat model before all.", rich_help_panel=ANSWERS
    ),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Complete the prompt as text, without the chat template.",
        rich_help_panel=ANSWERS,
    ),
]
Cache = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="KIND",
        autocompletion=completions,
        help=f"How keys and values are stored: {', '.join(WORDS)}, or {FORM}.",
    ),
]


CHOSEN, ENDED, SEVERAL, SHOWN = (
    "How tokens are chosen",
    "What ends an answer",
    "Several answers",
    "What is shown",
)
# Options of answers, by name: type, default, group, help, and what else is to be said of it.
OPTIONS: Mapping[str, tuple[Any, Any, str, str, Mapping[str, Any]]] = {
    "max_tokens": (int, MAX_TOKENS, ENDED, "At most so many tokens.", {"min": 1}),
    "stop": (list[str] | None, None, ENDED, "End before this text (repeatable).",
             {"metavar": "TEXT"}),
    "include_stop": (bool, False, ENDED, "End behind the text of --stop instead.", {}),
    "temperature": (float, 0.0, CHOSEN,
                    "0 takes the most likely token, 1 draws as trained.", {}),
    "top_k": (int, 0, CHOSEN, "Draw of so many most likely tokens (0: all).", {}),
    "top_p": (float, 1.0, CHOSEN,
              "Draw of the fewest tokens whose probability reaches this.", {}),
    "min_p": (float, 0.0, CHOSEN,
              "Draw of tokens at least so likely as this share of the most likely one.", {}),
    "repetition_penalty": (float, 1.0, CHOSEN,
                           "Above 1: what occurred becomes less likely.", {}),
    "frequency_penalty": (float, 0.0, CHOSEN,
                          "Taken from a logit each time its token was generated.", {}),
    "presence_penalty": (float, 0.0, CHOSEN,
                         "Taken once from logits of what was generated.", {}),
    "logit_bias": (list[str] | None, None, CHOSEN,
                   "Add this to a token's logit (repeatable); -100 bans it.", {"metavar": "ID=BIAS"}),
    "seed": (int, 0, CHOSEN, "The same seed draws the same tokens.", {}),
    "n": (int, 1, SEVERAL, "So many answers, drawn with this seed and those after it.",
          {"min": 1}),
    "beams": (int, 1, SEVERAL,
              "Beam search: so many continuations side by side (1: none).", {"min": 1}),
    "length_penalty": (float | None, None, SEVERAL,
                       "Of beams: above 0 favours long ones (default: 1).", {}),
    "early_stopping": (str | None, None, SEVERAL,
                       "When beams are done: true, false or never (default: false).",
                       {"metavar": "WHEN", "autocompletion": options.among(EARLY_STOPPING)}),
    "logprobs": (int | None, None, SHOWN,
                 "In --json: each token's log-probability, and the N most likely ones.", {"metavar": "N"}),
}  # fmt: skip


def _answer_parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command for `OPTIONS`."""
    for name, (kind, default, group, about, more) in OPTIONS.items():
        flags = ("-n", "--n") if name == "n" else (f"--{name.replace('_', '-')}",)
        option = typer.Option(*flags, help=about, rich_help_panel=group, **more)
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )


@options.takes(
    given=_answer_parameters(),
    run=options.run_options("device", "threads", "input_bits", "offline", "as_json", "quiet"),
)
def generate(
    model: options.Model,
    prompt: Prompt = None,
    compare: Compare = None,
    system: System = None,
    raw: Raw = False,
    *,
    given: Mapping[str, Any],
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = DRAFT_TOKENS,
    draft_tree: options.DraftTree = "",
    cache: Cache = "",
    run: options.Given,
) -> None:
    """Let models of any format continue a text, or answer where they have a chat template."""
    from quantforge.api.generate import check_draft_options, open_for_generation, open_text_model

    console, as_json = processes.console_of(run), bool(run["as_json"])
    rules = _typed_options(given)
    _check_order(model, prompt or "")
    _check_ranks(prompt)
    text = _piped() if prompt in {None, "-"} else prompt
    if text is None and (as_json or compare or rules["n"] > 1):
        needing = "--json, --compare and -n need a PROMPT"
        raise UsageError(needing, 'quantforge generate MODEL "..."')
    if system is not None and raw:
        raise UsageError("--system and --raw: there is nothing to tell", "leave one out")
    if compare:
        _check_compared(rules, draft)
    _check_effect(rules, cache, as_json=as_json)
    drafts = DraftOptions(draft or "", draft_tokens, draft_tree)
    limits = completion_options(rules.pop("max_tokens"), rules)
    settings = processes.settings_of(run, console, split=under_torchrun())
    models = (model, *(compare or ()))
    for one in models:  # what headers refuse is refused before one is said to load
        if not is_hub_name(one.partition("@")[0]):
            open_for_generation(one, settings)
    check_draft_options(model, drafts, settings)
    console.note(f"loading {model}")  # what comes next imports torch
    if text is None:
        text_model = open_text_model(model, settings, drafts, cache)
        _chat(console, text_model, limits, system=system, raw=raw)
        return
    asked = _Question(text, limits, system, raw, drafts, cache)
    with processes.only_first_prints():
        found = _answer_all(console, models, settings, asked)
        if as_json:
            answers = [one.document() for one in found]
            console.document(
                {"schema": "quantforge.generate/1", "prompt": text, "answers": answers}
            )
    if found[-1].stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _typed_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of answers that say something; errors as `_biases` and `_early_stopping`."""
    found = {name: value for name, value in given.items() if value is not None}
    if "logit_bias" in found:
        found["logit_bias"] = _biases(found["logit_bias"])
    if "early_stopping" in found:
        found["early_stopping"] = _early_stopping(found["early_stopping"])
    return found


def _biases(texts: Iterable[str]) -> dict[int, float]:
    """Parse ``ID=BIAS``.

    Raises:
        UsageError: it is none, or two are for one token.
    """
    found: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            key, value = int(token), float(bias)
        except ValueError:
            raise UsageError(
                f"--logit-bias {text}: not a bias", "e.g. --logit-bias 42=-100"
            ) from None
        if key in found:
            raise UsageError(f"--logit-bias {text}: token {key} has one already", "give it once")
        found[key] = value
    return found


def _early_stopping(text: str) -> bool | Literal["never"]:
    """Parse the rule for the end of a beam search.

    Raises:
        UsageError: there is no such rule.
    """
    if text not in EARLY_STOPPING:
        raise UsageError(f"--early-stopping {text}: unknown", ", ".join(EARLY_STOPPING))
    return EARLY_STOPPING[text]


def _check_ranks(prompt: str | None) -> None:
    """Refuse a prompt that torchrun's processes could not read alike, as `UsageError`."""
    if under_torchrun() and prompt in {None, "-"}:
        raise UsageError(
            "torchrun: its processes have no terminal and no standard input in common",
            'torchrun ... -m quantforge generate MODEL "..."',
        )


def _check_compared(given: Mapping[str, Any], draft: str | None) -> None:
    """Refuse what is of one model where several answer, as `UsageError`."""
    if draft or given["n"] > 1:
        other = (
            "--draft: a draft is of one model" if draft else "-n: one answer of each is compared"
        )
        raise UsageError(f"--compare and {other}", "leave one out")


def _check_effect(given: Mapping[str, Any], cache: str, *, as_json: bool) -> None:
    """Refuse options that mean nothing, or have no effect without others, as `UsageError`."""
    if cache:
        parse_cache_kind(cache)
    if "logprobs" in given and not as_json:
        raise UsageError("--logprobs is told in the JSON document", "add --json")
    if given.get("include_stop") and not given.get("stop"):
        raise UsageError("--include-stop: no text ends the answer", "add --stop TEXT")


def _check_order(model: str, prompt: str) -> None:
    """Refuse a prompt that stands before its model.

    Raises:
        UsageError: with the two exchanged.
    """
    try:
        swapped = Path(prompt).exists() and not Path(model).exists()
    except (OSError, ValueError):  # too long for a name, or a null
        return
    if swapped and (Path(prompt).is_dir() or prompt.endswith(".gguf")):
        raise UsageError(
            f"{model:.60}: no such model, and the prompt '{prompt}' is one: the model comes first",
            f"quantforge generate {shlex.quote(prompt)} {shlex.quote(model)}",
        )


def _piped() -> str | None:
    """Read the prompt from standard input, without the end of its last line; None on a terminal.

    Raises:
        InputError: it is not UTF-8, or longer than any prompt.
        UsageError: there is none.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InputError(
                f"the prompt on standard input has more than {MOST_BYTES} bytes", "a shorter one"
            )
        text = data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the prompt on standard input is not UTF-8: {error}", "convert it"
        ) from error
    if not text:
        raise UsageError(
            "no prompt, and nothing on standard input", 'quantforge generate MODEL "..."'
        )
    return text


# ---- answers


@dataclass(frozen=True, slots=True)
class _Question:
    """A question: what is said, under which rules; ``system`` goes before it, ``raw`` leaves out the template."""

    text: str
    limits: CompletionOptions
    system: str | None
    raw: bool
    drafts: DraftOptions = NO_DRAFT
    cache: str = ""


def _answer_all(
    console: Console, models: Sequence[str], settings: Settings, asked: _Question
) -> list[Generated]:
    """Let models answer one after another (one is in memory at a time), and show it; errors as `open_text_model`.

    What cannot be read of any of them is refused before the first answers. An interruption ends the answer, and with it
    the list.
    """
    from quantforge.api.generate import has_template, open_text_model

    for model in models[1:]:  # the first is opened next
        if not has_template(model, settings) and asked.system is not None:
            raise _no_template(model)
    found: list[Generated] = []
    for model in models:
        if len(models) > 1 and not console.as_json:
            console.text(f"== {model}")
        if found:  # the first was told of before all imports
            console.note(f"loading {model}")
        text_model = open_text_model(model, settings, asked.drafts, asked.cache)
        _print_notes(console, text_model, raw=asked.raw)
        prompt = _first_prompt(text_model, asked.text, asked.system)
        answer = text_model.complete(prompt, asked.limits, raw=asked.raw)
        found.append(_whole_answer(answer) if console.as_json else _print_answer(console, answer))
        del answer, text_model  # before the next one comes in
        if found[-1].stopped == "interrupted":
            break
    for one in found:
        label = f"{one.model}: " if len(models) > 1 else ""
        differs = _where_it_differs(found[0], one) if one is not found[0] else ""
        console.footer(f"{label}{speed_of(one, asked.limits.max_tokens)}{differs}")
    return found


def _first_prompt(text_model: TextModel, text: str, system: str | None) -> str | Messages:
    """Return the first prompt of a conversation.

    Raises:
        UsageError: a system prompt for a model without a template.
    """
    if system is None:
        return text
    if not text_model.has_chat_template:
        raise _no_template(text_model.name)
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _no_template(name: str) -> UsageError:
    return UsageError(
        f"--system: {name} has no chat template", "put it into the prompt, or leave it out"
    )


def _print_notes(console: Console, text_model: TextModel, *, raw: bool) -> None:
    """Say what a person should know of a model before it answers."""
    for event in text_model.events:
        console.note(f"{event.kind}: {event.where}: {event.detail}")
    for note in () if raw else text_model.notes:
        console.note(note)
    if not text_model.has_chat_template and not raw:
        console.note(f"{text_model.name} has no chat template: it completes the prompt as text")


def _print_answer(console: Console, answer: StreamingCompletion) -> Generated:
    """Show an answer as it comes, and further ones behind it; Ctrl-C ends it."""
    with _interruptible():
        for piece in answer:
            program_cache.BEFORE_COMPILE_CALLBACKS.clear()  # no note within the text
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
        f"prompt {one.prompt_tokens} tokens{_rate_words(prompt)}; "
        f"{f'{len(one.choices)} answers' if several else 'answer'} {count} tokens{_rate_words(steps)}"
        f"{'' if several else words[one.stopped]}{_drafting_words(one)}{_processor_words(one)}"
    )


def _processor_words(one: Generated) -> str:
    """Return how much processor time the threads got where other programs took some, or nothing."""
    share = one.processor_share
    if share is None or share >= FULL_SHARE:
        return ""
    return f"; slowed down by other programs (the threads got {share:.0%} of the processor time)"


def _drafting_words(one: Generated) -> str:
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


def _rate_words(value: float | None) -> str:
    return "" if value is None else f", {significant(value)} tokens/s"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end what happens inside, and nothing else."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)


def _whole_answer(answer: StreamingCompletion) -> Generated:
    """Return a whole answer, shown as a document alone; Ctrl-C ends it."""
    with _interruptible():
        for _ in answer:
            pass
    return answer.generated()


def _where_it_differs(first: Generated, other: Generated) -> str:
    """Return after how many tokens an answer differs from the first model's, as text."""
    same = 0
    for one, two in zip(first.tokens, other.tokens, strict=False):
        if one != two:
            break
        same += 1
    if first.tokens == other.tokens:
        return f"; the same answer as {first.model}"
    return f"; differs from {first.model} after {same} tokens"


# ---- a chat on a terminal


PROMPT = "> "
COMMANDS = "/reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C ends an answer"


def _chat(
    console: Console,
    text_model: TextModel,
    limits: CompletionOptions,
    *,
    system: str | None,
    raw: bool,
) -> None:
    """Answer line after line until the end of input, which neither Ctrl-C nor a refusal is.

    A model that only completes text keeps no history.

    Raises:
        UsageError: a system prompt for a model without a template.
    """
    remembers = text_model.has_chat_template and not raw
    _first_prompt(text_model, "", system)
    _print_notes(console, text_model, raw=raw)
    console.note(
        f"{text_model.name}: {COMMANDS}"
        if remembers
        else f"{text_model.name}: /exit or Ctrl-D ends"
    )
    first = [] if system is None else [{"role": "system", "content": system}]
    history = list(first)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            try:
                line = _line(console)
                if line is None or line in {"/exit", "/quit"}:
                    return
                if line == "/reset":
                    history = list(first)
                elif re.fullmatch("/[a-z]+", line):
                    console.note(COMMANDS)
                elif line:
                    talk = [*history, {"role": "user", "content": line}]
                    asked = talk if remembers else line
                    found = _print_answer(console, text_model.complete(asked, limits, raw=raw))
                    console.note(f"[{speed_of(found, limits.max_tokens)}]")
                    history = [*talk, {"role": "assistant", "content": found.text}]
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one in the same moment
                console.piece("\n")
                console.note("Ctrl-D ends")
                signal.signal(signal.SIGINT, signal.default_int_handler)
            except QuantForgeError as error:  # a prompt that is too long, say
                console.error(error)
    finally:
        signal.signal(signal.SIGINT, before)


def _line(console: Console) -> str | None:
    """Read a line of a person; None at the end."""
    with suppress(ImportError):
        import readline  # noqa: F401 (edits the line, and knows the earlier ones)
    try:
        return input(PROMPT).strip()
    except EOFError:
        console.piece("\n")
        return None
