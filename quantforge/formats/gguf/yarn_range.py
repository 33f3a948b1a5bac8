"""The range of frequencies that YaRN interpolates, in transformers and in llama.cpp.

Frequencies are counted from the fastest. Those before the range stay, those behind it are divided, those in it are
between. Its ends follow from how often a frequency turns in the original context; llama.cpp rounds them outwards, and
takes 32 and 1 turns for granted in the graphs of most families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from quantforge.architectures.llama_cpp import Family
from quantforge.errors import InputError
from quantforge.formats.gguf.rope import Rope, number
from quantforge.formats.gguf.stated_keys import refused

BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # turns, where a configuration leaves them out


def check_range(rope: Rope, family: Family) -> None:
    """Refuse a range that is another one in llama.cpp, unless `Family.yarn_rounded` allows for what `rounding` says.

    Raises:
        InputError: the range ends before it begins.
        RefusedError: naming the key.
    """
    stated = _betas(rope)
    said = ", ".join(f"{name} = {value:g}" for name, value in stated.items())
    if stated["beta_fast"] < stated["beta_slow"]:
        raise InputError(f"config.json: {said}", "exchange them")
    if _ends(rope, stated, whole=_whole(rope))[1] < 0:
        # transformers interpolates nothing then, and llama.cpp all
        tokens = rope.original or rope.context
        short = f"yarn from {tokens} tokens, fewer than a turn of its slow frequencies,"
        raise refused(short, "more")
    known = stated if family.yarn_betas else BETAS
    if _ends(rope, stated, whole=True) != _ends(rope, known, whole=True):
        usual = ", ".join(f"{name} = {value:g}" for name, value in BETAS.items())
        flags = " ".join(
            f"--yarn-{name.replace('_', '-')} {value:g}" for name, value in stated.items()
        )
        raise refused(
            f"{said} of yarn scaling", f"{usual}; with these, llama.cpp has to be run with {flags}"
        )
    if (said := rounding(rope)) and not family.yarn_rounded:
        raise refused(f"truncate = false of yarn scaling, by which {said},", "true")


def rounding(rope: Rope) -> str:
    """Return from where to where llama.cpp interpolates, and transformers does; "" where both do alike."""
    if rope.kind != "yarn" or _whole(rope):
        return ""
    betas = _betas(rope)
    exact, whole = (_ends(rope, betas, whole=rounded) for rounded in (False, True))
    if exact == whole:
        return ""
    here, there = f"{exact[0]:.2f} to {exact[1]:.2f}", f"{whole[0]:g} to {whole[1]:g}"
    return f"frequencies {here} are interpolated, in llama.cpp {there}"


def _whole(rope: Rope) -> bool:
    return bool(rope.settings.get("truncate", True))


def _betas(rope: Rope) -> dict[str, float]:
    return {name: number(rope.settings, name, usual) for name, usual in BETAS.items()}


def _ends(rope: Rope, betas: Mapping[str, float], *, whole: bool) -> tuple[float, float]:
    """Return the first and the last frequency of the range; ``whole``: rounded outwards."""
    original, base = rope.original or rope.context, 2 * math.log(max(rope.base, 1 + 1e-9))
    low, high = (
        rope.width * math.log(original / (2 * math.pi * turns)) / base for turns in betas.values()
    )
    if whole:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rope.width - 1)
