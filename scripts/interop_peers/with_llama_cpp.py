"""Artifacts of llama.cpp: its converter's, and its quantizer's from them. Decoded by the gguf package beside it.

The environment variable LLAMA_CPP names the folder that scripts/llama_cpp_tools makes.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(os.environ["LLAMA_CPP"])
SOURCE = ROOT / "source"
sys.path[:0] = [str(SOURCE / "gguf-py"), str(SOURCE)]

import gguf
from record import digest, run

# Its converter knows tokenizers by a hash; that of the tiny sources is plain byte-level BPE.
CONVERT = """
import conversion.base, runpy, sys
conversion.base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BLOCK = "model.layers.0"
NAMES = {
    "token_embd": "model.embed_tokens",
    **{f"attn_{part}": f"{BLOCK}.self_attn.{part}_proj" for part in "qkv"},
    "attn_output": f"{BLOCK}.self_attn.o_proj",
    **{f"ffn_{part}": f"{BLOCK}.mlp.{part}_proj" for part in ("gate", "up", "down")},
}
# Name: (source, type of the converter, type of the quantizer or none).
RECIPES = {
    "llama.cpp-q8_0": ("narrow", "q8_0", ""),
    "llama.cpp-q4_k_m": ("wide", "bf16", "Q4_K_M"),
    "llama.cpp-iq4_xs": ("wide", "bf16", "IQ4_XS"),
    "llama.cpp-q3_k_m": ("wide", "bf16", "Q3_K_M"),
}


def convert(model, out, kind):
    """Run the converter."""
    path = os.pathsep.join([str(SOURCE), str(SOURCE / "gguf-py")])
    command = [sys.executable, "-c", CONVERT, SOURCE / "convert_hf_to_gguf.py", model]
    options = ["--outfile", out, "--outtype", kind, "--model-name", "tiny"]
    subprocess.run([*command, *options], check=True, env=os.environ | {"PYTHONPATH": path})


def straight(weight, heads):
    """Rows in the order of transformers: the converter interleaves the halves of each head."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def make(source, converted, quantized, sources, out):
    """Convert, quantize, decode every matrix."""
    file = out.with_name(f"{out.name}.gguf")
    if quantized:
        between = out.with_name(f"{out.name}.between.gguf")
        convert(sources / source, between, converted)
        subprocess.run([ROOT / "bin" / "llama-quantize", between, file, quantized, "1"], check=True)
        between.unlink()
    else:
        convert(sources / source, file, converted)
    reader = gguf.GGUFReader(file)
    heads = {
        part: int(reader.get_field(f"llama.attention.{key}").contents())
        for part, key in (("attn_q", "head_count"), ("attn_k", "head_count_kv"))
    }
    decoded = {}
    for item in reader.tensors:
        if len(item.shape) == 2:
            _, _, part = item.name.removesuffix(".weight").rpartition(".")
            weight = gguf.quants.dequantize(item.data, item.tensor_type)
            if part in heads:
                weight = straight(weight, heads[part])
            decoded[NAMES[part]] = digest(weight)
    made = f"convert_hf_to_gguf.py --outtype {converted}" + (
        f", llama-quantize {quantized}" if quantized else ""
    )
    return {"source": source, "made": made, "dtype": "float32", "decoded": decoded}


run({name: partial(make, *recipe) for name, recipe in RECIPES.items()}, ("gguf",))
