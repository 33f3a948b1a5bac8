"""Options of answers: how their tokens are chosen, what ends them, how many there are, what is told of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import typer

from quantforge.cli.completion import among
from quantforge.errors import UsageError

EARLY_STOPPING: dict[str, bool | Literal["never"]] = {
    "false": False,
    "true": True,
    "never": "never",
}


def _chosen(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="How tokens are chosen", **more)


def _ended(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="What ends an answer", **more)


def _several(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel="Several answers", **more)


MaxTokens = Annotated[int, _ended("--max-tokens", help="At most so many tokens.")]
Stop = Annotated[
    list[str] | None,
    _ended("--stop", metavar="TEXT", help="End before this text (repeatable)."),
]
IncludeStop = Annotated[
    bool, _ended("--include-stop", help="End behind the text of --stop instead.")
]
Temperature = Annotated[
    float, _chosen("--temperature", help="0 takes the most likely token, 1 draws as trained.")
]
TopK = Annotated[int, _chosen("--top-k", help="Draw of so many most likely tokens (0: all).")]
TopP = Annotated[
    float, _chosen("--top-p", help="Draw of the fewest tokens whose probability reaches this.")
]
MinP = Annotated[
    float,
    _chosen("--min-p", help="Draw of tokens that are at least this share as likely as the first."),
]
RepetitionPenalty = Annotated[
    float, _chosen("--repetition-penalty", help="Above 1: what occurred becomes less likely.")
]
FrequencyPenalty = Annotated[
    float,
    _chosen("--frequency-penalty", help="Taken from a logit each time its token was generated."),
]
PresencePenalty = Annotated[
    float, _chosen("--presence-penalty", help="Taken once from logits of what was generated.")
]
LogitBias = Annotated[
    list[str] | None,
    _chosen(
        "--logit-bias", metavar="ID=BIAS", help="Add this to a token's logit (repeatable); -100 bans it."
    ),
]  # fmt: skip
Seed = Annotated[int, _chosen("--seed", help="The same seed draws the same tokens.")]
Number = Annotated[
    int, _several("-n", "--n", help="So many answers, drawn with this seed and those after it.")
]
Beams = Annotated[
    int, _several("--beams", help="Beam search: so many continuations side by side (1: none).")
]
LengthPenalty = Annotated[
    float | None,
    _several("--length-penalty", help="Of beams: above 0 favours long ones (default: 1)."),
]
EarlyStopping = Annotated[
    str | None,
    _several(
        "--early-stopping",
        metavar="WHEN",
        help="When beams are done: true, false or never (default: false).",
        autocompletion=among(EARLY_STOPPING),
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="In --json: each token's log-probability, and the N most likely ones.",
        rich_help_panel="What is shown",
    ),
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
