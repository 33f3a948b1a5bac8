"""Seconds and memory of `plan` on the headers of a mixture of a trillion parameters.

    python benchmarks/trillion_plan.py --out PREFIX

The model has the shape of Kimi K2: 61 layers, 384 experts in all but the first, latent attention, 163,840 words. Its
files are holes behind true headers, one file per layer and an index: `plan` reads no more. Every plan is a process of
its own; the seconds are its whole time, and the memory its peak, imports included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from quantforge.files.writer import header_bytes
from quantforge.plans import StoredTensor

LAYERS, EXPERTS, SIDE = 61, 384, 128
HIDDEN, DENSE, INNER, VOCABULARY, HEADS = 7168, 18432, 2048, 163840, 64
CONFIG = {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16", "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN, "intermediate_size": DENSE, "moe_intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131072, "rope_theta": 50000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
TILES = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [SIDE, SIDE]}
PLANS = {
    "rtn": ("--method", "rtn", "--bits", "4"),
    "gptq": ("--method", "gptq", "--bits", "4"),
    "gptq, every tensor as JSON": ("--method", "gptq", "--bits", "4", "--tensors", "--json"),
}


def main() -> None:
    """Write the headers, plan, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("bfloat16", "fp8 tiles"):
            model = Path(scratch) / kind.replace(" ", "-")
            count, parameters = written(model, tiles=kind != "bfloat16")
            for name, words in PLANS.items():
                measured = planned(model, words)
                rows.append(
                    {"source": kind, "tensors": count, "parameters": parameters, "plan": name}
                    | measured
                )
                print(json.dumps(rows[-1]), flush=True)
    lines = [
        "| source | tensors | parameters | plan | seconds | of the processor | peak |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['source']} | {row['tensors']:,} | {row['parameters'] / 1e12:.3f} trillion | {row['plan']} |"
            f" {row['seconds']:.1f} | {row['processor']:.1f} | {row['peak'] / 1e6:.0f} MB |"
            for row in rows
        ),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def planned(model: Path, words: tuple[str, ...]) -> dict[str, float]:
    """Plan in a process of its own, and return its seconds, those of the processor, and its peak of memory."""
    command = [sys.executable, "-m", "quantforge", "plan", str(model), *words]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as shown:
        process = subprocess.Popen(command, stdout=shown, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        shown.seek(0)
        if process.returncode:
            raise SystemExit(shown.read().decode())
    return {
        "seconds": time.monotonic() - begun,
        "processor": used.ru_utime + used.ru_stime,
        "peak": used.ru_maxrss * 1024,
    }


def written(model: Path, *, tiles: bool) -> tuple[int, int]:
    """Write a model whose weights are holes; return the numbers of its tensors and of its parameters."""
    model.mkdir()
    config = CONFIG | ({"quantization_config": TILES} if tiles else {})
    (model / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    parameters = size = 0
    for number in range(LAYERS + 1):
        stored: list[StoredTensor] = []
        for name, shape in layer(number) if number < LAYERS else outer():
            parameters += math.prod(shape)
            if tiles and name.endswith(("proj.weight", "_with_mqa.weight")):
                grid = tuple(-(-rows // SIDE) for rows in shape)
                stored += [
                    StoredTensor(name, "F8_E4M3", shape),
                    StoredTensor(f"{name}_scale_inv", "F32", grid),
                ]
            else:
                stored.append(StoredTensor(name, "BF16", shape))
        stored.sort(key=lambda tensor: tensor.name)
        file = f"model-{number + 1:05}-of-{LAYERS + 1:05}.safetensors"
        header, content = header_bytes(stored), sum(tensor.nbytes for tensor in stored)
        with (model / file).open("wb") as handle:
            handle.write(header)
            handle.truncate(len(header) + content)
        places |= {tensor.name: file for tensor in stored}
        size += content
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(places), parameters


def outer() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors outside of the layers."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)


def layer(number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a layer."""
    place = f"model.layers.{number}"
    heads, wide = HEADS * 192, HEADS * 256
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{place}.{norm}.weight", (HIDDEN,)
    attention = {
        "q_a_proj": (1536, HIDDEN), "q_a_layernorm": (1536,), "q_b_proj": (heads, 1536),
        "kv_a_proj_with_mqa": (576, HIDDEN), "kv_a_layernorm": (512,), "kv_b_proj": (wide, 512),
        "o_proj": (HIDDEN, HEADS * 128),
    }  # fmt: skip
    for name, shape in attention.items():
        yield f"{place}.self_attn.{name}.weight", shape
    if number < 1:
        yield from gated(f"{place}.mlp", DENSE)
        return
    yield f"{place}.mlp.gate.weight", (EXPERTS, HIDDEN)
    yield f"{place}.mlp.gate.e_score_correction_bias", (EXPERTS,)
    for expert in range(EXPERTS):
        yield from gated(f"{place}.mlp.experts.{expert}", INNER)
    yield from gated(f"{place}.mlp.shared_experts", INNER)


def gated(place: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the three matrices of a gated MLP."""
    yield f"{place}.gate_proj.weight", (width, HIDDEN)
    yield f"{place}.up_proj.weight", (width, HIDDEN)
    yield f"{place}.down_proj.weight", (HIDDEN, width)


if __name__ == "__main__":
    main()
