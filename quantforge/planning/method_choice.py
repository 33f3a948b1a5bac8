"""Choice of the method where none is asked for: the one that measured best, or plain rounding with the reason.

Below 8 bits calibration pays. Among integers AWQ before GPTQ is as good as GPTQ alone on well-behaved weights, and 2.6
times better on a model with outliers in its activations (``docs/results/quality.md``); of other grids GPTQ is what was
measured (``docs/results/low-precision.md``, ``docs/results/gguf.md``). At 8 bits any method loses next to nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantforge.architectures.match import Matched
from quantforge.formats import GGUF, KEEP, Format
from quantforge.formats.format_choice import CHOSEN, base_scheme
from quantforge.formats.gguf import mixture
from quantforge.grids import GRIDS, Zero
from quantforge.notation import parse_layer
from quantforge.planning.effort import DEFAULTS, PLAINLY
from quantforge.quantizers import BEST, ERROR_FEEDBACK, PLAIN
from quantforge.recipe import NO_DATA, Recipe
from quantforge.scheme import Scheme
from quantforge_files.roles import CARRIED, TOKENIZER, VOCABULARY

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

NEARLY_LOSSLESS = 8  # bits


def chosen_method(
    grids: Sequence[Scheme],
    recipe: Recipe,
    checkpoint: Checkpoint,
    matched: Matched,
) -> tuple[str, tuple[str, ...]]:
    """Return the method for a recipe that names none, and notes on the choice.

    Args:
        grids: the schemes of weights, see `schemes_of`; none for a mere conversion.
        recipe: the effort, how scales are chosen, and where the text comes from.
        checkpoint: the model.
        matched: its tensors.
    """
    if not grids:
        return PLAIN, ()
    method, reason = PLAIN, _obstacle(grids, recipe, checkpoint, matched)
    if not reason:
        method = BEST if _absorbs(matched) and all(map(_is_integer, grids)) else ERROR_FEEDBACK
        reason = f"what measured best; --method {PLAIN} is faster, and worse"
    return method, (f"{CHOSEN}--method {method}: {reason}",)


def _obstacle(
    grids: Sequence[Scheme],
    recipe: Recipe,
    checkpoint: Checkpoint,
    matched: Matched,
) -> str:
    """Return why nothing but plain rounding comes into question, "" where something does."""
    if min(scheme.weight_bits for scheme in grids) >= NEARLY_LOSSLESS:
        return f"{NEARLY_LOSSLESS} bits lose next to nothing, whatever the method"
    if recipe.effort == PLAINLY:
        return f"--effort {PLAINLY}, it is the fastest"
    if recipe.calibration.source == NO_DATA:
        return f"nothing is calibrated (--calibration {NO_DATA})"
    if recipe.calibration.importance_file is not None:
        return "an importance matrix holds what plain rounding asks for, and no more"
    if recipe.scales != DEFAULTS.scales:
        return f"--scales {recipe.scales} looks at the weights alone"
    if matched.architecture is None:
        undeclared = f"not declared; --method {BEST} derives what reads the same activation"
        return f"{matched.model_type} is {'no model: it reads no text' if matched.draft else undeclared}"
    if not any(_is_text(path.name) for path in checkpoint.side_files) and checkpoint.path.is_dir():
        return "there is no tokenizer, and so no calibration text"
    return ""


def _is_text(name: str) -> bool:
    roles = (role for pattern, role in CARRIED.items() if fnmatch.fnmatchcase(name, pattern))
    return next(roles, None) in {TOKENIZER, VOCABULARY}


def _absorbs(matched: Matched) -> bool:
    kinds = matched.architecture.kinds if matched.architecture else ()
    return any(shared.absorber is not None for kind in kinds for shared in kind.inputs)


def _is_integer(scheme: Scheme) -> bool:
    return scheme.integer and scheme.zero is not Zero.MIN


def schemes_of(wanted: Recipe, form: Format) -> list[Scheme]:
    """Return the schemes of weights that a recipe names: that of all linears, and those of its rules."""
    if form.KEY == GGUF and wanted.scheme is None:
        label = (wanted.type or mixture.BY_BITS.get(wanted.bits or form.OWN_BITS, "")).upper()
        grid = mixture.MIXTURES.get(label, (0, ""))[1].lower()
        named = [grid] if grid in GRIDS else []
    else:
        named = [base_scheme(form, wanted)]
    named += [wanted.head, wanted.embedding, *(rule.scheme for rule in wanted.rules)]
    return [parse_layer(text).weight for text in named if text not in ("", KEEP)]
