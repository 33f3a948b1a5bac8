"""Options of text generation: sampling, beam search, length limits and stop strings. Imports no torch.

The next token is chosen from logits by the usual definitions, in this order (`Sampling`):

1. *Logit bias*: a number is added to the logits of some tokens (OpenAI's ``logit_bias``).
2. *Repetition penalty* r: the logit l of a token that occurred, in the prompt or since, becomes l / r if it is positive
   and l r otherwise (CTRL, arXiv 1909.05858; ``repetition_penalty`` of transformers and vLLM).
3. *Frequency* and *presence penalty* f and p: the logit of a token that was generated c > 0 times becomes l - c f - p;
   the prompt does not count (OpenAI's definition, which vLLM shares).
4. *Temperature* t: logits are divided by it; 0 takes the most likely token, and the steps below have no effect.
5. *Top-k* removes all tokens less likely than the k-th (ties stay, as in transformers).
6. *Top-p* keeps only the smallest set whose probability reaches p (nucleus sampling, arXiv 1904.09751); of equally
   likely tokens, those with lower ids. Probabilities are renormalized after step 5.
7. *Min-p* removes tokens less likely than m times the most likely one (arXiv 2407.01082).

The order is that of transformers' logits processors; vLLM applies min-p before top-k. Then one token is sampled by the
inverse cumulative distribution (`quantforge.runtime.sampling`), with one uniform number per token from a seeded CPU
generator: the same seed gives the same tokens on any device. *Log-probabilities* are computed from the raw logits,
before step 1, as vLLM does by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quantforge.errors import UsageError

NO_LIMIT = 1e308  # maximum of options without an upper limit
MAX_SEED = (1 << 63) - 1  # largest seed of torch's generator
MAX_LOGPROBS = 20  # as in OpenAI's API


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Range of valid values of a numeric option, with a description for error messages.

    Attributes:
        rule: description of the valid values.
        minimum: smallest valid value.
        maximum: largest valid value.
        exclusive_minimum: whether the smallest value itself is excluded.
        integer_only: whether only integers are valid.
    """

    rule: str
    minimum: float = 0
    maximum: float = NO_LIMIT
    exclusive_minimum: bool = False
    integer_only: bool = False

    def check(self, name: str, value: Any) -> None:
        """Check a value of the option ``name``.

        Raises:
            UsageError: it is out of range or of another type.
        """
        is_number = type(value) is int or (type(value) is float and not self.integer_only)
        if not (is_number and self.minimum <= value <= self.maximum) or (
            self.exclusive_minimum and value <= self.minimum
        ):
            raise UsageError(f"{name} = {value!a:.60}", self.rule)


PENALTY_RANGE = ValueRange("a number from -2 to 2", -2, 2)
BIAS_RANGE = ValueRange("token ids from 0 on, each with a number from -100 to 100", -100, 100)
SAMPLING_RANGES: Mapping[str, ValueRange] = {
    "temperature": ValueRange("a number from 0 on (0: the most likely token)"),
    "top_k": ValueRange("a whole number from 0 on (0: all)", integer_only=True),
    "top_p": ValueRange("a number above 0 and at most 1 (1: all)", 0, 1, exclusive_minimum=True),
    "min_p": ValueRange("a number from 0 to 1 (0: all)", 0, 1),
    "repetition_penalty": ValueRange("a number from 0.01 to 100 (1: none)", 0.01, 100),
    "frequency_penalty": PENALTY_RANGE,
    "presence_penalty": PENALTY_RANGE,
    "seed": ValueRange("a whole number from 0 to 2^63 - 1", 0, MAX_SEED, integer_only=True),
    "logprobs": ValueRange(
        f"a whole number from 0 to {MAX_LOGPROBS}", 0, MAX_LOGPROBS, integer_only=True
    ),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one request; the default is greedy decoding.

    Attributes:
        temperature: 0 for greedy decoding.
        top_k: 0 to keep all tokens.
        top_p: 1 to keep all tokens.
        repetition_penalty: 1 for no penalty.
        seed: seed of the random generator.
        min_p: 0 to keep all tokens.
        frequency_penalty: subtracted from a token's logit for each time it was generated.
        presence_penalty: subtracted once from the logit of a token that was generated.
        logit_bias: numbers to add to logits, by token id.
        logprobs: report the log-probability of each chosen token and of this many most likely ones; None: report none.

    Raises:
        UsageError: a value is out of range, see `SAMPLING_RANGES`.
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
        for name, values in SAMPLING_RANGES.items():
            value = getattr(self, name)
            if not (name == "logprobs" and value is None):
                values.check(name, value)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias = {self.logit_bias!a:.60}", BIAS_RANGE.rule)
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not 0 <= token <= MAX_SEED:
                raise UsageError(f"logit_bias of token {token!a:.60}", BIAS_RANGE.rule)
            BIAS_RANGE.check(f"logit_bias of token {token}", bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Return whether decoding is greedy."""
        return self.temperature == 0

    @property
    def needs_counts(self) -> bool:
        """Return whether a penalty depends on which tokens occurred before."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1)
        return any(penalties)

    def for_choice(self, index: int) -> Sampling:
        """Return the options of choice ``index`` of a prompt: the seed is ``index`` higher, as in vLLM."""
        return replace(self, seed=(self.seed + index) % (MAX_SEED + 1))


MAX_TOKENS = 256  # default length limit of a completion
BEAM_RANGES = {
    "beams": ValueRange("a whole number from 1 to 64", 1, 64, integer_only=True),
    "length_penalty": ValueRange("a number from -10 to 10 (above 0 favours long texts)", -10, 10),
}


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Options of a beam search.

    Attributes:
        beams: number of beams, ``num_beams`` in transformers.
        length_penalty: exponent of the length by which the sum of log-probabilities is divided.
        early_stopping: when the search ends, see `quantforge.runtime.beam_search`.

    Raises:
        UsageError: a value is out of range, see `BEAM_RANGES`.
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, values in BEAM_RANGES.items():
            values.check(name, getattr(self, name))
        if not any(self.early_stopping is boolean for boolean in (False, True)) and (
            self.early_stopping != "never"
        ):
            raise UsageError(
                f"early_stopping = {self.early_stopping!a:.60}", "False, True, or never"
            )


COUNT_RANGES = {
    "max_tokens": ValueRange("a whole number from 1 on", 1, integer_only=True),
    "n": ValueRange("a whole number from 1 to 128", 1, 128, integer_only=True),
}


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Options for the completions of one prompt.

    Attributes:
        max_tokens: most new tokens of each completion.
        sampling: sampling options; the seed of each further completion is one higher.
        stop: stop strings.
        include_stop: keep the stop string at the end of the text.
        n: number of completions, computed in one batch.
        beams: beam search options; its best ``n`` beams are the completions.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.
    """

    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    n: int = 1
    beams: BeamOptions | None = None

    def __post_init__(self) -> None:
        for name, values in COUNT_RANGES.items():
            values.check(name, getattr(self, name))
        object.__setattr__(self, "stop", parse_stop_strings(self.stop))
        if type(self.include_stop) is not bool:
            raise UsageError(f"include_stop = {self.include_stop!a:.60}", "True or False")
        if self.beams is not None:
            self._check_beams(self.beams)
        elif self.n > 1 and self.sampling.greedy:
            raise UsageError(
                f"n = {self.n}: the most likely answer, {self.n} times",
                "set a temperature above 0, or as many beams",
            )

    def _check_beams(self, beams: BeamOptions) -> None:
        """Check that no option is set that a beam search ignores or does not define."""
        if self.n > beams.beams:
            raise UsageError(f"n = {self.n} of {beams.beams} beams", "at most as many as beams")
        defaults, sampling = Sampling(seed=self.sampling.seed), self.sampling
        for name in (*Sampling.__slots__, "stop"):
            value = getattr(sampling, name, self.stop)
            if value != getattr(defaults, name, ()):
                shown_value = " ".join(map(str, value)) if name == "stop" else value
                raise UsageError(
                    f"{name} = {shown_value}: not with beams", "leave it out, or the beams"
                )


def parse_stop_strings(stop: object) -> tuple[str, ...]:
    """Return stop strings as a tuple, given one string or a sequence of them.

    Raises:
        UsageError: a string is empty or not valid Unicode.
    """
    expected = "a text, or a list of texts, none of them empty"
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or isinstance(strings, bytes):
        raise UsageError(f"stop = {stop!a:.60}", expected)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UsageError(f"stop holds {string!a:.60}", expected)
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"stop holds {string!a:.60}, which is no Unicode text", expected
            ) from error
    return tuple(strings)


def completion_options(max_tokens: int, options: dict[str, Any]) -> CompletionOptions:
    """Build completion options from keyword options of `Sampling`, `BeamOptions` and `CompletionOptions`.

    Raises:
        UsageError: a value is out of range, or another option makes it meaningless.
    """
    remaining = dict(options)
    shared_options = {
        name: remaining.pop(name) for name in ("stop", "include_stop", "n") if name in remaining
    }
    beam_values = {name: remaining.pop(name) for name in BeamOptions.__slots__ if name in remaining}
    beams = BeamOptions(**beam_values)
    if beams.beams == 1 and (ignored := beam_values.keys() - {"beams"}):
        name = min(ignored)
        raise UsageError(f"{name} = {beam_values[name]}: without beams", "set beams, 2 or more")
    return CompletionOptions(
        max_tokens,
        Sampling(**remaining),
        **shared_options,
        beams=None if beams.beams == 1 else beams,
    )
