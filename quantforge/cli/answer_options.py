"""Options of answers: how their tokens are chosen, what ends them, how many there are, what is told of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any, Literal

import typer

from quantforge.cli.completion import among
from quantforge.errors import UsageError
from quantforge.runtime.generation_options import RANGES
from quantforge.verbs.generate_text import MAX_TOKENS

EARLY_STOPPING: dict[str, bool | Literal["never"]] = {
    "false": False,
    "true": True,
    "never": "never",
}
CHOSEN, ENDED, SEVERAL, SHOWN = (
    "How tokens are chosen",
    "What ends an answer",
    "Several answers",
    "What is shown",
)
Row = tuple[Any, Any, str, tuple[str, ...], str, dict[str, Any]]
# By name: type, default, group, flags, help, and what else is to be said of it.
OPTIONS: dict[str, Row] = {
    "max_tokens": (int, MAX_TOKENS, ENDED, ("--max-tokens",), "At most so many tokens.", {"min": 1}),
    "stop": (list[str] | None, None, ENDED, ("--stop",), "End before this text (repeatable).",
             {"metavar": "TEXT"}),
    "include_stop": (bool, False, ENDED, ("--include-stop",), "End behind the text of --stop instead.", {}),
    "temperature": (float, 0.0, CHOSEN, ("--temperature",),
                    "0 takes the most likely token, 1 draws as trained.", {}),
    "top_k": (int, 0, CHOSEN, ("--top-k",), "Draw of so many most likely tokens (0: all).", {}),
    "top_p": (float, 1.0, CHOSEN, ("--top-p",),
              "Draw of the fewest tokens whose probability reaches this.", {}),
    "min_p": (float, 0.0, CHOSEN, ("--min-p",),
              "Draw of tokens at least so likely as this share of the most likely one.", {}),
    "repetition_penalty": (float, 1.0, CHOSEN, ("--repetition-penalty",),
                           "Above 1: what occurred becomes less likely.", {}),
    "frequency_penalty": (float, 0.0, CHOSEN, ("--frequency-penalty",),
                          "Taken from a logit each time its token was generated.", {}),
    "presence_penalty": (float, 0.0, CHOSEN, ("--presence-penalty",),
                         "Taken once from logits of what was generated.", {}),
    "logit_bias": (list[str] | None, None, CHOSEN, ("--logit-bias",),
                   "Add this to a token's logit (repeatable); -100 bans it.", {"metavar": "ID=BIAS"}),
    "seed": (int, 0, CHOSEN, ("--seed",), "The same seed draws the same tokens.", {}),
    "n": (int, 1, SEVERAL, ("-n", "--n"), "So many answers, drawn with this seed and those after it.",
          {"min": 1}),
    "beams": (int, 1, SEVERAL, ("--beams",),
              "Beam search: so many continuations side by side (1: none).", {"min": 1}),
    "length_penalty": (float | None, None, SEVERAL, ("--length-penalty",),
                       "Of beams: above 0 favours long ones (default: 1).", {}),
    "early_stopping": (str | None, None, SEVERAL, ("--early-stopping",),
                       "When beams are done: true, false or never (default: false).",
                       {"metavar": "WHEN", "autocompletion": among(EARLY_STOPPING)}),
    "logprobs": (int | None, None, SHOWN, ("--logprobs",),
                 "In --json: each token's log-probability, and the N most likely ones.", {"metavar": "N"}),
}  # fmt: skip


def takes_answer_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of `OPTIONS` in place of its parameter ``given``, which gets those that say something.

    Raises:
        UsageError: when it is called, with a bias or a rule that cannot be read.
    """
    parameters: list[inspect.Parameter] = []
    for name, one in inspect.signature(verb, eval_str=True).parameters.items():
        parameters += _parameters() if name == "given" else [one]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]

    @wraps(verb)
    def command(**values: Any) -> None:
        given = {name: values.pop(name) for name in OPTIONS}
        if given["logit_bias"] is not None:
            given["logit_bias"] = biases(given["logit_bias"])
        if given["early_stopping"] is not None:
            given["early_stopping"] = early_stopping(given["early_stopping"])
        for name in RANGES.keys() & given.keys():
            if given[name] is not None:
                RANGES[name].check(name, given[name])  # before anything is loaded
        verb(**values, given={name: value for name, value in given.items() if value is not None})

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _parameters() -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[
                kind, typer.Option(*flags, help=said, rich_help_panel=group, **more)
            ],
        )
        for name, (kind, default, group, flags, said, more) in OPTIONS.items()
    ]


def biases(texts: Iterable[str]) -> dict[int, float]:
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


def early_stopping(text: str) -> bool | Literal["never"]:
    """Parse the rule for the end of a beam search.

    Raises:
        UsageError: there is no such rule.
    """
    if text not in EARLY_STOPPING:
        raise UsageError(f"--early-stopping {text}: unknown", ", ".join(EARLY_STOPPING))
    return EARLY_STOPPING[text]
