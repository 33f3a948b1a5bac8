"""Default method and effort: choose what a recipe leaves open, and the settings of an effort level.

Where no method is named, the one that measured best is chosen, or plain rounding (RTN), with the reason. Calibration
pays below 8 bits. For integer grids, AWQ followed by GPTQ is as good as GPTQ alone on well-behaved weights and 2.6
times better on a model with outliers in its activations (``docs/results/quality.md``); for other grids GPTQ was
measured (``docs/results/low-precision.md``, ``docs/results/gguf.md``). At 8 bits any method loses next to nothing.

Effort is the one option that trades time for quality. A level sets keys of the recipe that still have their defaults;
values that a recipe or an option names are not changed. What a model, method or format does not support is left out
with the reason of the refusal. The settings are written into the plan's recipe, so that planning that recipe again does
not set anything more.

All defaults of ``gptq``: effort sets ``tune``, ``guided_hessians`` and ``calibration.samples`` (`EFFORT_SETTINGS`),
``calibration.random_share`` is a share of rows with random tokens (`calibration_rows.random_row_share`),
``gptq.refine`` and ``gptq.damping`` are constants (`GptqOptions`), and passes and shrinkage belong to the grid
(`Grid`).
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
from quantforge_files.roles import CARRIED_FILES, TOKENIZER, VOCABULARY

if TYPE_CHECKING:
    from quantforge.files.reader import Checkpoint

LOW_EFFORT = "low"  # the level that takes plain rounding as the default method
# By level: the keys of a recipe that it sets. Keys of a method's table only apply if the recipe's method contains it.
EFFORT_SETTINGS: Mapping[str, Mapping[str, int]] = {
    LOW_EFFORT: {"calibration.samples": 32},
    "medium": {"tune": 1},
    "high": {"guided_hessians": 1, "tune": 4, "gptq.passes": 4},
}
DEFAULT_RECIPE = Recipe()
# Limits within which the default level tunes: schemes of few bits lose most, few rows give little signal
# (``docs/results/quality.md``), and the codes of a block, which are held in memory, take seven bytes each.
MAX_TUNED_BITS, MIN_TUNING_ROWS, MAX_TUNED_BLOCK_WEIGHTS = 4, 64, 1 << 30
NEARLY_LOSSLESS_BITS = 8  # any method loses next to nothing


def choose_method(
    recipe: Recipe, file_format: Format, checkpoint: Checkpoint, model_layout: ModelLayout
) -> tuple[str, tuple[str, ...]]:
    """Choose the method for a recipe that names none; return it with notes on the choice."""
    schemes = _requested_schemes(recipe, file_format)
    if not schemes:  # nothing is quantized
        return RTN, ()
    method, reason = RTN, _method_obstacle(schemes, recipe, checkpoint, model_layout)
    if not reason:
        method = (
            AWQ_GPTQ if _can_fold_scales(model_layout) and all(map(_is_integer, schemes)) else GPTQ
        )
        reason = f"what measured best; --method {RTN} is faster, and worse"
    return method, (choice(f"--method {method}: {reason}"),)


def _method_obstacle(
    schemes: Sequence[Scheme],
    recipe: Recipe,
    checkpoint: Checkpoint,
    model_layout: ModelLayout,
) -> str:
    """Return why only plain rounding is possible or worth it, "" if calibration is."""
    if min(scheme.weight_bits for scheme in schemes) >= NEARLY_LOSSLESS_BITS:
        return f"{NEARLY_LOSSLESS_BITS} bits lose next to nothing, whatever the method"
    if recipe.effort == LOW_EFFORT:
        return f"--effort {LOW_EFFORT}, it is the fastest"
    if recipe.calibration.source == NO_DATA:
        return f"nothing is calibrated (--calibration {NO_DATA})"
    if recipe.calibration.importance_file is not None:
        return "an importance matrix holds what plain rounding asks for, and no more"
    if recipe.scales != DEFAULT_RECIPE.scales:
        return f"--scales {recipe.scales} looks at the weights alone"
    if model_layout.architecture is None:
        undeclared = f"not declared; --method {AWQ_GPTQ} derives what reads the same activation"
        return f"{model_layout.model_type} is {'no model: it reads no text' if model_layout.draft_kind else undeclared}"
    if (
        not any(_is_tokenizer_file(path.name) for path in checkpoint.side_files)
        and checkpoint.path.is_dir()
    ):
        return "there is no tokenizer, and so no calibration text"
    return ""


def _is_tokenizer_file(name: str) -> bool:
    roles = (role for pattern, role in CARRIED_FILES.items() if fnmatch.fnmatchcase(name, pattern))
    return next(roles, None) in {TOKENIZER, VOCABULARY}


def _can_fold_scales(model_layout: ModelLayout) -> bool:
    kinds = model_layout.architecture.kinds if model_layout.architecture else ()
    return any(shared.scale_fold is not None for kind in kinds for shared in kind.inputs)


def _is_integer(scheme: Scheme) -> bool:
    return scheme.integer and scheme.zero is not Zero.MIN


def _requested_schemes(recipe: Recipe, file_format: Format) -> list[Scheme]:
    """Return the weight schemes that a recipe names: that of all linears, and those of its rules and options."""
    if file_format.KEY == GGUF and recipe.scheme is None:
        mixture_name = (
            recipe.type or mixture.MIXTURE_BY_BITS.get(recipe.bits or file_format.DEFAULT_BITS, "")
        ).upper()
        grid = mixture.MIXTURES.get(mixture_name, (0, ""))[1].lower()
        texts = [grid] if grid in GRIDS else []
    else:
        texts = [base_scheme(file_format, recipe)]
    texts += [recipe.lm_head, recipe.embedding, *(rule.scheme for rule in recipe.rules)]
    return [parse_layer(text).weight for text in texts if text not in ("", KEEP)]


class EffortContext(NamedTuple):
    """What decides which settings an effort level can apply.

    Attributes:
        method_words: names of the transforms and of the rounder, in order.
        tensors: plans of all tensors.
        model_layout: the model.
        needs: statistics that calibration observes.
    """

    method_words: tuple[str, ...]
    tensors: Sequence[TensorPlan]
    model_layout: ModelLayout
    needs: frozenset[Statistic]

    def refuse(self, recipe: Recipe) -> None:
        """Refuse a guide or tuning that the model does not support; errors as `refuse_guide` and `refuse_tune`."""
        if recipe.guided_hessians:
            all_tokens = recipe.calibration.expert_tokens == "all"
            refuse_guide(
                recipe.guided_hessians,
                self.method_words,
                self.tensors,
                self.model_layout,
                every_expert=all_tokens,
            )
        if recipe.tune:
            rows = recipe.calibration.samples
            refuse_tune(
                recipe.tune, self.method_words, recipe.format, self.tensors, self.model_layout, rows
            )


def apply_effort(recipe: Recipe, context: EffortContext) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with the settings of its effort level, and a note on them.

    The default level only notes what it changes.

    Raises:
        QuantForgeError: a guide or tuning that the user named is not possible.
    """
    context.refuse(recipe)
    applied: list[str] = []
    left_out: list[str] = []
    already_set: list[str] = []
    switched_off: list[str] = []
    for key, value in EFFORT_SETTINGS[recipe.effort].items():
        if attrgetter(key)(recipe) != attrgetter(key)(DEFAULT_RECIPE):
            (already_set if attrgetter(key)(recipe) else switched_off).append(key)
        elif reason := _setting_obstacle(key, value, recipe, context):
            left_out.append(f"{key} = {value} ({reason})")
        else:
            recipe = _with_key(recipe, key, value)
            applied.append(f"{key} = {value}")
    recipe = replace(recipe, guided_hessians=recipe.guided_hessians or 0, tune=recipe.tune or 0)
    if recipe.effort == DEFAULT_RECIPE.effort:
        faster = "; --tune 0 is faster, and worse"
        return recipe, (choice(f"{', '.join(applied)}: --effort {recipe.effort}{faster}"),) * bool(
            applied
        )
    message = f"{', '.join(applied) or 'nothing'}: --effort {recipe.effort}"
    if already_set:
        message += f"; named already: {', '.join(already_set)}"
    if switched_off:
        message += f"; switched off: {', '.join(switched_off)}"
    return recipe, (choice(f"{message}; left out: {'; '.join(left_out)}" if left_out else message),)


def _with_key(recipe: Recipe, key: str, value: int) -> Recipe:
    """Return a recipe with a new value of a dotted key, such as ``gptq.refine``."""
    table, _, name = key.rpartition(".")
    new_value: Any = replace(getattr(recipe, table), **{name: value}) if table else value
    return replace(recipe, **{table or name: new_value})


def _setting_obstacle(key: str, value: int, recipe: Recipe, context: EffortContext) -> str:
    """Return why a level cannot set a key, "" if it can."""
    if key == "calibration.samples":
        if recipe.calibration.source.startswith(IMATRIX):
            return "importance is read from a file"
        return "" if context.needs else "nothing is calibrated"
    if (
        key == "tune"
        and recipe.effort == DEFAULT_RECIPE.effort
        and (reason := _tuning_obstacle(recipe, context))
    ):
        return reason
    method_word, option, _ = key.partition(".")
    if option and method_word not in context.method_words:
        return f"of {method_word} alone, the method is {'+'.join(context.method_words)}"
    if option:
        return _gptq_passes_obstacle(value, recipe, context.tensors)
    try:
        context.refuse(_with_key(recipe, key, value))
    except QuantForgeError as error:
        return error.detail_about(f"--{key.replace('_', '-')} {value}")
    family = context.model_layout.architecture
    if family is not None and family.needs_model_replay:
        return (
            "blocks read more than the hidden states, and maybe of earlier blocks: name it to try"
        )
    return ""


def _tuning_obstacle(recipe: Recipe, context: EffortContext) -> str:
    """Return why tuning is not worth its time or memory, or not known to work, "" if it is."""
    if context.model_layout.architecture is None or context.model_layout.architecture.derivation:
        return "what blocks read was derived"
    if recipe.calibration.samples < MIN_TUNING_ROWS:
        return f"fewer than {MIN_TUNING_ROWS} rows teach little"
    linears = quantized_linears(context.tensors, context.model_layout).values()
    bits = [linear.scheme.weight.weight_bits for linear in linears if linear.scheme is not None]
    if min(bits, default=0) > MAX_TUNED_BITS:
        return f"more than {MAX_TUNED_BITS} bits lose little"
    weights: Counter[int] = Counter()
    for linear in linears:
        weights[linear.block] += math.prod(linear.shape)
    return (
        ""
        if max(weights.values(), default=0) <= MAX_TUNED_BLOCK_WEIGHTS
        else "blocks are too large"
    )


def _gptq_passes_obstacle(value: int, recipe: Recipe, tensors: Sequence[TensorPlan]) -> str:
    if recipe.scales != DEFAULT_RECIPE.scales:
        return "scales are fitted again only where they are searched for"
    schemes = [tensor.scheme.weight for tensor in tensors if tensor.scheme and tensor.block >= 0]
    if not schemes:
        return "no matrix of a block is quantized"
    if all(GRIDS[scheme.grid].passes >= value for scheme in schemes):
        return "as many as it has anyway"
    return ""
