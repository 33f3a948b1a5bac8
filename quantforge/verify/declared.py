"""What a configuration says of each linear: quantized, left out, or nothing certain.

Every method spells its exceptions differently, and readers match them differently: as whole names or
patterns (compressed-tensors' ``ignore``), as parts of names (``modules_to_not_convert``), as the end of a name, by
regular expression (GPTQ's ``dynamic``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quantforge.formats.checks import matches
from quantforge.formats.configuration import (
    head_of,
    listed,
    quantization_config,
    spellings,
    within_block,
)

Declared = Callable[[str], bool | None]


def declared(config: Mapping[str, Any]) -> Declared | None:
    """Return the question "is this module quantized?" for a configuration; None where it states no exceptions."""
    found = quantization_config(config)
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return lambda module: _compressed(found, spellings(module, config))
    if method == "gptq":
        return lambda module: _gptq(found, module, head_of(config))
    key = {
        "awq": "modules_to_not_convert",
        "fp8": "modules_to_not_convert",
        "bitsandbytes": "llm_int8_skip_modules",
    }.get(str(method))
    if key is None:
        return None
    names = listed(found, key) or listed(found, "ignored_layers")
    return lambda module: _by_parts(names, spellings(module, config), head_of(config))


def _compressed(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Targeted by a group, and not in the ignore list."""
    names = list(names)
    groups = config.get("config_groups")
    targets = [
        target
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        for target in listed(group, "targets")
    ]
    if _any(listed(config, "ignore"), names):
        return False
    return "Linear" in targets or _any(targets, names)


def _any(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(
        matches(pattern[3:], name) if pattern.startswith("re:") else pattern == name
        for pattern in map(str, patterns)
        for name in names
    )


def _gptq(config: Mapping[str, Any], module: str, head: str) -> bool:
    if module == head:
        return config.get("lm_head") is True
    rules = config.get("dynamic")
    for pattern in rules if isinstance(rules, Mapping) else ():
        if matches(pattern.removeprefix("+:").removeprefix("-:"), module):
            return not pattern.startswith("-:")
    inside = config.get("modules_in_block_to_quantize")
    if not isinstance(inside, list) or not inside:
        return True
    names = [name for group in inside for name in (group if isinstance(group, list) else [group])]
    return module in names or within_block(module) in names


def _by_parts(names: Iterable[str], module: Iterable[str], head: str) -> bool | None:
    """Readers leave out what contains an entry; heads are left out by most of them in any case."""
    module = list(module)
    if any(_part(str(entry), name) for entry in names for name in module):
        return False
    return None if head in module else True


def _part(entry: str, name: str) -> bool:
    """Whether an entry is the name, or a run of whole parts of it."""
    return f".{entry}." in f".{name}."
