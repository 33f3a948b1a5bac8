"""Refusals of words that are no method, with what was meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantforge.errors import UnknownNameError, nearest

if TYPE_CHECKING:
    from quantforge.quantizers import Method

# Words of other tools, as `quantforge.errors.nearest` looks them up.
METHOD_WORDS: Mapping[str, str] = {
    "gptqmodel autogptq gptqmodifier gptqv2 gptaq gptqmarlin gptvq": "--method gptq",
    "autoawq awqmodifier awqmarlin llmawq mlxawq": "--method awq",
    "smoothquant smoothquantmodifier sq": "--method smooth+gptq, or smooth alone",
    "none nearest round roundtonearest naive minmax plain quantizationmodifier data free datafree": "--method rtn",
    "autoround signround quip quipsharp hqq aqlm adaround omniquant brecq dwq":
        "it is not here; without --method what measured best is taken, below 8 bits --method awq+gptq",
    "quarot spinquant hadamard rotation rotations": "--method rotate+gptq",
    "auto best default": "leave --method out: what measured best is taken",
    "bnb bitsandbytes nf4 fp4 qlora": "this is a format: --format bnb",
    "llmint8": "this is a scheme: --scheme LLM_INT8",
    "gguf ggml llamacpp kquant kquants": "this is a format: --format gguf",
    "imatrix": "quantforge quantize MODEL --imatrix FILE --method rtn --format gguf",
    "fp8 fp8dynamic": "this is a scheme: --scheme FP8_DYNAMIC",
    "w4a16 w8a8 w8a16 int4 int8": "this is a scheme: --scheme W4A16, or --bits 4",
    "prune pruning sparse sparsity": "--method wanda --sparsity 50%",
    "dynamicquant mixed mixedprecision": "`quantforge allocate` chooses a scheme for each layer",
}  # fmt: skip


def unknown_method(word: str, text: str, methods: Mapping[str, Method]) -> UnknownNameError:
    """Return the refusal of a word of a sum of methods; the hint is the sum, where all its words are methods."""
    where = f" in '{text}'" if word != text.lower() else ""
    words = re.findall(r"\w+", text.lower())
    if len(words) < 2 or not methods.keys() >= {*words}:
        return UnknownNameError(
            f"unknown method '{word}'{where}", nearest(word, methods, METHOD_WORDS)
        )
    words.sort(key=lambda one: methods[one].kind == "rounder")
    return UnknownNameError(f"unknown method '{word}'{where}", f"--method {'+'.join(words)}")
