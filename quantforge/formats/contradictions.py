"""Contradictions of a configuration with its own tensors: engines believe one or the other, so neither is read.

A key that is missing, or null, says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from quantforge.errors import InputError


def agree(config: Mapping[str, Any], key: str, actual: object, what: str) -> None:
    """Raise `InputError` if ``key`` is there and not ``actual``; ``what`` says what the tensors hold."""
    stated = config.get(key)
    if stated is not None and (
        stated != actual or isinstance(stated, bool) != isinstance(actual, bool)
    ):
        raise denied(f"{key} = {stated!r}", what)


def agree_on_head(config: Mapping[str, Any], key: str, modules: Iterable[str]) -> None:
    """Raise `InputError` if ``key`` says of the head that it is packed where it is not, or the other way round."""
    packed = any(module.endswith("lm_head") for module in modules)
    agree(config, key, packed, f"lm_head is {'packed' if packed else 'not packed'}")


def one_name(config: Mapping[str, Any], first: str, second: str) -> None:
    """Raise `InputError` if two keys of one meaning are both there and differ: engines read the one or the other."""
    said = [config.get(key) for key in (first, second)]
    if None not in said and said[0] != said[1]:
        raise denied(f"{first} = {said[0]!r}", f"{second} = {said[1]!r}")


def has_group_index(
    scattered: bool | None, index: str, groups: int, found: Collection[str]
) -> None:
    """Raise `InputError` if columns are said to be ``scattered`` over groups and no tensor ``index`` says how."""
    if scattered and groups > 1 and index not in found:
        raise denied("groups are said to be scattered", f"{index} is missing", index)


def not_excepted(config: Mapping[str, Any], key: str, modules: Collection[str]) -> None:
    """Raise `InputError` if the list ``key`` of modules that stay as they are names one of the packed ``modules``."""
    entries = config.get(key)
    if not isinstance(entries, list):
        return
    for entry in filter(None, (item for item in entries if isinstance(item, str))):
        for module in modules:
            if module == entry or module.endswith(f".{entry}"):
                raise denied(f"{key} names {entry!r}", f"{module} is packed", module)


def denied(said: str, what: str, module: str = "") -> InputError:
    """Return the error for something ``said`` that ``what`` the tensors hold denies, of one ``module`` if given."""
    return InputError(
        f"config.json: {said}, but {what}",
        "engines believe the one or the other: correct the configuration, or fetch the model again",
        tensor=module or None,
    )
