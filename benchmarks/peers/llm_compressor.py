"""One run of llm-compressor, in its own environment: quantize a model on given token rows and save it.

    python benchmarks/peers/llm_compressor.py MODEL ROWS.npy OUT METHOD SCHEME

SCHEME: ``int4:g128:sym`` and the like, or the name of a scheme without choices (``nvfp4``, ``mxfp4``; weights alone).

Of a mixture every token passes every expert while calibrating, which is the peer's default; routers and the gates of
shared experts stay as they are. Prints one JSON line with the seconds of ``oneshot`` alone, and of the whole run:
loading and saving too, imports not.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers.models.llama.modeling_llama  # noqa: F401  loading imports it otherwise
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

KEPT = ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]


def main() -> None:
    """Quantize and save."""
    model_path, rows_path, out, method, scheme = sys.argv[1:]
    begun = time.monotonic()
    model = linearize_moe(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))
    rows = np.load(rows_path)
    ones = [[1] * rows.shape[1]] * len(rows)
    data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": ones})
    kind = {"gptq": GPTQModifier, "rtn": QuantizationModifier}[method]
    if ":" in scheme:
        bits, group, zero = scheme.split(":")
        args = QuantizationArgs(
            num_bits=int(bits.removeprefix("int")),
            symmetric=zero == "sym",
            strategy="group",
            group_size=int(group.removeprefix("g")),
        )
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}
        recipe = kind(config_groups=groups, ignore=KEPT)
    else:
        recipe = kind(scheme=f"{scheme.upper()}A16", targets="Linear", ignore=KEPT)
    start = time.monotonic()
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        max_seq_length=rows.shape[1],
        num_calibration_samples=len(rows),
        moe_calibrate_all_experts=True,
    )
    seconds = time.monotonic() - start
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(out)
    (Path(out) / "tokenizer.json").write_bytes((Path(model_path) / "tokenizer.json").read_bytes())
    whole = time.monotonic() - begun
    names = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    print(
        json.dumps(
            {
                "seconds": seconds,
                "whole": whole,
                "versions": {name: version(name) for name in names},
            }
        )
    )


if __name__ == "__main__":
    main()
