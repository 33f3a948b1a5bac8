"""Families whose artifacts are known not to load, by engine: the one list, until loaders and writers agree about them.

Seen with transformers 5.23 on tiny models of every family: the source loads, what is quantized does not, or loads with
layers left random. `HOW` says how it ends. GGUF and plain files are not meant. Experts that are stored one by one load
in compressed-tensors and in fp8 tiles (mixtral, qwen3_moe), and not packed by bitsandbytes, of any family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from quantforge.plans import EngineVerdict

_RENAMED = "it looks for layers under the names of the running model, and leaves them random"
_UNROLLED = "its loader unrolls the experts, which are stored as one tensor"
_WEIGHT = "its blocks read the weights of their linears themselves"
_TYPES = "its blocks mix float32 with the type of the packed layers"
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_JOINED = "its loader joins the matrices of experts into one tensor, which packed ones of bitsandbytes cannot be"
_JOINED_WHOLE = (
    "beside packed layers its loader joins packed experts alone, and these stay as they are"
)
HOW: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        "phimoe": _RENAMED, "deepseek_v4": _RENAMED, "kimi_k25": _RENAMED, "kimi_linear": _RENAMED, "step3p7": _RENAMED,
        "llama4": _UNROLLED, "llama4_text": _UNROLLED, "mistral_large4": _UNROLLED,
        "mamba": _WEIGHT, "mamba2": _WEIGHT, "zamba": _WEIGHT, "zamba2": _WEIGHT, "falcon": _WEIGHT, "rwkv": _WEIGHT,
        "xlstm": _WEIGHT, "recurrent_gemma": _WEIGHT, "longcat_flash": _TYPES,
    },
}  # fmt: skip


def judged(found: Iterable[EngineVerdict], *model_types: str) -> tuple[EngineVerdict, ...]:
    """Return the verdicts on a quantized model, those of engines that do not load its family refused."""
    return tuple(_judged(verdict, model_types) for verdict in found)


def joined(
    found: Iterable[EngineVerdict], form: str, modules: Iterable[str], kept: Iterable[str] = ()
) -> tuple[EngineVerdict, ...]:
    """Return the verdicts on packed ``modules`` of a format, those of engines that cannot join such experts refused.

    Args:
        found: the verdicts.
        form: key of the format.
        modules: what is packed.
        kept: tensors that stay as they are beside them.
    """
    verdicts = tuple(found)
    joins = {"bnb": (modules, _JOINED), "compressed-tensors": (kept, _JOINED_WHOLE)}
    names, reason = joins.get(form, ((), ""))
    if not any(_EXPERT.search(name) for name in names):
        return verdicts
    return tuple(
        replace(verdict, loads=False, reason=reason)
        if verdict.loads and verdict.engine == "transformers"
        else verdict
        for verdict in verdicts
    )


def computes_itself(*model_types: str) -> str:
    """Return the family among these whose blocks take no packed linears, "" for none."""
    reasons = HOW["transformers"]
    return next((name for name in model_types if reasons.get(name) == _WEIGHT), "")


def _judged(verdict: EngineVerdict, model_types: Iterable[str]) -> EngineVerdict:
    reasons = HOW.get(verdict.engine, {})
    family = next((name for name in model_types if name in reasons), "")
    if not verdict.loads or not family:
        return verdict
    return replace(verdict, loads=False, reason=f"{family} does not load: {reasons[family]}")
