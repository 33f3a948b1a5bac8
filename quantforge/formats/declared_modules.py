"""What a configuration declares about each linear: quantized or not, uncertain, or depending on the reader.

Each method lists the modules that stay unquantized in its own way: by whole names or patterns (compressed-tensors'
``ignore``), by parts of names (``modules_to_not_convert``), or by regular expressions (GPTQ's ``dynamic``). Readers
differ, too: optimum ignores ``dynamic`` and reads only ``modules_in_block_to_quantize``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from quantforge.architectures.matched import Matched, Role
from quantforge.errors import InputError
from quantforge.formats import ModuleLayout, detect
from quantforge.formats.checks import denied
from quantforge.formats.configuration import (
    head_of,
    listed,
    quantization_config,
    spellings,
    within_block,
)
from quantforge.formats.patterns import Names, matches_module

_SHOWN = 4  # modules in an error
Declared = Callable[[str], Set[bool]]


def declared(config: Mapping[str, Any]) -> Declared | None:
    """Return a function that tells whether the module with a name is quantized; None if the method has no such list.

    It returns the set of the answers that readers give: one if they agree, both if they differ, empty if uncertain.

    Raises:
        InputError: a list of modules is malformed; some errors are raised only when the function is called.
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
    """Check that exactly those linears in blocks are packed that the configuration declares as quantized.

    Raises:
        InputError: all readers would take a packed linear for an unpacked one, or the other way around.
    """
    answers = declared(config) if layouts and matched.architecture is not None else None
    if answers is None:
        return
    wrong: dict[bool, list[str]] = {}
    for tensor in matched.tensors:
        if tensor.role is Role.LINEAR and tensor.block >= 0 and not tensor.further:
            module = tensor.stored.name.removesuffix(".weight")
            packed = module in layouts
            if answers(module) == {not packed}:
                wrong.setdefault(packed, []).append(module)
    for packed, modules in wrong.items():
        more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
        stated, actual = ("not quantized", "packed") if packed else ("quantized", "not packed")
        raise denied(
            f"quantization_config says that {modules[0]} is {stated}",
            f"{len(modules)} such modules are {actual}: {', '.join(modules[:_SHOWN])}{more}",
            modules[0],
        )


def _compressed(config: Mapping[str, Any], names_of: Callable[[str], list[str]]) -> Declared:
    """Return `declared` for compressed-tensors: a linear is quantized if a group targets it and ``ignore`` does not.

    ``names_of`` returns all names under which a module may be listed.
    """
    groups = config.get("config_groups")
    targets = [
        target
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        for target in listed(group, "targets")
    ]
    targeted, ignored = Names(targets), Names(listed(config, "ignore"))

    def quantized(name: str) -> set[bool]:
        names = names_of(name)
        if any(ignored.rank(item) is not None for item in names):
            return {False}
        return {"Linear" in targets or any(targeted.rank(item) is not None for item in names)}

    return quantized


def _gptq(config: Mapping[str, Any], module: str, head: str) -> set[bool]:
    if module == head:
        return {config.get("lm_head") is True}
    answers = set()
    rules = config.get("dynamic")
    for pattern in rules if isinstance(rules, Mapping) else ():
        if matches_module(pattern.removeprefix("+:").removeprefix("-:"), module):
            answers.add(not pattern.startswith("-:"))
            break
    inside = config.get("modules_in_block_to_quantize") or []
    if not isinstance(inside, list):
        raise InputError(
            f"config.json: modules_in_block_to_quantize = {str(inside)[:60]} is no list"
        )
    names = [name for group in inside for name in (group if isinstance(group, list) else [group])]
    if names:
        answers.add(module in names or within_block(module) in names)
    return answers or {True}


def _by_parts(entries: Iterable[str], names: Iterable[str], head: str) -> set[bool]:
    """Return the answers for a module with these names: unquantized if an entry is part of one of them.

    The head is uncertain where no entry names it: most readers leave it unquantized, but not all.
    """
    names = list(names)
    if any(_is_part(str(entry), name) for entry in entries for name in names):
        return {False}
    return set() if head in names else {True}


def _is_part(entry: str, name: str) -> bool:
    """Return whether an entry is the whole name, or consecutive parts of it, split at dots."""
    return f".{entry}." in f".{name}."
