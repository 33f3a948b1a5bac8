"""Effort: the one dial for time against quality, and what it sets of a recipe.

A level sets keys of the recipe that have their defaults; what a recipe or an option names otherwise stays. What is not
possible for a model, a method or a format is left out with the reason, in the words of the refusal that it would meet.
What is set stands in the recipe of the plan, so that planning that recipe again sets nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from quantforge.architectures.match import Matched
from quantforge.errors import QuantForgeError
from quantforge.formats.format_choice import CHOSEN
from quantforge.grids import GRIDS
from quantforge.model.statistics import Statistic
from quantforge.planning.guidance import refuse_guide
from quantforge.planning.tunable import refuse_tune
from quantforge.plans import TensorPlan
from quantforge.recipe import IMATRIX, AwqOptions, CalibrationOptions, GptqOptions

PLAINLY = "low"  # the level that rounds plainly where no method is named
# By level: keys of a recipe, and what they are set to. Those of a method's table are for methods that have the word.
SETS: Mapping[str, Mapping[str, int]] = {
    PLAINLY: {"calibration.samples": 32},
    "medium": {},
    "high": {"guide": 1, "tune": 4, "gptq.runs": 4},
}


class Dials(NamedTuple):
    """Part of a recipe that trades time for quality: its keys, see `quantforge.recipe.Recipe`."""

    effort: str = "medium"
    scales: str = "search"
    guide: int = 0
    tune: int = 0
    calibration: CalibrationOptions = CalibrationOptions()
    gptq: GptqOptions = GptqOptions()
    awq: AwqOptions = AwqOptions()

    def having(self, key: str, value: int) -> Dials:
        """Return the dials with another value of a key, ``gptq.refine`` for instance."""
        table, _, name = key.rpartition(".")
        changed: Any = replace(getattr(self, table), **{name: value}) if table else value
        return Dials(**{**self._asdict(), table or name: changed})


DEFAULTS = Dials()


class Asked(NamedTuple):
    """Part of a draft that decides which dials a run can take.

    Attributes:
        words: the transforms and the rounder.
        key: of the format.
        tensors: of the draft.
        matched: the model.
        needs: the statistics that are observed.
    """

    words: tuple[str, ...]
    key: str
    tensors: Sequence[TensorPlan]
    matched: Matched
    needs: frozenset[Statistic]

    def refuse(self, dials: Dials) -> None:
        """Refuse a guide or tuning that these cannot take; errors as `refuse_guide` and `refuse_tune`."""
        refuse_guide(
            dials.guide, self.words, self.tensors, self.matched,
            everyone=dials.calibration.experts == "all",
        )  # fmt: skip
        refuse_tune(
            dials.tune, self.words, self.key, self.tensors, self.matched, dials.calibration.samples
        )


def spent(dials: Dials, asked: Asked) -> tuple[Dials, tuple[str, ...]]:
    """Return the dials with what their effort sets, and a note on it; nothing is said where a level sets nothing.

    Raises:
        QuantForgeError: a guide or tuning that is asked for by name is not possible.
    """
    asked.refuse(dials)
    if not SETS[dials.effort]:
        return dials, ()
    done, left_out, named = [], [], []
    for key, value in SETS[dials.effort].items():
        if attrgetter(key)(dials) != attrgetter(key)(DEFAULTS):
            named.append(key)
        elif reason := _obstacle(key, value, dials, asked):
            left_out.append(f"{key} = {value} ({reason})")
        else:
            dials = dials.having(key, value)
            done.append(f"{key} = {value}")
    said = f"{CHOSEN}{', '.join(done) or 'nothing'}: --effort {dials.effort}"
    if named:
        said += f"; named already: {', '.join(named)}"
    return dials, (f"{said}; left out: {'; '.join(left_out)}" if left_out else said,)


def _obstacle(key: str, value: int, dials: Dials, asked: Asked) -> str:
    """Return why a key is not set, "" where it is."""
    if key == "calibration.samples":
        if dials.calibration.source.startswith(IMATRIX):
            return "importance is read from a file"
        return "" if asked.needs else "nothing is calibrated"
    word, inside, _ = key.partition(".")
    if inside and word not in asked.words:
        return f"of {word} alone, the method is {'+'.join(asked.words)}"
    if inside:
        return _no_runs(value, dials, asked.tensors)
    try:
        asked.refuse(dials.having(key, value))
    except QuantForgeError as error:
        return error.message.removeprefix(f"--{key} {value}: ")
    family = asked.matched.architecture
    if family is not None and family.replayed:
        return (
            "blocks read more than the hidden states, and maybe of earlier blocks: name it to try"
        )
    return ""


def _no_runs(value: int, dials: Dials, tensors: Sequence[TensorPlan]) -> str:
    if dials.scales != DEFAULTS.scales or dials.gptq.group_scales != DEFAULTS.gptq.group_scales:
        return "scales are fitted again only where they are static and searched for"
    schemes = [tensor.scheme.weight for tensor in tensors if tensor.scheme and tensor.part >= 0]
    if not schemes:
        return "no matrix of a block is quantized"
    if all(GRIDS[scheme.grid].runs >= value for scheme in schemes):
        return "as many as it has anyway"
    return ""
