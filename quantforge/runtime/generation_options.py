"""How text is generated: the rules by which tokens are chosen, how long a completion is, and what ends it. No torch.

The next token is chosen from logits by the usual definitions, in this order (`Sampling`):

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
        logprobs: report the log-probability of each token chosen, and of so many most likely ones; None: of none.

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


MAX_TOKENS = 256  # of an answer, where nobody says
BEAM_RANGES = {
    "beams": Range("a whole number from 1 to 64", 1, 64, whole=True),
    "length_penalty": Range("a number from -10 to 10 (above 0 favours long texts)", -10, 10),
}


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Rule of a beam search.

    Attributes:
        beams: how many continuations are kept; ``num_beams`` of transformers.
        length_penalty: exponent of the length by which a sum of log-probabilities is divided.
        early_stopping: when the search is over, see `quantforge.runtime.beam_search`.

    Raises:
        UsageError: a value out of its range, see `BEAM_RANGES`.
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, values in BEAM_RANGES.items():
            values.check(name, getattr(self, name))
        if not any(self.early_stopping is one for one in (False, True)) and (
            self.early_stopping != "never"
        ):
            raise UsageError(
                f"early_stopping = {self.early_stopping!a:.60}", "False, True, or never"
            )


COUNT_RANGES = {
    "max_tokens": Range("a whole number from 1 on", 1, whole=True),
    "n": Range("a whole number from 1 to 128", 1, 128, whole=True),
}


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Rules for the answers to one prompt.

    Attributes:
        max_tokens: at most so many for each.
        sampling: how tokens are chosen; the seed of each further answer is one higher.
        stop: texts that end an answer.
        include_stop: the text that ended an answer is part of it.
        n: so many answers, computed together.
        beams: a beam search, of which the best ``n`` are the answers.

    Raises:
        UsageError: a value out of its range, or two that contradict each other.
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
        object.__setattr__(self, "stop", check_stop(self.stop))
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
        """Refuse what would have no effect on a beam search, or is not defined for it."""
        if self.n > beams.beams:
            raise UsageError(f"n = {self.n} of {beams.beams} beams", "at most as many as beams")
        usual, given = Sampling(seed=self.sampling.seed), self.sampling
        for name in (*Sampling.__slots__, "stop"):
            value = getattr(given, name, self.stop)
            if value != getattr(usual, name, ()):
                shown = " ".join(map(str, value)) if name == "stop" else value
                raise UsageError(f"{name} = {shown}: not with beams", "leave it out, or the beams")


def check_stop(stop: object) -> tuple[str, ...]:
    """Return stop strings, given as one text or several.

    Raises:
        UsageError: one is empty, or no Unicode text.
    """
    rule = "a text, or a list of texts, none of them empty"
    found = (stop,) if isinstance(stop, str) else stop
    if not isinstance(found, Sequence) or isinstance(found, bytes):
        raise UsageError(f"stop = {stop!a:.60}", rule)
    for one in found:
        if not isinstance(one, str) or not one:
            raise UsageError(f"stop holds {one!a:.60}", rule)
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"stop holds {one!a:.60}, which is no Unicode text", rule) from error
    return tuple(found)


def limits_from(max_tokens: int, options: dict[str, Any]) -> AnswerLimits:
    """Return the rules that options by name give: those of `Sampling`, `BeamOptions` and `AnswerLimits`.

    Raises:
        UsageError: a value out of its range; one that another one makes meaningless.
    """
    given = dict(options)
    own = {name: given.pop(name) for name in ("stop", "include_stop", "n") if name in given}
    searched = {name: given.pop(name) for name in BeamOptions.__slots__ if name in given}
    beams = BeamOptions(**searched)
    if beams.beams == 1 and (idle := searched.keys() - {"beams"}):
        name = min(idle)
        raise UsageError(f"{name} = {searched[name]}: without beams", "set beams, 2 or more")
    return AnswerLimits(
        max_tokens, Sampling(**given), **own, beams=None if beams.beams == 1 else beams
    )
