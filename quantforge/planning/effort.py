"""Method and effort: what a recipe leaves open, and what is set for it.

Where no method is named, it is the one that measured best, or plain rounding with the reason. Below 8 bits calibration
pays. Among integers AWQ before GPTQ is as good as GPTQ alone on well-behaved weights, and 2.6 times better on a model
with outliers in its activations (``docs/results/quality.md``); of other grids GPTQ is what was measured
(``docs/results/low-precision.md``, ``docs/results/gguf.md``). At 8 bits any method loses next to nothing.

Effort is the one option that trades time for quality. A level sets keys of the recipe that have their defaults; what a
recipe or an option names otherwise stays. What is not possible for a model, a method or a format is left out with the
reason, in the words of the refusal that it would meet. What is set stands in the recipe of the plan, so that planning
that recipe again sets nothing more.

All defaults of ``gptq`` at a glance: ``tune``, ``guide`` and ``calibration.samples`` are set by effort (`SETS`),
``calibration.random`` is a share of rows with random tokens (`calibration_rows.random_share`), ``gptq.refine`` and
``gptq.damping`` are constants (`GptqOptions`), and passes and shrinkage are those of the grid (`Grid`).
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from quantforge.architectures.match import ModelLayout
from quantforge.errors import QuantForgeError
from quantforge.formats import GGUF, KEEP, Format
from quantforge.formats.gguf import mixture
from quantforge.grids import GRIDS, Zero
from quantforge.model.statistics import Statistic
from quantforge.notation import parse_layer
from quantforge.planning.format_choice import base_scheme
from quantforge.planning.gradient_options import quantized_linears, refuse_guide, refuse_tune
from quantforge.plans import TensorPlan, choice
from quantforge.quantizers import AWQ_GPTQ, GPTQ, RTN
from quantforge.recipe import IMATRIX, NO_DATA, Recipe
from quantforge.scheme import Scheme
from quantforge_files.roles import CARRIED, TOKENIZER, VOCABULARY

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint

LOW = "low"  # the level that rounds plainly where no method is named
# By level: keys of a recipe, and what they are set to. Those of a method's table are for methods that have the word.
SETS: Mapping[str, Mapping[str, int]] = {
    LOW: {"calibration.samples": 32},
    "medium": {"tune": 1},
    "high": {"guide": 1, "tune": 4, "gptq.runs": 4},
}
DEFAULTS = Recipe()
# Where the default level tunes: schemes of few bits lose most, few rows teach little (``docs/results/quality.md``), and
# the codes of a block, which are in memory, take seven bytes each.
TUNED_BITS, TUNED_ROWS, TUNED_WEIGHTS = 4, 64, 1 << 30
NEARLY_LOSSLESS = 8  # bits: with as many, any method loses next to nothing


def chosen_method(
    recipe: Recipe, form: Format, checkpoint: Checkpoint, model_layout: ModelLayout
) -> tuple[str, tuple[str, ...]]:
    """Return the method for a recipe that names none, and notes on the choice."""
    grids = _schemes_of(recipe, form)
    if not grids:  # a mere conversion
        return RTN, ()
    method, reason = RTN, _method_obstacle(grids, recipe, checkpoint, model_layout)
    if not reason:
        method = AWQ_GPTQ if _absorbs(model_layout) and all(map(_is_integer, grids)) else GPTQ
        reason = f"what measured best; --method {RTN} is faster, and worse"
    return method, (choice(f"--method {method}: {reason}"),)


def _method_obstacle(
    grids: Sequence[Scheme],
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
) -> str:
    """Return why nothing but plain rounding comes into question, "" where something does."""
    if min(scheme.weight_bits for scheme in grids) >= NEARLY_LOSSLESS:
        return f"{NEARLY_LOSSLESS} bits lose next to nothing, whatever the method"
    if recipe.effort == LOW:
        return f"--effort {LOW}, it is the fastest"
    if recipe.calibration.source == NO_DATA:
        return f"nothing is calibrated (--calibration {NO_DATA})"
    if recipe.calibration.importance_file is not None:
        return "an importance matrix holds what plain rounding asks for, and no more"
    if recipe.scales != DEFAULTS.scales:
        return f"--scales {recipe.scales} looks at the weights alone"
    if model_layout.architecture is None:
        undeclared = f"not declared; --method {AWQ_GPTQ} derives what reads the same activation"
        return f"{model_layout.model_type} is {'no model: it reads no text' if model_layout.draft else undeclared}"
    if not any(_is_text(path.name) for path in checkpoint.side_files) and checkpoint.path.is_dir():
        return "there is no tokenizer, and so no calibration text"
    return ""


def _is_text(name: str) -> bool:
    roles = (role for pattern, role in CARRIED.items() if fnmatch.fnmatchcase(name, pattern))
    return next(roles, None) in {TOKENIZER, VOCABULARY}


def _absorbs(model_layout: ModelLayout) -> bool:
    kinds = model_layout.architecture.kinds if model_layout.architecture else ()
    return any(shared.scale_fold is not None for kind in kinds for shared in kind.inputs)


def _is_integer(scheme: Scheme) -> bool:
    return scheme.integer and scheme.zero is not Zero.MIN


def _schemes_of(wanted: Recipe, form: Format) -> list[Scheme]:
    """Return the schemes of weights that a recipe names: that of all linears, and those of its rules."""
    if form.KEY == GGUF and wanted.scheme is None:
        label = (
            wanted.type or mixture.MIXTURE_BY_BITS.get(wanted.bits or form.DEFAULT_BITS, "")
        ).upper()
        grid = mixture.MIXTURES.get(label, (0, ""))[1].lower()
        named = [grid] if grid in GRIDS else []
    else:
        named = [base_scheme(form, wanted)]
    named += [wanted.head, wanted.embedding, *(rule.scheme for rule in wanted.rules)]
    return [parse_layer(text).weight for text in named if text not in ("", KEEP)]


class Asked(NamedTuple):
    """Part of a draft that decides what effort can set.

    Attributes:
        words: the transforms and the rounder.
        tensors: of the draft.
        model_layout: the model.
        needs: the statistics that are observed.
    """

    words: tuple[str, ...]
    tensors: Sequence[TensorPlan]
    model_layout: ModelLayout
    needs: frozenset[Statistic]

    def refuse(self, recipe: Recipe) -> None:
        """Refuse a guide or tuning that these cannot take; errors as `refuse_guide` and `refuse_tune`."""
        if recipe.guide:
            everyone = recipe.calibration.experts == "all"
            refuse_guide(
                recipe.guide, self.words, self.tensors, self.model_layout, everyone=everyone
            )
        if recipe.tune:
            rows = recipe.calibration.samples
            refuse_tune(
                recipe.tune, self.words, recipe.format, self.tensors, self.model_layout, rows
            )


def apply_effort(recipe: Recipe, asked: Asked) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with what its effort sets, and a note on it; the default level says only what it sets.

    Raises:
        QuantForgeError: a guide or tuning that is asked for by name is not possible.
    """
    asked.refuse(recipe)
    done: list[str] = []
    left_out: list[str] = []
    named: list[str] = []
    off: list[str] = []
    for key, value in SETS[recipe.effort].items():
        if attrgetter(key)(recipe) != attrgetter(key)(DEFAULTS):
            (named if attrgetter(key)(recipe) else off).append(key)
        elif reason := _key_obstacle(key, value, recipe, asked):
            left_out.append(f"{key} = {value} ({reason})")
        else:
            recipe = _with(recipe, key, value)
            done.append(f"{key} = {value}")
    recipe = replace(recipe, guide=recipe.guide or 0, tune=recipe.tune or 0)
    if recipe.effort == DEFAULTS.effort:
        faster = "; --tune 0 is faster, and worse"
        return recipe, (choice(f"{', '.join(done)}: --effort {recipe.effort}{faster}"),) * bool(
            done
        )
    said = f"{', '.join(done) or 'nothing'}: --effort {recipe.effort}"
    if named:
        said += f"; named already: {', '.join(named)}"
    if off:
        said += f"; switched off: {', '.join(off)}"
    return recipe, (choice(f"{said}; left out: {'; '.join(left_out)}" if left_out else said),)


def _with(recipe: Recipe, key: str, value: int) -> Recipe:
    """Return a recipe with another value of a key, ``gptq.refine`` for instance."""
    table, _, name = key.rpartition(".")
    changed: Any = replace(getattr(recipe, table), **{name: value}) if table else value
    return replace(recipe, **{table or name: changed})


def _key_obstacle(key: str, value: int, recipe: Recipe, asked: Asked) -> str:
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
    family = asked.model_layout.architecture
    if family is not None and family.replayed:
        return (
            "blocks read more than the hidden states, and maybe of earlier blocks: name it to try"
        )
    return ""


def _gains_little(recipe: Recipe, asked: Asked) -> str:
    """Return why tuning is not worth its time or memory, or not known to work, "" where it is."""
    if asked.model_layout.architecture is None or asked.model_layout.architecture.derived:
        return "what blocks read was derived"
    if recipe.calibration.samples < TUNED_ROWS:
        return f"fewer than {TUNED_ROWS} rows teach little"
    linears = quantized_linears(asked.tensors, asked.model_layout).values()
    bits = [one.scheme.weight.weight_bits for one in linears if one.scheme is not None]
    if min(bits, default=0) > TUNED_BITS:
        return f"more than {TUNED_BITS} bits lose little"
    weights: Counter[int] = Counter()
    for one in linears:
        weights[one.block] += math.prod(one.shape)
    return "" if max(weights.values(), default=0) <= TUNED_WEIGHTS else "blocks are too large"


def _no_runs(value: int, recipe: Recipe, tensors: Sequence[TensorPlan]) -> str:
    if recipe.scales != DEFAULTS.scales:
        return "scales are fitted again only where they are searched for"
    schemes = [tensor.scheme.weight for tensor in tensors if tensor.scheme and tensor.block >= 0]
    if not schemes:
        return "no matrix of a block is quantized"
    if all(GRIDS[scheme.grid].passes >= value for scheme in schemes):
        return "as many as it has anyway"
    return ""
