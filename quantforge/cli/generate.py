"""``quantforge generate``: continue a text, answer, or, without a prompt, chat on the terminal.

Answers are shown as they are generated, with their speed. Several models answer in turn, and the first difference
between their answers is reported.
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
from quantforge.runtime.speculation.draft_options import DRAFT_TOKENS, NO_DRAFT, DraftOptions
from quantforge.settings import Settings, under_torchrun
from quantforge_kernels.cpu import program_cache

if TYPE_CHECKING:
    from quantforge.runtime.generated_text import Generated
    from quantforge.runtime.text_model import Messages, StreamingCompletion, TextModel

EXAMPLE = 'Example: quantforge generate demo "Explain json."'
INTERRUPTED_EXIT_CODE = 130
MAX_PROMPT_BYTES = 1 << 22  # of a piped prompt: more than fits into any model

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
# Generation options by name: type, default, help group, help text, and further arguments of `typer.Option`.
ANSWER_OPTIONS: Mapping[str, tuple[Any, Any, str, str, Mapping[str, Any]]] = {
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
                       {"metavar": "WHEN", "autocompletion": options.complete_from(EARLY_STOPPING)}),
    "logprobs": (int | None, None, SHOWN,
                 "In --json: each token's log-probability, and the N most likely ones.", {"metavar": "N"}),
}  # fmt: skip


def _answer_parameters() -> Iterator[inspect.Parameter]:
    """Yield function parameters for `ANSWER_OPTIONS`."""
    for name, (value_type, default, group, help_text, keywords) in ANSWER_OPTIONS.items():
        flags = ("-n", "--n") if name == "n" else (f"--{name.replace('_', '-')}",)
        option = typer.Option(*flags, help=help_text, rich_help_panel=group, **keywords)
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[value_type, option],
        )


@options.with_option_groups(
    answer_options=_answer_parameters(),
    run_options=options.run_options(
        "device", "threads", "input_bits", "offline", "as_json", "quiet"
    ),
)
def generate(
    model: options.Model,
    prompt: Prompt = None,
    compare: Compare = None,
    system: System = None,
    raw: Raw = False,
    *,
    answer_options: Mapping[str, Any],
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = DRAFT_TOKENS,
    draft_tree: options.DraftTree = "",
    cache: Cache = "",
    run_options: options.OptionValues,
) -> None:
    """Let models of any format continue a text, or answer where they have a chat template."""
    from quantforge.api.generate import check_draft_options, open_for_generation, open_text_model

    console, as_json = processes.console_from_options(run_options), bool(run_options["as_json"])
    parsed_options = _parse_answer_options(answer_options)
    _check_argument_order(model, prompt or "")
    _check_ranks(prompt)
    text = _read_piped_prompt() if prompt in {None, "-"} else prompt
    if text is None and (as_json or compare or parsed_options["n"] > 1):
        needing = "--json, --compare and -n need a PROMPT"
        raise UsageError(needing, 'quantforge generate MODEL "..."')
    if system is not None and raw:
        raise UsageError("--system and --raw: there is nothing to tell", "leave one out")
    if compare:
        _check_comparison(parsed_options, draft)
    _check_option_effects(parsed_options, cache, as_json=as_json)
    drafts = DraftOptions(draft or "", draft_tokens, draft_tree)
    limits = completion_options(parsed_options.pop("max_tokens"), parsed_options)
    settings = processes.settings_from_options(run_options, console, split=under_torchrun())
    models = (model, *(compare or ()))
    for name in models:  # raises for bad headers before any model is loaded
        if not is_hub_name(name.partition("@")[0]):
            open_for_generation(name, settings)
    check_draft_options(model, drafts, settings)
    console.note(f"loading {model}")  # what comes next imports torch
    if text is None:
        text_model = open_text_model(model, settings, drafts, cache)
        _chat(console, text_model, limits, system=system, raw=raw)
        return
    request = _Request(text, limits, system, raw, drafts, cache)
    with processes.print_only_once():
        outcomes = _answer_all(console, models, settings, request)
        if as_json:
            answers = [name.document() for name in outcomes]
            console.print_document(
                {"schema": "quantforge.generate/2", "prompt": text, "answers": answers}
            )
    if outcomes[-1].stopped == "interrupted":
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _parse_answer_options(answer_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation options that are given, parsed; errors as the parsers."""
    parsed = {name: value for name, value in answer_options.items() if value is not None}
    if "logit_bias" in parsed:
        parsed["logit_bias"] = _parse_logit_bias(parsed["logit_bias"])
    if "early_stopping" in parsed:
        parsed["early_stopping"] = _parse_early_stopping(parsed["early_stopping"])
    return parsed


def _parse_logit_bias(texts: Iterable[str]) -> dict[int, float]:
    """Parse texts ``ID=BIAS`` into biases by token id.

    Raises:
        UsageError: a text is malformed, or two are for the same token.
    """
    biases: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            key, value = int(token), float(bias)
        except ValueError:
            raise UsageError(
                f"--logit-bias {text}: not a bias", "e.g. --logit-bias 42=-100"
            ) from None
        if key in biases:
            raise UsageError(f"--logit-bias {text}: token {key} has one already", "give it once")
        biases[key] = value
    return biases


def _parse_early_stopping(text: str) -> bool | Literal["never"]:
    """Parse the value of ``--early-stopping``.

    Raises:
        UsageError: the value is unknown.
    """
    if text not in EARLY_STOPPING:
        raise UsageError(f"--early-stopping {text}: unknown", ", ".join(EARLY_STOPPING))
    return EARLY_STOPPING[text]


def _check_ranks(prompt: str | None) -> None:
    """Raise `UsageError` under torchrun if there is no prompt argument, since its processes share no stdin."""
    if under_torchrun() and prompt in {None, "-"}:
        raise UsageError(
            "torchrun: its processes have no terminal and no standard input in common",
            'torchrun ... -m quantforge generate MODEL "..."',
        )


def _check_comparison(answer_options: Mapping[str, Any], draft: str | None) -> None:
    """Raise `UsageError` for options that apply to one model only, if several answer."""
    if draft or answer_options["n"] > 1:
        conflict = (
            "--draft: a draft is of one model" if draft else "-n: one answer of each is compared"
        )
        raise UsageError(f"--compare and {conflict}", "leave one out")


def _check_option_effects(answer_options: Mapping[str, Any], cache: str, *, as_json: bool) -> None:
    """Raise `UsageError` for invalid options, or options that have no effect without others."""
    if cache:
        parse_cache_kind(cache)
    if "logprobs" in answer_options and not as_json:
        raise UsageError("--logprobs is told in the JSON document", "add --json")
    if answer_options.get("include_stop") and not answer_options.get("stop"):
        raise UsageError("--include-stop: no text ends the answer", "add --stop TEXT")


def _check_argument_order(model: str, prompt: str) -> None:
    """Check that the model comes before the prompt.

    Raises:
        UsageError: they are swapped.
    """
    try:
        swapped = Path(prompt).exists() and not Path(model).exists()
    except (OSError, ValueError):  # name too long, or a null character
        return
    if swapped and (Path(prompt).is_dir() or prompt.endswith(".gguf")):
        raise UsageError(
            f"{model:.60}: no such model, and the prompt '{prompt}' is one: the model comes first",
            f"quantforge generate {shlex.quote(prompt)} {shlex.quote(model)}",
        )


def _read_piped_prompt() -> str | None:
    """Read the prompt from standard input, without the final line break; None on a terminal.

    Raises:
        InputError: the prompt is not UTF-8 or too long.
        UsageError: standard input is empty.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            raise InputError(
                f"the prompt on standard input has more than {MAX_PROMPT_BYTES} bytes",
                "a shorter one",
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
class _Request:
    """Prompt and options of a request to one or several models."""

    text: str
    limits: CompletionOptions
    system: str | None
    raw: bool
    drafts: DraftOptions = NO_DRAFT
    cache: str = ""


def _answer_all(
    console: Console, models: Sequence[str], settings: Settings, request: _Request
) -> list[Generated]:
    """Let models answer in turn, one in memory at a time, and print the answers; errors as `open_text_model`.

    Unreadable models raise before the first answer. An interruption ends the answer and the list.
    """
    from quantforge.api.generate import has_template, open_text_model

    for model in models[1:]:  # the first is opened next
        if not has_template(model, settings) and request.system is not None:
            raise _missing_template_error(model)
    answers: list[Generated] = []
    for model in models:
        if len(models) > 1 and not console.as_json:
            console.print_text(f"== {model}")
        if answers:  # for the first, this note came before the imports
            console.note(f"loading {model}")
        text_model = open_text_model(model, settings, request.drafts, request.cache)
        _print_notes(console, text_model, raw=request.raw)
        prompt = _build_first_prompt(text_model, request.text, request.system)
        answer = text_model.complete(prompt, request.limits, raw=request.raw)
        answers.append(
            _collect_answer(answer) if console.as_json else _print_answer(console, answer)
        )
        del answer, text_model  # before the next one comes in
        if answers[-1].stopped == "interrupted":
            break
    for answered in answers:
        label = f"{answered.model}: " if len(models) > 1 else ""
        difference = _difference_text(answers[0], answered) if answered is not answers[0] else ""
        console.print_footer(
            f"{label}{speed_text(answered, request.limits.max_tokens)}{difference}"
        )
    return answers


def _build_first_prompt(text_model: TextModel, text: str, system: str | None) -> str | Messages:
    """Return the first prompt of a conversation, with the system prompt.

    Raises:
        UsageError: there is a system prompt, and the model has no chat template.
    """
    if system is None:
        return text
    if not text_model.has_chat_template:
        raise _missing_template_error(text_model.name)
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _missing_template_error(name: str) -> UsageError:
    return UsageError(
        f"--system: {name} has no chat template", "put it into the prompt, or leave it out"
    )


def _print_notes(console: Console, text_model: TextModel, *, raw: bool) -> None:
    """Print events and notes about a model before it answers."""
    for event in text_model.events:
        console.note(f"{event.kind}: {event.where}: {event.detail}")
    for note in () if raw else text_model.notes:
        console.note(note)
    if not text_model.has_chat_template and not raw:
        console.note(f"{text_model.name} has no chat template: it completes the prompt as text")


def _print_answer(console: Console, answer: StreamingCompletion) -> Generated:
    """Print an answer as it is generated, then further answers; Ctrl-C ends it."""
    with _interruptible():
        for piece in answer:
            program_cache.BEFORE_COMPILE_CALLBACKS.clear()  # no note within the text
            console.print_piece(piece)
    console.print_piece("\n")
    generated = answer.generated()
    for number, choice in enumerate(generated.choices[1:], 2):
        console.print_text(f"== {number} of {len(generated.choices)}")
        console.print_piece(f"{choice.text}\n")
    return generated


def speed_text(answer: Generated, max_tokens: int) -> str:
    """Return a line with token counts and speed of an answer; ``max_tokens`` was its limit."""
    prompt_rate, answer_rate = answer.prompt_tokens_per_second, answer.tokens_per_second
    longest = max(len(choice.tokens) for choice in answer.choices)
    stop_texts = {
        "end": "",
        "stop": ", ended by --stop",
        "length": f", cut by {'--max-tokens' if longest >= max_tokens else 'the end of the context'}",
        "interrupted": ", interrupted",
    }
    num_tokens, is_several = (
        sum(len(choice.tokens) for choice in answer.choices),
        len(answer.choices) > 1,
    )
    return (
        f"prompt {answer.prompt_tokens} tokens{_rate_text(prompt_rate)}; "
        f"{f'{len(answer.choices)} answers' if is_several else 'answer'} {num_tokens} tokens{_rate_text(answer_rate)}"
        f"{'' if is_several else stop_texts[answer.stopped]}{_drafting_text(answer)}{_processor_share_text(answer)}"
    )


def _processor_share_text(answer: Generated) -> str:
    """Return a text about the threads' share of processor time if other programs took some, else ""."""
    processor_share = answer.processor_share
    if processor_share is None or processor_share >= FULL_SHARE:
        return ""
    return f"; slowed down by other programs (the threads got {processor_share:.0%} of the processor time)"


def _drafting_text(answer: Generated) -> str:
    """Return a text about the acceptance of drafted tokens; "" without speculation."""
    speculation = answer.speculation
    if speculation is None:
        return ""
    if speculation["acceptance"] is None:
        return "; nothing was drafted"
    return (
        f"; {speculation['acceptance']:.0%} of the drafted tokens right,"
        f" {speculation['tokens_per_pass']:.3g} tokens a pass "
        f"({speculation['expected']:.3g} expected)"
    )


def _rate_text(value: float | None) -> str:
    return "" if value is None else f", {significant(value)} tokens/s"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end only the body."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _collect_answer(answer: StreamingCompletion) -> Generated:
    """Generate an answer without printing it; Ctrl-C ends it."""
    with _interruptible():
        for _ in answer:
            pass
    return answer.generated()


def _difference_text(first: Generated, other: Generated) -> str:
    """Return a text about the token after which an answer differs from the first model's."""
    num_equal = 0
    for first_token, other_token in zip(first.tokens, other.tokens, strict=False):
        if first_token != other_token:
            break
        num_equal += 1
    if first.tokens == other.tokens:
        return f"; the same answer as {first.model}"
    return f"; differs from {first.model} after {num_equal} tokens"


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
    """Chat on the terminal until the end of input; Ctrl-C and errors do not end it.

    A model that only completes text keeps no history.

    Raises:
        UsageError: there is a system prompt, and the model has no chat template.
    """
    keeps_history = text_model.has_chat_template and not raw
    _build_first_prompt(text_model, "", system)
    _print_notes(console, text_model, raw=raw)
    console.note(
        f"{text_model.name}: {COMMANDS}"
        if keeps_history
        else f"{text_model.name}: /exit or Ctrl-D ends"
    )
    system_messages = [] if system is None else [{"role": "system", "content": system}]
    history = list(system_messages)
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            try:
                line = _read_line(console)
                if line is None or line in {"/exit", "/quit"}:
                    return
                if line == "/reset":
                    history = list(system_messages)
                elif re.fullmatch("/[a-z]+", line):
                    console.note(COMMANDS)
                elif line:
                    messages = [*history, {"role": "user", "content": line}]
                    prompt = messages if keeps_history else line
                    answer = _print_answer(console, text_model.complete(prompt, limits, raw=raw))
                    console.note(f"[{speed_text(answer, limits.max_tokens)}]")
                    history = [*messages, {"role": "assistant", "content": answer.text}]
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one in the same moment
                console.print_piece("\n")
                console.note("Ctrl-D ends")
                signal.signal(signal.SIGINT, signal.default_int_handler)
            except QuantForgeError as error:  # a prompt that is too long, say
                console.print_error(error)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _read_line(console: Console) -> str | None:
    """Read a line from the user; None at the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401 (edits the line, and knows the earlier ones)
    try:
        return input(PROMPT).strip()
    except EOFError:
        console.print_piece("\n")
        return None
