"""Names of caches: how keys and values are stored, in one word for both, or in a word for each.

    int8             keys and values alike
    k=int8,v=int4    keys in 8 bits, values in 4

The words are `WORDS`; a list of names is separated by commas too. The kernels have no name of two, and call `PLAIN` "".
"""

from __future__ import annotations

from quantforge.errors import UsageError, nearest
from quantforge_kernels import kv_row_layout

PLAIN = "16bit"
WORDS = (PLAIN, *kv_row_layout.CACHE_KINDS[1:])
FORM = "k=KIND,v=KIND"
_HALVES = ("k=", "v=")


def kinds_of(name: str, option: str = "--cache") -> tuple[str, str]:
    """Return how keys and how values are stored, as the kernels call it.

    Args:
        name: of a cache.
        option: by which it was given, for the error.

    Raises:
        UsageError: no such name.
    """
    words = str(name).split(",")
    if len(words) == 1 and not words[0].startswith(_HALVES):
        kind = _kind(words[0], name, option)
        return kind, kind
    halves = {word[:2]: word[2:] for word in words}
    if len(words) != len(_HALVES) or set(halves) != {*_HALVES}:
        raise UsageError(
            f"{option} {name}: one word for both, or {FORM}, once each", f"{option} k=int8,v=int4"
        )
    keys, values = (_kind(halves[half], name, option) for half in _HALVES)
    return keys, values


def name_of(keys: str, values: str) -> str:
    """Return the name of a cache whose keys and values are stored so, as the kernels call it."""
    if keys == values:
        return keys or PLAIN
    return f"k={keys or PLAIN},v={values or PLAIN}"


def listed(names: str, option: str = "--cache") -> tuple[str, ...]:
    """Return the names of a list, ``int8,k=int8,v=int4`` of two, each once, as `name_of` writes them.

    Raises:
        UsageError: it is empty, or no list of names.
    """
    words, found = str(names).split(","), []
    while words:
        name = words.pop(0)
        if name.startswith(_HALVES) and words:
            name += f",{words.pop(0)}"
        if not name:
            raise UsageError(
                f"{option} {names}: a name is empty", f"{option} {','.join(WORDS[1:])}"
            )
        found.append(name_of(*kinds_of(name, option)))
    return tuple(dict.fromkeys(found))


def completions(incomplete: str) -> list[str]:
    """Return the words, and one example of the form for two, that begin so."""
    return [word for word in (*WORDS, "k=int8,v=int4") if word.startswith(incomplete)]


def _kind(word: str, name: str, option: str) -> str:
    if word not in WORDS:
        raise UsageError(
            f"{option} {name}: {word!r} is no kind of cache",
            f"{nearest(word, WORDS)} (two: {FORM})",
        )
    return "" if word == PLAIN else word
