"""Rules for an answer: how long it is, how its tokens are chosen, what ends it, and how many are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quantforge.errors import UsageError
from quantforge.runtime.sampling_options import Range, Sampling
from quantforge.runtime.stop_strings import check_stop

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


RANGES = {
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
        for name, values in RANGES.items():
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


def limits_from(max_tokens: int, options: dict[str, Any]) -> AnswerLimits:
    """Return the rules that options by name state: those of `Sampling`, `BeamOptions` and `AnswerLimits`.

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
