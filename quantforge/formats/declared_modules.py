"""Declarations of a configuration on each linear: quantized, left out, uncertain, or read differently by readers.

Every method spells its exceptions differently, and readers match them differently: as whole names or
patterns (compressed-tensors' ``ignore``), as parts of names (``modules_to_not_convert``), as the end of a name, by
regular expression (GPTQ's ``dynamic``, which optimum does not read: it goes by ``modules_in_block_to_quantize`` alone).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from quantforge.architectures.matched import Matched, Role
from quantforge.errors import InputError
from quantforge.formats import ModuleLayout, detect
from quantforge.formats.configuration import (
    head_of,
    listed,
    quantization_config,
    spellings,
    within_block,
)
from quantforge.formats.contradictions import denied
from quantforge.formats.module_names import Names, matches

_SHOWN = 4  # modules in an error
Declared = Callable[[str], Set[bool]]


def declared(config: Mapping[str, Any]) -> Declared | None:
    """Return a function from a module's name to what readers answer to "is it quantized?"; None without exceptions.

    Its answers are a set: one where all readers agree, both where they differ, none where it is uncertain.

    Raises:
        InputError: a list of exceptions cannot be read; some only when the function is called.
    """
    found = quantization_config(config)
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(found, lambda module: spellings(module, config))
    if method == "gptq":
        return lambda module: _gptq(found, module, head_of(config))
    key = detect(config).ABOUT.exceptions if method else ""
    if not key:
        return None
    names = listed(found, key) or listed(found, "ignored_layers")
    return lambda module: _by_parts(names, spellings(module, config), head_of(config))


def check_declared(
    config: Mapping[str, Any], matched: Matched, layouts: Mapping[str, ModuleLayout]
) -> None:
    """Check that each linear of a block is quantized if the configuration says so, and only then.

    Raises:
        InputError: all readers of the configuration take one for what it is not.
    """
    said = declared(config) if layouts and matched.architecture is not None else None
    if said is None:
        return
    wrong: dict[bool, list[str]] = {}
    for tensor in matched.tensors:
        if tensor.role is Role.LINEAR and tensor.block >= 0 and not tensor.further:
            module = tensor.stored.name.removesuffix(".weight")
            packed = module in layouts
            if said(module) == {not packed}:
                wrong.setdefault(packed, []).append(module)
    for packed, modules in wrong.items():
        more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
        stated, actual = ("not quantized", "packed") if packed else ("quantized", "not packed")
        raise denied(
            f"quantization_config says that {modules[0]} is {stated}",
            f"{len(modules)} such modules are {actual}: {', '.join(modules[:_SHOWN])}{more}",
            modules[0],
        )


def _compressed(config: Mapping[str, Any], module: Callable[[str], list[str]]) -> Declared:
    """Return a test: a linear is quantized if a group targets it and it is not in the ignore list."""
    groups = config.get("config_groups")
    targets = [
        target
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        for target in listed(group, "targets")
    ]
    targeted, ignored = Names(targets), Names(listed(config, "ignore"))

    def quantized(name: str) -> set[bool]:
        names = module(name)
        if any(ignored.rank(item) is not None for item in names):
            return {False}
        return {"Linear" in targets or any(targeted.rank(item) is not None for item in names)}

    return quantized


def _gptq(config: Mapping[str, Any], module: str, head: str) -> set[bool]:
    if module == head:
        return {config.get("lm_head") is True}
    said = set()
    rules = config.get("dynamic")
    for pattern in rules if isinstance(rules, Mapping) else ():
        if matches(pattern.removeprefix("+:").removeprefix("-:"), module):
            said.add(not pattern.startswith("-:"))
            break
    inside = config.get("modules_in_block_to_quantize") or []
    if not isinstance(inside, list):
        raise InputError(
            f"config.json: modules_in_block_to_quantize = {str(inside)[:60]} is no list"
        )
    names = [name for group in inside for name in (group if isinstance(group, list) else [group])]
    if names:
        said.add(module in names or within_block(module) in names)
    return said or {True}


def _by_parts(names: Iterable[str], module: Iterable[str], head: str) -> set[bool]:
    """Return the answers of readers that leave out what contains an entry; most of them leave out heads in any case."""
    module = list(module)
    if any(_part(str(entry), name) for entry in names for name in module):
        return {False}
    return set() if head in module else {True}


def _part(entry: str, name: str) -> bool:
    """Return whether an entry is the name, or a run of whole parts of it."""
    return f".{entry}." in f".{name}."
