"""Peak memory of converting a large synthetic checkpoint to GGUF without data.

    python benchmarks/gguf_memory.py --blocks 18 --types Q8_0 Q4_K_M

A tied llama of 4096 columns (14336 in the MLP) and 64,000 tokens, 0.44 GB a block, filled with the same run of random
numbers again and again. Each conversion is a process of its own with one thread; its peak above the imports is the
kernel's high-water mark of resident memory, reset after the imports, less what was resident then. The bound is 300 MB
and twice the largest tensor as stored.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from quantforge.files.writer import header_bytes
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.plans import StoredTensor

TOKENS = 64_000
CONVERT = r"""
import re, sys
from pathlib import Path
from quantforge import api
from quantforge.planning.recipe_options import build_recipe
from quantforge.settings import Settings
import torch, gguf, numba, quantforge.execution.execute, quantforge.execution.data_free
import quantforge.packers.ggml.packer, quantforge.packers.ggml.row_loops, quantforge.packers.ggml.search_loops

def status(key):
    return int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

model, out, kind, scales = sys.argv[1:]
recipe = build_recipe(None, method="rtn", format="gguf", type=kind, calibration="none", scales=scales)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
api.export(model, recipe, Path(out), Settings(threads=1))
print(status("VmHWM") - before)
"""


def main() -> None:
    """Convert into every type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=18)
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K_M"])
    parser.add_argument("--scales", default="search")
    parser.add_argument("--work", help="a directory on a disk that has room")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        model, out = synthetic(Path(name) / "m", options.blocks), Path(name) / "x.gguf"
        size = (model / "model.safetensors").stat().st_size
        for kind in options.types:
            command = [sys.executable, "-c", CONVERT, str(model), str(out), kind, options.scales]
            ended = subprocess.run(command, check=True, capture_output=True, text=True)
            peak = int(ended.stdout.strip().splitlines()[-1])
            largest = max(entry.end - entry.start for entry in read_gguf(out).tensors.values())
            row = {"bytes": size, "blocks": options.blocks, "type": kind, "scales": options.scales}
            print(json.dumps({**row, "peak": peak, "bound": 300_000_000 + 2 * largest}), flush=True)
            for path in (out, out.with_name("x.gguf.quantforge.json")):
                path.unlink()


def synthetic(path: Path, blocks: int) -> Path:
    """Write the checkpoint."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=blocks, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=TOKENS, dtype="bfloat16", tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(path)
    with torch.device("meta"):
        shapes = {
            name: tuple(item.shape) for name, item in LlamaForCausalLM(config).state_dict().items()
        }
    tensors = [
        StoredTensor(name, "BF16", shape)
        for name, shape in shapes.items()
        if name != "lm_head.weight"
    ]
    chunk = (torch.randn(1 << 24) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    with (path / "model.safetensors").open("wb") as file:
        file.write(header_bytes(tensors))
        left = sum(tensor.nbytes for tensor in tensors)
        while left:
            left -= file.write(chunk[:left])
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"t{number}" for number in range(TOKENS - len(pieces))]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


if __name__ == "__main__":
    main()
