"""Peak memory of conversions without data, on a synthetic sharded checkpoint that is far larger than the peak.

    python benchmarks/streamed.py --gigabytes 8 --out docs/results/streamed

The checkpoint is a bfloat16 llama of width 4096 (its blocks are copies of one another, which rounding does not mind),
one shard for two blocks. Each conversion is a process of its own; its peak above the imports is the kernel's high-water
mark of resident memory, reset after the imports, less what was resident then. Needs twice the size on the disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, FFN, KV, VOCABULARY = 4096, 14336, 1024, 32000
CONVERSIONS = (("fp8:row:sym:f32", "compressed-tensors"), ("FP8_BLOCK", "fp8"), ("nf4", "bnb"))
MATRICES = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (KV, WIDTH), "self_attn.v_proj": (KV, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (FFN, WIDTH), "mlp.up_proj": (FFN, WIDTH),
    "mlp.down_proj": (WIDTH, FFN),
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")

# Prints peak, plan's prediction, bytes of the result and seconds.
RUN = r"""
import json, re, sys, time
from pathlib import Path
from quantforge import api
from quantforge.planning.recipe_options import build_recipe
from quantforge.settings import Settings
import quantforge.execution.execute, quantforge.execution.calibration, quantforge.quantizers.rtn, numba
import quantforge.packers.fp8, quantforge.packers.nf4, quantforge.packers.scale_search
import transformers.models.llama.modeling_llama

def status(key):
    return int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

model, out, scheme, form = sys.argv[1:]
recipe = build_recipe(None, method="rtn", scheme=scheme, format=form, scales="absmax")
Path("/proc/self/clear_refs").write_text("5")
before, start = status("VmRSS"), time.monotonic()
done = api.quantize(model, recipe, Path(out), Settings(threads=1))
print(json.dumps({"measured": status("VmHWM") - before, "planned": done.plan.peak_memory_bytes,
                  "output": done.plan.output_bytes, "seconds": time.monotonic() - start}))
"""


def main() -> None:
    """Make the checkpoint, convert it, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        model = synthetic(Path(name) / "model", options.gigabytes)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        for scheme, form in CONVERSIONS:
            with tempfile.TemporaryDirectory(dir=name) as scratch:
                out = Path(scratch) / "out"
                command = [sys.executable, "-c", RUN, str(model), str(out), scheme, form]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            rows.append({"scheme": scheme, "format": form, "input": size, **found})
            print(json.dumps(rows[-1]), flush=True)
    lines = [
        "| | format | in, GB | out, GB | peak, MB | predicted by the plan, MB | seconds |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| `{row['scheme']}` | {row['format']} | {row['input'] / 1e9:.2f} | {row['output'] / 1e9:.2f} |"
            f" {row['measured'] / 1e6:.0f} | {row['planned'] / 1e6:.0f} | {row['seconds']:.0f} |"
            for row in rows
        ),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(lines))


def synthetic(path: Path, gigabytes: float) -> Path:
    """Write a llama of about this size, a shard for every two blocks."""
    start = time.monotonic()
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    matrices = {name: random(*shape) for name, shape in MATRICES.items()}
    outer = {"model.embed_tokens.weight": random(VOCABULARY, WIDTH), "lm_head.weight": random(VOCABULARY, WIDTH),
             "model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16)}  # fmt: skip
    block = sum(value.nbytes for value in matrices.values())
    depth = max(2, round((gigabytes * 1e9 - sum(value.nbytes for value in outer.values())) / block))
    path.mkdir(parents=True)
    shards = [outer]
    for first in range(0, depth, 2):
        shards.append({})
        for index in range(first, min(first + 2, depth)):
            prefix = f"model.layers.{index}"
            shards[-1] |= {f"{prefix}.{name}.weight": value for name, value in matrices.items()}
            shards[-1] |= {
                f"{prefix}.{name}.weight": torch.ones(WIDTH).bfloat16() for name in NORMS
            }
    places = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {key: value.clone() for key, value in tensors.items()}, path / name, {"format": "pt"}
        )
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": VOCABULARY,
        "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": depth, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    print(f"{depth} blocks, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return path


if __name__ == "__main__":
    main()
