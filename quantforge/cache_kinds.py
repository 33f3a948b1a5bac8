"""Types of KV caches: how keys and values are stored, by one word for both or one word for each.

    int8             keys and values in 8 bits
    k=int8,v=int4    keys in 8 bits, values in 4

The words are `WORDS`; lists of types are separated by commas too. The kernels take one word each for keys and for
values, and call `PLAIN` "".
"""

from __future__ import annotations

from quantforge.errors import UsageError, nearest_hint
from quantforge_kernels import kv_row_layout

PLAIN = "16bit"
WORDS = (PLAIN, *kv_row_layout.CACHE_KINDS[1:])
FORM = "k=KIND,v=KIND"
_KEY_VALUE_PREFIXES = ("k=", "v=")


def parse_cache_kind(name: str, option: str = "--cache") -> tuple[str, str]:
    """Return how keys and how values are stored, in the words of the kernels.

    Args:
        name: type of a cache.
        option: the option that it was given with, for the error.

    Raises:
        UsageError: there is no such type.
    """
    kind_names = str(name).split(",")
    if len(kind_names) == 1 and not kind_names[0].startswith(_KEY_VALUE_PREFIXES):
        kind = _kernel_kind(kind_names[0], name, option)
        return kind, kind
    halves = {kind_name[:2]: kind_name[2:] for kind_name in kind_names}
    if len(kind_names) != len(_KEY_VALUE_PREFIXES) or set(halves) != {*_KEY_VALUE_PREFIXES}:
        raise UsageError(
            f"{option} {name}: one word for both, or {FORM}, once each", f"{option} k=int8,v=int4"
        )
    keys, values = (_kernel_kind(halves[half], name, option) for half in _KEY_VALUE_PREFIXES)
    return keys, values


def format_cache_kind(keys: str, values: str) -> str:
    """Return the type of a cache with keys and values stored so, given the words of the kernels."""
    if keys == values:
        return keys or PLAIN
    return f"k={keys or PLAIN},v={values or PLAIN}"


def parse_cache_kinds(names: str, option: str = "--cache") -> tuple[str, ...]:
    """Return the types in a comma-separated list, each once; ``int8,k=int8,v=int4`` has two.

    Raises:
        UsageError: the list is empty or has an unknown type.
    """
    parts, kinds = str(names).split(","), []
    while parts:
        name = parts.pop(0)
        if name.startswith(_KEY_VALUE_PREFIXES) and parts:
            name += f",{parts.pop(0)}"
        if not name:
            raise UsageError(
                f"{option} {names}: a name is empty", f"{option} {','.join(WORDS[1:])}"
            )
        kinds.append(format_cache_kind(*parse_cache_kind(name, option)))
    return tuple(dict.fromkeys(kinds))


def completions(incomplete: str) -> list[str]:
    """Return the words, and an example of a type with two words, that begin with ``incomplete``."""
    return [choice for choice in (*WORDS, "k=int8,v=int4") if choice.startswith(incomplete)]


def _kernel_kind(kind_name: str, name: str, option: str) -> str:
    if kind_name not in WORDS:
        raise UsageError(
            f"{option} {name}: {kind_name!r} is no kind of cache",
            f"{nearest_hint(kind_name, WORDS)} (two: {FORM})",
        )
    return "" if kind_name == PLAIN else kind_name
