"""Files of an adapter as PEFT reads them, written: what `quantforge.formats.sources.adapter` says of their names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from quantforge.checkpoint.shards import header_bytes, natural
from quantforge.formats.sources.adapter import PREFIX, WEIGHTS
from quantforge.plans import FilePlan, StoredTensor

BASE = "base"  # in the manifest: the quantized model that it was made for, as ``source`` is what that was made from


def names_of_halves(module: str) -> tuple[str, str]:
    """Return the names of ``A`` and ``B`` of a module of the running model."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def planned_weights(shapes: Mapping[str, tuple[int, int]], rank: int) -> FilePlan:
    """Plan the file of weights: float16 halves for each module, whose weights are ``(out, in)``."""
    tensors = []
    for module in sorted(shapes, key=natural):
        (rows, columns), (a, b) = shapes[module], names_of_halves(module)
        tensors += [StoredTensor(a, "F16", (rank, columns)), StoredTensor(b, "F16", (rows, rank))]
    header = header_bytes(tensors)
    offset, places = len(header), []
    for tensor in tensors:
        places.append((tensor, offset))
        offset += tensor.nbytes
    return FilePlan(WEIGHTS, offset, ((0, header),), tuple(places))


def configuration(
    base: str, modules: Collection[str], others: Collection[str], rank: int, *, turned: bool
) -> bytes:
    """Return ``adapter_config.json``, by which the product counts once.

    Args:
        base: name of the model that the adapter is of.
        modules: that it changes.
        others: linears of the model that it does not.
        rank: of every product.
        turned: the family stores its linears ``[in, out]``.
    """
    ends = {module.rpartition(".")[2] for module in modules}
    apart = ends.isdisjoint(module.rpartition(".")[2] for module in others)
    told: dict[str, Any] = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": turned,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(ends if apart else modules, key=natural),
        "task_type": "CAUSAL_LM",
    }
    return json.dumps(told, indent=2, sort_keys=True).encode() + b"\n"
