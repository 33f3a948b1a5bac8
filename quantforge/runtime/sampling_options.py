"""Rules by which the next token is chosen from logits, by the usual definitions, in this order.

1. *Logit bias*: a number is added to the logits of some tokens (OpenAI's ``logit_bias``).
2. *Repetition penalty* r: the logit l of a token that occurred, in the prompt or since, becomes l / r if it is positive
   and l r otherwise (CTRL, arXiv 1909.05858; ``repetition_penalty`` of transformers and vLLM).
3. *Frequency* and *presence penalty* f and p: the logit of a token that was generated c > 0 times becomes l - c f - p;
   the prompt does not count (OpenAI's definition, which vLLM shares).
4. *Temperature* t: logits are divided by it; 0 takes the most likely token, and what follows here changes nothing.
5. *Top-k* leaves out all tokens less likely than the k-th (those as likely as it stay, as in transformers).
6. *Top-p* leaves out all but the smallest set whose probability reaches p (nucleus sampling, arXiv 1904.09751), of
   equally likely ones those of lower ids; probabilities are those that step 5 has left.
7. *Min-p* leaves out what is less likely than m times the most likely token (arXiv 2407.01082).

The order is that of transformers' processors; in vLLM min-p comes before top-k. Then one token is drawn by the inverse
of the cumulative distribution (`quantforge.runtime.sampling`), with one uniform number for each, from a seeded
generator of the CPU: the same seed gives the same tokens anywhere. *Log-probabilities* are those of the model itself,
before step 1, as vLLM reports them unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quantforge.errors import UsageError

MOST = 1e308  # of a number without a limit
MOST_SEED = (1 << 63) - 1  # what torch's generator takes
MOST_LOGPROBS = 20  # as OpenAI's API


@dataclass(frozen=True, slots=True)
class Range:
    """Values that an option takes, and the rule in words.

    Attributes:
        rule: in words.
        least: smallest value.
        most: largest value.
        above: the smallest value itself is left out.
        whole: only integers.
    """

    rule: str
    least: float = 0
    most: float = MOST
    above: bool = False
    whole: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse a value.

        Raises:
            UsageError: it is out of the range, or of another type.
        """
        good = type(value) is int or (type(value) is float and not self.whole)
        if not (good and self.least <= value <= self.most) or (self.above and value <= self.least):
            raise UsageError(f"{name} = {value!a:.60}", self.rule)


PENALTY = Range("a number from -2 to 2", -2, 2)
BIAS = Range("token ids from 0 on, each with a number from -100 to 100", -100, 100)
RANGES: Mapping[str, Range] = {
    "temperature": Range("a number from 0 on (0: the most likely token)"),
    "top_k": Range("a whole number from 0 on (0: all)", whole=True),
    "top_p": Range("a number above 0 and at most 1 (1: all)", 0, 1, above=True),
    "min_p": Range("a number from 0 to 1 (0: all)", 0, 1),
    "repetition_penalty": Range("a number from 0.01 to 100 (1: none)", 0.01, 100),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "seed": Range("a whole number from 0 to 2^63 - 1", 0, MOST_SEED, whole=True),
    "logprobs": Range(f"a whole number from 0 to {MOST_LOGPROBS}", 0, MOST_LOGPROBS, whole=True),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rule by which tokens are chosen; the default takes the most likely one.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is all.
        top_p: 1 is all.
        repetition_penalty: 1 is none.
        seed: of the generator.
        min_p: 0 is all.
        frequency_penalty: for each time that a token was generated.
        presence_penalty: once for a token that was generated.
        logit_bias: by token id.
        logprobs: tell the log-probability of each token chosen, and of so many most likely ones; None tells nothing.

    Raises:
        UsageError: a value out of its range, see `RANGES`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, values in RANGES.items():
            value = getattr(self, name)
            if not (name == "logprobs" and value is None):
                values.check(name, value)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias = {self.logit_bias!a:.60}", BIAS.rule)
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not 0 <= token <= MOST_SEED:
                raise UsageError(f"logit_bias of token {token!a:.60}", BIAS.rule)
            BIAS.check(f"logit_bias of token {token}", bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def counted(self) -> bool:
        """Return whether it matters which tokens occurred."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1)
        return any(penalties)

    def numbered(self, number: int) -> Sampling:
        """Return the rule for one of several answers to a prompt: the seed is ``number`` higher (as in vLLM)."""
        return replace(self, seed=(self.seed + number) % (MOST_SEED + 1))
