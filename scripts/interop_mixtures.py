"""Mixtures of experts in the layouts that vLLM reads: make them, and tabulate what its CPU build says of them.

python scripts/interop_mixtures.py make DIRECTORY
python scripts/interop_mixtures.py table FOUND.json RESULTS.md

One is trained (models/demo-moe, of the family qwen2_moe); the others are random, of the same sizes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from interop_artifacts import expect, linked, versions_of, write
from interop_sections import renew

TRAINED = "qwen2_moe"
_COMMON: dict[str, Any] = {
    "vocab_size": 1536, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 1024, "num_experts_per_tok": 2,
}  # fmt: skip
RANDOM: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"intermediate_size": 128, "num_local_experts": 8},
    "gpt_oss": {"intermediate_size": 128, "num_local_experts": 8},
}  # fmt: skip
_KEPT = ("--ignore", "*.experts.*")  # the experts stay as they are
LAYOUTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ct-int4-g128": ("int4:g128:sym", "compressed-tensors", ()),
    "ct-w8a8": ("W8A8", "compressed-tensors", ()),
    "ct-fp8-dynamic": ("FP8_DYNAMIC", "compressed-tensors", ()),
    "ct-fp8-block": ("FP8_BLOCK", "compressed-tensors", ()),
    "ct-mxfp4": ("MXFP4", "compressed-tensors", ()),
    "fp8-block": ("FP8_BLOCK", "fp8", ()),
    "gptq-int4-g128": ("int4:g128:sym", "gptq", ()),
    "awq-int4-g128": ("int4:g128:asym", "awq", ()),
    "bnb-nf4": ("nf4:g64", "bnb", ()),
    "bnb-int8": ("int8:row:sym", "bnb", ()),
    "ct-int4-experts-kept": ("int4:g128:sym", "compressed-tensors", _KEPT),
    "ct-w8a8-experts-kept": ("W8A8", "compressed-tensors", _KEPT),
    "ct-fp8-dynamic-experts-kept": ("FP8_DYNAMIC", "compressed-tensors", _KEPT),
    "gptq-int4-experts-kept": ("int4:g128:sym", "gptq", _KEPT),
    "awq-int4-experts-kept": ("int4:g128:asym", "awq", _KEPT),
}
FAMILIES = (*RANDOM, TRAINED)


def make(directory: Path) -> None:
    """Write the models, quantize each into every layout, and save what our decoding says of a fixed prompt."""
    for family in FAMILIES:
        model = (
            Path("models/demo-moe") if family == TRAINED else _random(family, directory / "random")
        )
        linked(model, directory / f"{family}-source")
        expect(directory / f"{family}-source")
        for name, entry in LAYOUTS.items():
            write(model, entry, directory / f"{family}-{name}")
            expect(directory / f"{family}-{name}")


def _random(family: str, directory: Path) -> Path:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**_COMMON, **RANDOM[family], pad_token_id=0)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(directory / family)
    return directory / family


def table(found: Path, out: Path) -> None:
    """Renew the section of the results; an engine may print to stdout, its results are the last line."""
    result = json.loads(found.read_text().splitlines()[-1])
    refusals: dict[str, int] = {}

    def cell(name: str) -> str:
        one = result["artifacts"].get(name)
        if one is None:
            return "-"
        if "error" in one:
            return f"refused ({refusals.setdefault(one['error'], len(refusals) + 1)})"
        return f"{one['difference']:.1e} ({one['mean']:.1e})"

    rows = [
        f"| {name} | " + " | ".join(cell(f"{family}-{name}") for family in FAMILIES) + " |"
        for name in ("source", *LAYOUTS)
    ]
    head = [
        "## Mixtures of experts, in vLLM",
        "",
        NOTE,
        "",
        "| artifact | " + " | ".join(FAMILIES) + " |",
        "|---|" + "---|" * len(FAMILIES),
    ]
    why = [f"- ({number}) {error}" for error, number in refusals.items()]
    renew(out, "\n".join([*head, *rows, "", *why, f"- {versions_of(result['versions'])}"]))


NOTE = (
    "Random models of 3 layers with 256 features and 8 experts, of which two see a token, and the bundled trained"
    " mixture (qwen2_moe). Cells as for vLLM above. `experts-kept`: everything but the experts is quantized. On x86,"
    " vLLM 0.32 computes experts in 16 bits on any CPU; its kernels for experts in int4, int8, fp8 and mxfp4, and for"
    " linears in fp8 tiles, ask for AMX, that for int4 linears is in its build for AVX-512 alone, and the plugin for"
    " bitsandbytes computes experts with Triton. This was run on a CPU with AVX2."
    " How much of what rows with rounded inputs differ is that of bfloat16 was not measured."
)

if __name__ == "__main__":
    {"make": make, "table": table}[sys.argv[1]](*map(Path, sys.argv[2:]))
