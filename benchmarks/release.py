"""Eight variants of a model in one pass of the calibration rows, against the same eight made one after another.

    python benchmarks/release.py --model MODEL --calibration cal.txt [--out FILE.json]
    python benchmarks/release.py --width 2048 --blocks 2

Both sides are processes of their own, on one thread, after a small run of each variant for imports and compiling.
Printed are seconds of the processor and the peak above what was resident before, of each variant and of all together.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VARIANTS: dict[str, dict[str, Any]] = {
    "Q2_K": {"method": "gptq", "type": "Q2_K", "format": "gguf"},
    "Q3_K_M": {"method": "gptq", "type": "Q3_K_M", "format": "gguf"},
    "Q4_K_M": {"method": "gptq", "type": "Q4_K_M", "format": "gguf"},
    "Q5_K_M": {"method": "gptq", "type": "Q5_K_M", "format": "gguf"},
    "int4": {"method": "gptq", "scheme": "int4:g128:sym"},
    "int3": {"method": "gptq", "scheme": "int3:g128:sym"},
    "awq": {"method": "awq", "bits": 4, "format": "awq"},
    "fp8": {"method": "rtn", "format": "fp8"},
}
RUN = r"""
import json, re, sys, tempfile, time
from pathlib import Path
from quantforge.planning.recipe_options import build_recipe
from quantforge.settings import Settings
from quantforge.api.variants import plan_variants

model, text, length, samples, variants = sys.argv[1:]

def status(key):
    return int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def run(folder, **rows):
    Path(folder).mkdir()
    recipes = {
        name: build_recipe(None, calibration=text, **rows, **options)
        for name, options in json.loads(variants).items()
    }
    place_of = lambda name, _: Path(folder, name).absolute()
    planned, errors = plan_variants(model, recipes, place_of, Settings(threads=1))
    assert not errors, errors
    planned.make(Path(), 0)

with tempfile.TemporaryDirectory() as scratch:
    run(scratch + "/warm", samples=2, length=32)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS"), time.process_time()
    run(scratch + "/timed", samples=int(samples), length=int(length))
    print(json.dumps({"seconds": time.process_time() - start, "peak": status("VmHWM") - before}))
"""


def main() -> None:
    """Run each variant, then all together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--width", type=int, default=2048, help="of a synthetic model")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or synthetic(Path(scratch, "model"), options)
        text = options.calibration or "builtin"
        asked = {name: VARIANTS[name] for name in options.variants}
        alone = {}
        for name, recipe in asked.items():
            alone[name] = measured(options, model, text, {name: recipe})
            print(name, alone[name], flush=True)
        together = measured(options, model, text, asked)
    found = {
        "alone": alone,
        "together": together,
        "time": together["seconds"] / sum(one["seconds"] for one in alone.values()),
        "peak": together["peak"] / max(one["peak"] for one in alone.values()),
    }
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def synthetic(path: Path, options: argparse.Namespace) -> Path:
    """Save a random llama with the tokenizer of the bundled model."""
    demo = Path(__file__).parents[1] / "models/demo"
    shutil.copytree(demo, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width, intermediate_size=options.width * 11 // 4 // 256 * 256,
        num_hidden_layers=options.blocks, num_attention_heads=options.width // 128,
        num_key_value_heads=max(1, options.width // 512),
        vocab_size=LlamaConfig.from_pretrained(demo).vocab_size, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def measured(
    options: argparse.Namespace, model: Path, text: Path | str, variants: dict[str, Any]
) -> dict[str, float]:
    """Return the seconds of the processor and the peak in bytes of one process that makes some variants."""
    command = [sys.executable, "-c", RUN, model, text, options.length, options.samples]
    done = subprocess.run(
        [*map(str, command), json.dumps(variants)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
