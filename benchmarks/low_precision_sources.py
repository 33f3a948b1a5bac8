"""Speed and memory of rounding from a source in low precision, against the same model in bfloat16.

    python benchmarks/low_precision_sources.py --out PREFIX
    python benchmarks/low_precision_sources.py --hidden 7168 --ffn 2048 --experts 384 --threads 2 --out PREFIX

One layer of a mixture (`--experts 0`: of a dense model) with random weights is written twice, in bfloat16 and in fp8
with tiles of 128 by 128, and rounded to int4 by absmax: the run reads, decodes, rounds, packs and writes. Each run is a
process of its own; its peak above the imports is the kernel's high-water mark of resident memory. `cp` copies the files
of the source in the same run, one by one, each copy removed at once: the disk holds the source beside a shard or the
result (`--cold` drops the cache of the disk before, as root). Times are of the whole command but
for its imports, seconds of the processor beside them, because other work on the machine moves the former alone.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from quantforge.files.writer import WeightsWriter, index_json, plan_files, plan_shards
from quantforge.plans import StoredTensor

SIDE = 128
SHARD = 5 * 10**9
INDEX = "model.safetensors.index.json"
RUN = r"""
import json, re, resource, sys, time
from pathlib import Path
from quantforge import api
from quantforge.planning.recipe_options import build_recipe
from quantforge.settings import Settings
import quantforge.execution.execute, quantforge.quantizers.rtn, quantforge.formats.compressed_tensors, numba

def status(key):
    return int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

model, out, threads = sys.argv[1:]
recipe = build_recipe(None, method="rtn", bits=4, scales="absmax")
Path("/proc/self/clear_refs").write_text("5")
before, begun, used = status("VmRSS"), time.monotonic(), processor()
api.quantize(model, recipe, Path(out), Settings(threads=int(threads)))
print(json.dumps({
    "peak": status("VmHWM") - before, "seconds": time.monotonic() - begun, "processor": processor() - used,
}))
"""


def main() -> None:
    """Write the two sources, run, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        for kind in ("fp8", "bfloat16"):
            model = Path(name) / kind
            weights = written(model, kind == "fp8", options)
            rows[kind] = measured(model, Path(name), options) | {"weights": weights}
            print(kind, json.dumps(rows[kind]), flush=True)
            shutil.rmtree(model)
    per_weight = rows["bfloat16"]["processor"] / rows["fp8"]["processor"]
    lines = [
        "| source | bytes | seconds | of the processor | of `cp`'s speed | peak above the imports |",
        "|---|---|---|---|---|---|",
        *(
            f"| {kind} | {row['bytes'] / 1e9:.2f} GB | {row['seconds']:.1f} | {row['processor']:.1f} |"
            f" {row['cp'] / row['seconds']:.2f} | {row['peak'] / 1e6:.0f} MB |"
            for kind, row in rows.items()
        ),
        "",
        f"Weights per second of the processor, fp8 over bfloat16: {per_weight:.2f}.",
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    document = {"command": sys.argv[1:], "runs": rows}
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(lines))


def measured(model: Path, work: Path, options: argparse.Namespace) -> dict[str, float]:
    """Copy the source, then round it in a process of its own."""
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    dropped(options)
    copied = 0.0
    for path in sorted(model.glob("*.safetensors")):
        begun = time.monotonic()
        subprocess.run(["cp", path, work / "copy"], check=True)
        copied += time.monotonic() - begun
        (work / "copy").unlink()
    dropped(options)
    command = [sys.executable, "-c", RUN, str(model), str(work / "out"), str(options.threads)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(work / "out")
    return json.loads(found.stdout.splitlines()[-1]) | {"bytes": size, "cp": copied}


def dropped(options: argparse.Namespace) -> None:
    """Drop what the system keeps of files in memory."""
    subprocess.run(["sync"], check=True)
    if options.cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")


def written(model: Path, tiles: bool, options: argparse.Namespace) -> int:
    """Write the model, and return the number of its weights."""
    model.mkdir()
    (model / "config.json").write_text(json.dumps(configuration(tiles, options)))
    shapes = dict(tensors(options))
    stored = []
    for name, shape in shapes.items():
        if tiles and name.endswith("proj.weight"):
            grid = tuple(-(-size // SIDE) for size in shape)
            stored += [
                StoredTensor(name, "F8_E4M3", shape),
                StoredTensor(f"{name}_scale_inv", "F32", grid),
            ]
        else:
            stored.append(StoredTensor(name, "BF16", shape))
    shards = plan_shards(stored, SHARD)
    if len(shards) > 1:
        (model / INDEX).write_bytes(index_json(shards))
    with WeightsWriter(model, plan_files(shards)) as writer:
        for index, item in enumerate(stored):
            writer.write(item.name, drawn(item.dtype, item.shape).roll(index, 0))
    return sum(map(math.prod, shapes.values()))


@cache
def drawn(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw a tensor, once for each shape: any bytes but those of a NaN, or small numbers."""
    generator = torch.Generator().manual_seed(0)
    if dtype == "F8_E4M3":
        codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
        return codes.view(torch.float8_e4m3fn)
    if dtype == "F32":
        return torch.rand(shape, generator=generator) * 1e-4 + 1e-5
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def configuration(tiles: bool, options: argparse.Namespace) -> dict[str, object]:
    """Return the configuration of one layer."""
    heads = max(1, options.hidden // SIDE)
    found: dict[str, object] = {
        "model_type": "qwen3_moe" if options.experts else "llama",
        "architectures": ["Qwen3MoeForCausalLM" if options.experts else "LlamaForCausalLM"],
        "vocab_size": 256, "hidden_size": options.hidden, "intermediate_size": options.ffn, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": SIDE, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    if options.experts:
        found |= {
            "num_experts": options.experts, "num_experts_per_tok": 2, "moe_intermediate_size": options.ffn,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    if tiles:
        found["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [SIDE, SIDE],
        }
    return found


def tensors(options: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors."""
    hidden, ffn, layer = options.hidden, options.ffn, "model.layers.0"
    inner = max(1, hidden // SIDE) * SIDE
    yield from {"model.embed_tokens.weight": (256, hidden), "lm_head.weight": (256, hidden)}.items()
    for norm in ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
        yield f"{norm}.weight", (hidden,)
    for name in "qkv":
        yield f"{layer}.self_attn.{name}_proj.weight", (inner, hidden)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, inner)
    places = [f"{layer}.mlp.experts.{index}" for index in range(options.experts)] or [
        f"{layer}.mlp"
    ]
    if options.experts:
        yield f"{layer}.mlp.gate.weight", (options.experts, hidden)
        for name in "qk":
            yield f"{layer}.self_attn.{name}_norm.weight", (SIDE,)
    for place in places:
        yield f"{place}.gate_proj.weight", (ffn, hidden)
        yield f"{place}.up_proj.weight", (ffn, hidden)
        yield f"{place}.down_proj.weight", (hidden, ffn)


if __name__ == "__main__":
    main()
