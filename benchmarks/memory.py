"""Peak memory of a run against what `plan` printed, on synthetic checkpoints of several depths.

    python benchmarks/memory.py --depths 8 24 [--methods gptq "gptq tune=0 guided_hessians=1"] --out PREFIX

Each run is a process of its own. Its peak above the imports is the kernel's high-water mark of resident memory, which
is reset after the imports, less what was resident then. A method may be followed by other choices of a recipe. Seconds
are those of the processor, without imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

# Prints the peak above the imports in bytes. The mark is reset because imports have a peak of their own.
RUN = r"""
import json, re, sys, time
from pathlib import Path
from quantforge import api
from quantforge.planning.recipe_options import build_recipe
from quantforge.settings import Settings
import quantforge.execution.execute, quantforge.execution.calibration
import quantforge.quantizers.gptq.gptq, quantforge.quantizers.awq, quantforge.quantizers.gptq.column_loops
import numba, quantforge.formats.compressed_tensors, transformers.models.llama.modeling_llama

def status(key):
    return int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

model, out, threads, choices = sys.argv[1:]
recipe = build_recipe(None, **json.loads(choices))
Path("/proc/self/clear_refs").write_text("5")
before, begun = status("VmRSS"), time.process_time()
api.quantize(model, recipe, Path(out), Settings(threads=int(threads)))
print(json.dumps([status("VmHWM") - before, time.process_time() - begun]))
"""


def main() -> None:
    """Measure every depth and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--ffn", type=int, default=4096)
    parser.add_argument(
        "--shared", type=int, default=4, help="query heads that share keys and values"
    )
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq", "awq"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for depth in options.depths:
            model = synthetic(Path(name) / f"{depth}", depth, options)
            for method in options.methods:
                rows.append(one(options, model, depth, method, Path(name)))
                print(json.dumps(rows[-1]), flush=True)
    lines = [
        "| method | blocks | weights on disk | planned | measured | measured / planned | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['method']} | {row['blocks']} | {row['disk'] / 1e6:.0f} MB | {row['planned'] / 1e6:.0f} MB"
        f" | {row['measured'] / 1e6:.0f} MB | {row['measured'] / row['planned']:.2f} | {row['seconds']:.0f} |"
        for row in rows
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    options.out.with_suffix(".json").write_text(
        json.dumps({"command": sys.argv[1:], "runs": rows}, indent=1) + "\n"
    )


def synthetic(path: Path, depth: int, options: argparse.Namespace) -> Path:
    """A random llama in float32 with a word-level tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width, intermediate_size=options.ffn, num_hidden_layers=depth,
        num_attention_heads=options.width // 64, num_key_value_heads=options.width // 64 // options.shared,
        vocab_size=4096, dtype="float32", tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(4096)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    ids = torch.randint(0, 4096, (options.samples * options.length * 2,)).tolist()
    (path / "text.txt").write_text("\n".join(f"w{i}" for i in ids))
    return path


def one(
    options: argparse.Namespace, model: Path, depth: int, method: str, scratch: Path
) -> dict[str, object]:
    """One planned and one measured peak."""
    from quantforge import api
    from quantforge.planning.recipe_options import build_recipe

    name, *further = method.split()
    choices: dict[str, object] = {
        "method": name, "bits": 4, "calibration": str(model / "text.txt"), "samples": options.samples,
        "length": options.length, **{key: int(value) for key, value in (word.split("=") for word in further)},
    }  # fmt: skip
    planned = api.plan(str(model), build_recipe(None, **choices))
    out = scratch / f"out-{depth}-{method.replace(' ', '-')}"
    command = [sys.executable, "-c", RUN, model, out, str(options.threads), json.dumps(choices)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, seconds = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "method": method,
        "blocks": depth,
        "disk": sum(file.stat().st_size for file in model.glob("*.safetensors")),
        "planned": planned.peak_memory_bytes,
        "measured": peak,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
