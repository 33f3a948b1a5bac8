"""Effort: the one dial for time against quality, and what it sets of a recipe.

A level sets keys of the recipe that have their defaults; what a recipe or an option names otherwise stays. What is not
possible for a model, a method or a format is left out with the reason, in the words of the refusal that it would meet.
What is set stands in the recipe of the plan, so that planning that recipe again sets nothing more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from quantforge.architectures.match import Matched
from quantforge.errors import QuantForgeError
from quantforge.formats.format_choice import CHOSEN
from quantforge.grids import GRIDS
from quantforge.model.statistics import Statistic
from quantforge.planning.calibration_rows import random_share
from quantforge.planning.guidance import guided, refuse_guide
from quantforge.planning.tunable import refuse_tune
from quantforge.plans import TensorPlan
from quantforge.recipe import IMATRIX, Recipe

PLAINLY = "low"  # the level that rounds plainly where no method is named
# By level: keys of a recipe, and what they are set to. Those of a method's table are for methods that have the word.
SETS: Mapping[str, Mapping[str, int]] = {
    PLAINLY: {"calibration.samples": 32},
    "medium": {"tune": 1},
    "high": {"guide": 1, "tune": 4, "gptq.runs": 4},
}
DEFAULTS = Recipe()
# Where the default level tunes: schemes of few bits lose most, few rows teach little (``docs/results/quality.md``), and
# the codes of a block, which are in memory, take seven bytes each.
TUNED_BITS, TUNED_ROWS, TUNED_WEIGHTS = 4, 64, 1 << 30


class Asked(NamedTuple):
    """Part of a draft that decides what effort can set.

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

    def refuse(self, recipe: Recipe) -> None:
        """Refuse a guide or tuning that these cannot take; errors as `refuse_guide` and `refuse_tune`."""
        refuse_guide(
            recipe.guide or 0, self.words, self.tensors, self.matched,
            everyone=recipe.calibration.experts == "all",
        )  # fmt: skip
        refuse_tune(
            recipe.tune or 0,
            self.words,
            self.key,
            self.tensors,
            self.matched,
            recipe.calibration.samples,
        )


def apply_effort(recipe: Recipe, asked: Asked) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with what its effort sets, and a note on it; the default level says only what it sets.

    Raises:
        QuantForgeError: a guide or tuning that is asked for by name is not possible.
    """
    asked.refuse(recipe)
    counted = bool(recipe.prune_experts) or recipe.kv_cache != DEFAULTS.kv_cache
    share = random_share(recipe.calibration, asked.words, asked.tensors, counted=counted)
    recipe = replace(recipe, calibration=replace(recipe.calibration, random=share))
    done: list[str] = []
    left_out: list[str] = []
    named: list[str] = []
    off: list[str] = []
    for key, value in SETS[recipe.effort].items():
        if attrgetter(key)(recipe) != attrgetter(key)(DEFAULTS):
            (named if attrgetter(key)(recipe) else off).append(key)
        elif reason := _obstacle(key, value, recipe, asked):
            left_out.append(f"{key} = {value} ({reason})")
        else:
            recipe = _with(recipe, key, value)
            done.append(f"{key} = {value}")
    recipe = replace(recipe, guide=recipe.guide or 0, tune=recipe.tune or 0)
    if recipe.effort == DEFAULTS.effort:
        faster = "; --tune 0 is faster, and worse"
        return recipe, (f"{CHOSEN}{', '.join(done)}: --effort {recipe.effort}{faster}",) * bool(
            done
        )
    said = f"{CHOSEN}{', '.join(done) or 'nothing'}: --effort {recipe.effort}"
    if named:
        said += f"; named already: {', '.join(named)}"
    if off:
        said += f"; switched off: {', '.join(off)}"
    return recipe, (f"{said}; left out: {'; '.join(left_out)}" if left_out else said,)


def _with(recipe: Recipe, key: str, value: int) -> Recipe:
    """Return a recipe with another value of a key, ``gptq.refine`` for instance."""
    table, _, name = key.rpartition(".")
    changed: Any = replace(getattr(recipe, table), **{name: value}) if table else value
    return replace(recipe, **{table or name: changed})


def _obstacle(key: str, value: int, recipe: Recipe, asked: Asked) -> str:
    """Return why a key is not set, "" where it is."""
    if key == "calibration.samples":
        if recipe.calibration.source.startswith(IMATRIX):
            return "importance is read from a file"
        return "" if asked.needs else "nothing is calibrated"
    if (
        key == "tune"
        and recipe.effort == DEFAULTS.effort
        and (reason := _gains_little(recipe, asked))
    ):
        return reason
    word, inside, _ = key.partition(".")
    if inside and word not in asked.words:
        return f"of {word} alone, the method is {'+'.join(asked.words)}"
    if inside:
        return _no_runs(value, recipe, asked.tensors)
    try:
        asked.refuse(_with(recipe, key, value))
    except QuantForgeError as error:
        return error.message.removeprefix(f"--{key} {value}: ")
    family = asked.matched.architecture
    if family is not None and family.replayed:
        return (
            "blocks read more than the hidden states, and maybe of earlier blocks: name it to try"
        )
    return ""


def _gains_little(recipe: Recipe, asked: Asked) -> str:
    """Return why tuning is not worth its time or memory, or not known to work, "" where it is."""
    if asked.matched.architecture is None or asked.matched.architecture.derived:
        return "what blocks read was derived"
    if recipe.calibration.samples < TUNED_ROWS:
        return f"fewer than {TUNED_ROWS} rows teach little"
    linears = guided(asked.tensors, asked.matched).values()
    bits = [one.scheme.weight.weight_bits for one in linears if one.scheme is not None]
    if min(bits, default=0) > TUNED_BITS:
        return f"more than {TUNED_BITS} bits lose little"
    weights: Counter[int] = Counter()
    for one in linears:
        weights[one.part] += math.prod(one.shape)
    return "" if max(weights.values(), default=0) <= TUNED_WEIGHTS else "blocks are too large"


def _no_runs(value: int, recipe: Recipe, tensors: Sequence[TensorPlan]) -> str:
    if recipe.scales != DEFAULTS.scales:
        return "scales are fitted again only where they are searched for"
    schemes = [tensor.scheme.weight for tensor in tensors if tensor.scheme and tensor.part >= 0]
    if not schemes:
        return "no matrix of a block is quantized"
    if all(GRIDS[scheme.grid].runs >= value for scheme in schemes):
        return "as many as it has anyway"
    return ""
