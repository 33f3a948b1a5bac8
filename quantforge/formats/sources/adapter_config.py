"""Reader of an adapter's ``adapter_config.json``: refuses keys that are unknown, of another type, or cannot be kept.

PEFT takes any value for true that is not false; a word in the place of ``true`` is a damaged file here, since the one
reading and the other are two different models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from quantforge.errors import InputError
from quantforge.formats import patterns

CONFIG = "adapter_config.json"
# Keys that say how it was trained, where it applies (the names of its tensors say that too) and of whom it is.
_TOLD = frozenset(
    ("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
     "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
     "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
     "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
     "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora")
)  # fmt: skip
# Ways to begin that take a part of the model's weights into the adapter.
_MOVED = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Kinds that PEFT cannot merge.
_INPUTS = frozenset(
    ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE")
)  # fmt: skip
_SWITCH = (bool, NoneType)
_MOST_SHOWN = 100  # characters of a name
_MOST_SAVED = (
    1000  # entries of `modules_to_save`, each looked for among all tensors; PEFT writes a few
)
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("use_rslora", "use_dora", "fan_in_fan_out", "ensure_weight_tying", "lora_bias"), _SWITCH
    ),
    "init_lora_weights": (bool, str, NoneType),
    "modules_to_save": (list, NoneType),
    "target_modules": (list, str, NoneType),
}


def check(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse what is no LoRA, and what changes the meaning of its tensors in a way that is not known."""
    kind, begun = config.get("peft_type"), config.get("init_lora_weights")
    unknown = sorted(key for key, value in config.items() if value and key not in _TOLD)
    wrong = [key for key, kinds in _TYPES.items() if not isinstance(config.get(key), kinds)]
    what = ""
    if kind != "LORA":
        what = f"peft_type {kind!r}"
    elif unknown:
        what = f"{unknown[0]} = {str(config[unknown[0]])[:60]}"
    elif isinstance(begun, str) and begun.lower().startswith(_MOVED):
        what = f"init_lora_weights = {begun!r} has changed the weights of the model as well"
    elif wrong:
        what = f"{wrong[0]} = {str(config[wrong[0]])[:60]!r} is of another type than PEFT writes"
    elif len(config.get("modules_to_save") or ()) > _MOST_SAVED:
        what = f"modules_to_save of more than {_MOST_SAVED} entries"
    if what:
        raise InputError(
            f"{file}: {what}: not merged here",
            "PEFT merges no such adapter either: what it learned are inputs, not weights"
            if kind in _INPUTS
            else merge_steps("MODEL", str(file.parent)),
            file=str(file),
        )


def merge_steps(model: str, adapter: str, rows: int | None = None) -> str:
    """Return a hint with the lines of Python that merge an adapter; ``rows`` is a new number of tokens."""
    resized = "" if rows is None else f"model.resize_token_embeddings({rows}); "
    return (
        f"merge it with PEFT first: model = AutoModelForCausalLM.from_pretrained({model!r}); {resized}"
        f"PeftModel.from_pretrained(model, {adapter!r}).merge_and_unload().save_pretrained('merged');"
        " save the tokenizer that it was trained with there too, and quantize 'merged'"
    )


def trained_on(config: Mapping[str, Any]) -> str:
    """Return the model that an adapter was trained on, as a hint."""
    found = config.get("base_model_name_or_path")
    name = repr(found[:_MOST_SHOWN]) if isinstance(found, str) and found else "no model"
    return f"{CONFIG} names {name} as the model that it was trained on"


def promised(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of modules that are saved whole; of tied ones PEFT may leave one out."""
    if config.get("ensure_weight_tying") is True:
        return ()
    return tuple(dict.fromkeys(map(str, config.get("modules_to_save") or ())))


def targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names, or their ends, of linears that are all changed; none where further keys choose among them."""
    found = config.get("target_modules")
    chosen = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    return tuple(map(str, found)) if isinstance(found, list) and not chosen else ()


def number(file: Path, config: Mapping[str, Any], key: str, table: str, module: str) -> float:
    """Return a number of the configuration for a module: by the first pattern that fits its name, else that of all."""
    found, special = config.get(key), config.get(table) or {}
    if not isinstance(special, Mapping):
        raise InputError(f"{file}: {table} is no table", file=str(file))
    for pattern, value in special.items():
        if patterns.matches(rf"(.*\.)?({pattern})", module, whole=True):
            found = value
            break
    least = 0 if key == "r" else -(2**31)
    if (
        isinstance(found, bool)
        or not isinstance(found, int | float)
        or found == 0
        or not least < found < 2**31
    ):
        raise InputError(
            f"{file}: {key} = {found!r} of {module}",
            "the product is times lora_alpha / r, or over the root of r: r is a whole number of at least 1, the number"
            " of rows of lora_A; lora_alpha any number but 0, with which the adapter changes nothing",
            file=str(file),
        )
    return found
