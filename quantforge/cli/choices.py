"""Command-line options that override fields of a recipe, in the table `RECIPE_OPTIONS`.

Type, default and minimum of an option are those of the field of `Recipe` that it sets.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_args, get_origin

import typer

from quantforge.cli.options import Completer, complete_from
from quantforge.engines import TARGETS
from quantforge.formats import FORMATS
from quantforge.formats.gguf.mixture import MIXTURES
from quantforge.grids import GRIDS
from quantforge.notation import ALIASES
from quantforge.planning.recipe_options import builtin_recipes, place_of
from quantforge.quantizers import METHODS
from quantforge.recipe import LIMITS, VALUES, Recipe


@dataclass(frozen=True, slots=True)
class RecipeOption:
    """Help text and properties of one option in `RECIPE_OPTIONS`.

    Attributes:
        help: help text; ``{words}`` is replaced by the allowed values.
        metavar: placeholder of its value in ``--help``; its type when left out.
        flag: the flag; derived from the name when left out.
        default: the default in help; that of the recipe when left out.
        most: whether the command line checks the maximum itself, rather than the recipe.
    """

    help: str
    metavar: str | None = None
    flag: str = ""
    default: str = ""
    most: bool = False


# Groups in ``--help``, with the names of the recipe options in each.
HELP_GROUPS: Mapping[str, tuple[str, ...]] = {
    "What is asked for": (
        "method", "effort", "bits", "scheme", "format", "engine", "tensor_parallel", "type", "pre_tokenizer", "recipe",
    ),
    "Which layers": ("ignore", "rules", "lm_head", "embedding", "mtp", "adapter", "prune_experts", "sparsity"),
    "Rounding": ("scales", "guided_hessians", "refine", "tune", "activation_range", "kv_cache"),
    "Calibration": ("calibration", "samples", "length", "seed", "chat_template", "expert_tokens", "min_expert_tokens"),
    "Result": ("max_shard_bytes",),
}  # fmt: skip
_METAVARS = {int: "N", float: "X"}  # if an option has no metavar

# By the names of `RecipeOptions`, in the order of ``--help``; the others override ``recipe``.
RECIPE_OPTIONS: Mapping[str, RecipeOption] = {
    "method": RecipeOption(
        "{words}, or a sum such as awq+gptq (default: what measured best at that width). At 4 bits or fewer tuning"
        " follows gptq, see --tune.",
        "METHOD",
    ),
    "effort": RecipeOption(
        "Time against quality of what is not named: {words}; `plan` says what it sets.", "LEVEL"
    ),
    "bits": RecipeOption("Bits per weight; the other choices follow.", most=True),
    "scheme": RecipeOption(
        "Number format and groups in full, e.g. int4:g128:sym or W4A16.", "SCHEME"
    ),
    "format": RecipeOption("{words} (default: what holds the scheme).", "FORMAT"),
    "engine": RecipeOption(
        "What this engine is fast with, or a refusal: {words}.", "ENGINE", "--for"
    ),
    "tensor_parallel": RecipeOption("Devices that --for's engine splits it over."),
    "type": RecipeOption(
        "GGUF: the mixture, by default the one of --bits: {words}. `export --format plain`: F32, F16 or BF16.",
        "TYPE",
    ),
    "pre_tokenizer": RecipeOption(
        "GGUF: llama.cpp's name of a pre-tokenizer that is not recognised.", "NAME"
    ),
    "ignore": RecipeOption("Leave matching layers alone (repeatable).", "PATTERN"),
    "rules": RecipeOption(
        "Scheme of matching layers (repeatable, first wins).", "PATTERN=SCHEME", "--rule"
    ),
    "recipe": RecipeOption("A TOML recipe, or the name of a built-in one.", "FILE|NAME"),
    "scales": RecipeOption(
        "{words}; reference: into GGUF, with the bytes of llama.cpp's own quantizer.", "HOW"
    ),
    "activation_range": RecipeOption("Range of static inputs: {words}.", "HOW"),
    "kv_cache": RecipeOption(
        "Measure scales of an fp8 KV cache, per tensor or per head: {words}.", "KIND"
    ),
    "lm_head": RecipeOption("Quantize the output projection too.", "SCHEME"),
    "embedding": RecipeOption(
        "Quantize the token embedding too; keep: not, where the format's own tool does.",
        "SCHEME|keep",
    ),
    "mtp": RecipeOption("What becomes of heads that predict further tokens: {words}.", "WHICH"),
    "adapter": RecipeOption("Merge this adapter (of PEFT's LoRA) into the model first.", "DIR"),
    "guided_hessians": RecipeOption(
        "For gptq: weigh calibration tokens by gradients, in so many strips of the rows of a matrix; 0: not."
    ),
    "tune": RecipeOption(
        "For gptq: epochs in which scales, norms and codes are learned after rounding; 0: none (default: by --effort,"
        " 1 at 4 bits or fewer)."
    ),
    "refine": RecipeOption("Sweeps after GPTQ."),
    "calibration": RecipeOption(
        "FILE, name:split:column, builtin, self, none, or a=3,b=1.",
        "SOURCE",
        default="builtin; of an export into GGUF: none",
    ),
    "samples": RecipeOption(
        "Calibration rows; with the builtin text 128 are as many as it gives, up to that."
    ),
    "length": RecipeOption("Tokens of a row."),
    "seed": RecipeOption("Seed of the choice of calibration rows."),
    "chat_template": RecipeOption(
        "Render `messages` through the model's chat template (sandboxed)."
    ),
    "expert_tokens": RecipeOption(
        "Tokens that calibrate an expert, those sent to it or all: {words}.", "WHICH"
    ),
    "prune_experts": RecipeOption(
        "Remove the experts that do least, this share of each layer's: 25%.", "SHARE"
    ),
    "sparsity": RecipeOption(
        "Zeros of every row, for --method magnitude, wanda or sparsegpt: 50%, 2:4.", "SHARE"
    ),
    "min_expert_tokens": RecipeOption("Tell of experts that saw fewer tokens."),
    "max_shard_bytes": RecipeOption("Size limit of one weight file."),
}
_SCHEME_EXAMPLES = (
    "int4:g128:sym",
    "int8:g128:sym",
    "int3:g64:asym",
    *GRIDS,
    *ALIASES,
)
# By option name: all allowed values, or for some options the values that completion offers.
CHOICE_VALUES: Mapping[str, Iterable[str]] = {
    "method": METHODS,
    "format": FORMATS,
    "engine": TARGETS,
    "type": MIXTURES,
    **{name.rpartition(".")[2]: words for name, words in VALUES.items()},
}
COMPLETERS: Mapping[str, Completer] = {
    **{name: complete_from(words) for name, words in CHOICE_VALUES.items()},
    **dict.fromkeys(("scheme", "lm_head", "embedding"), complete_from(_SCHEME_EXAMPLES)),
    "recipe": complete_from(builtin_recipes()),
}


def flag_of(name: str) -> str:
    """Return the command-line flag of an option in `RECIPE_OPTIONS`."""
    return RECIPE_OPTIONS[name].flag or f"--{name.replace('_', '-')}"


def _help_group(name: str) -> str:
    """Return the group of an option in ``--help``; raise `RuntimeError` if `HELP_GROUPS` does not have the option."""
    for group, option_names in HELP_GROUPS.items():
        if name in option_names:
            return group
    raise RuntimeError(f"option '{name}' is in no group of HELP_GROUPS in choices.py")


def recipe_parameters(names: Iterable[str]) -> Iterator[inspect.Parameter]:
    """Yield function parameters for recipe options; their default is None, or False for switches."""
    defaults = Recipe()
    for name in names:
        choice = RECIPE_OPTIONS[name]
        field, field_type = ("", str) if name == "recipe" else place_of(name)
        value_type: Any = next(
            item for item in (*get_args(field_type), field_type) if item is not type(None)
        )
        value_type = list[str] if get_origin(field_type) is tuple else value_type
        minimum, maximum = LIMITS.get(field, (None, None))
        default = choice.default or (attrgetter(field)(defaults) if field else None)
        default_text = "" if default in (None, "", (), False) else f" [default: {default}]"
        value_list = ", ".join(CHOICE_VALUES.get(name, ()))
        option = typer.Option(
            False if value_type is bool else None,
            flag_of(name),
            help=choice.help.format(words=value_list) + default_text,
            metavar=None
            if value_type is bool
            else choice.metavar or _METAVARS.get(value_type, "TEXT"),
            min=minimum,
            max=maximum if choice.most else None,
            show_default=False,
            autocompletion=COMPLETERS.get(name),
            rich_help_panel=_help_group(name),
        )
        annotation = value_type if value_type is bool else value_type | None
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
        )
