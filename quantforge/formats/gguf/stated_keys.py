"""Keys of a GGUF file that a family's own file states, and what llama.cpp's graph of it takes for granted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.architectures import architecture_of
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.llama_cpp import Family, Stated
from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf.container import Value, ValueType, f32, flag, u32


def stated_keys(config: Mapping[str, Any], family: Family, sizes: Dimensions) -> dict[str, Value]:
    """Return the keys, without the name of the architecture.

    Args:
        config: with the family's defaults.
        family: says which keys, and where their values stand.
        sizes: of the model.

    Raises:
        InputError: a value is of a wrong kind.
    """
    found = {key: u32(sizes.size(size)) for key, size in family.sizes.items()}
    for key, place in family.numbers.items():
        number = place if isinstance(place, int) else _found(place, config)
        if number is not None:
            found[key] = u32(_number(place if isinstance(place, str) else key, number, int))
    for key, place in family.reals.items():
        if (real := _found(place, config)) is not None:
            if not real and place in config:  # to llama.cpp, 0 is as good as none
                raise refused(f"{place} = {real}", "a number above 0")
            found[key] = f32(_number(place if isinstance(place, str) else key, real, float))
    for key, place in family.flags.items():
        stated = place if isinstance(place, bool) else config.get(place)
        if stated is not None:
            found[key] = flag(bool(stated))
    for key, listing in family.lists.items():
        listed = list(listing(config))
        kind = ValueType.BOOL if all(type(item) is bool for item in listed) else ValueType.U32
        found[key] = Value(ValueType.ARRAY, listed, kind)
    return found


def check_graph(config: Mapping[str, Any], family: Family, sizes: Dimensions) -> None:
    """Refuse what llama.cpp's graph of the family does not compute, and what its declarations do not cover.

    Raises:
        RefusedError: naming the key and the value.
    """
    if not config.get("is_causal", True):
        raise refused(f"is_causal = {str(config['is_causal'])[:40]}", "true")
    declared = architecture_of(config)
    for key, value in (declared.requires if declared else {}).items():
        if (config.get(key, value) or None) != (value or None):
            raise refused(f"{key} = {str(config[key])[:40]}", f"{key} = {value}")
    for key, value in family.graph.items():
        stated = config.get(key, value)
        if stated != value and (stated is not None or value):
            raise refused(f"{key} = {str(config[key])[:40]}", f"{key} = {value}")
    if family.obstacle and (why := family.obstacle(config)):
        raise refused(*why)
    for one, other in family.equal:
        if sizes.size(one) != sizes.size(other):
            raise refused(f"{one} of {sizes.size(one)}", f"{other}, {sizes.size(other)}")


def _found(place: str | Stated, config: Mapping[str, Any]) -> Any:
    return config.get(place) if isinstance(place, str) else place(config)


def _number(key: object, value: object, kind: type) -> Any:
    known = type(value) is int or (kind is float and isinstance(value, float))
    if not known or not 0 <= float(str(value)) < 1 << 31:
        raise InputError(f"config.json: {key} = {str(value)[:40]!r}", "a number")
    return value


def refused(what: str, instead: str) -> RefusedError:
    """Return the error for what no key could carry, with what is supported."""
    return RefusedError(
        f"config.json: {what} cannot be carried by a GGUF file (supported: {instead})",
        "use --format compressed-tensors",
    )
