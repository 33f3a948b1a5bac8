"""Artifacts of llm-compressor in every format that it writes, and what compressed-tensors decodes them to."""

import json
from functools import partial

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from record import CALIBRATION, digest, linears, run
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

try:  # moved between releases
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
except ImportError:
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

# AWQ pins its caches for copies to a GPU, which torch refuses to do where there is none.
torch.Tensor.pin_memory = lambda tensor: tensor

IGNORE = {"ignore": ["lm_head"]}


def integers(bits, group, *, symmetric=True, **more):
    """A config group of weights in integers."""
    args = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy="group" if group else "channel",
        group_size=group, **more,
    )  # fmt: skip
    return {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}}


def gptq(**options):
    """GPTQ."""
    return [GPTQModifier(**options, **IGNORE)]


def plain(**options):
    """Plain rounding, activations observed."""
    return [QuantizationModifier(**options, **IGNORE)]


def awq(**options):
    """AWQ, folded into norms and linears; zero points."""
    return [AWQModifier(), QuantizationModifier(**options, **IGNORE)]


def smooth(**options):
    """SmoothQuant, then GPTQ."""
    return [SmoothQuantModifier(smoothing_strength=0.5), GPTQModifier(**options, **IGNORE)]


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
# Name: (source, the modifiers, their options).
RECIPES = {
    "llmc-w4a16-gptq": ("narrow", gptq, integers(4, 32, actorder="static")),
    "llmc-w4a16-awq-asym": ("narrow", awq, integers(4, 32, symmetric=False)),
    "llmc-w3a16": ("narrow", plain, integers(3, 32)),
    "llmc-w8a16": ("narrow", plain, integers(8, None)),
    "llmc-w8a8-smooth": ("narrow", smooth, {"scheme": "W8A8", "targets": "Linear"}),
    "llmc-fp8": ("narrow", plain, {"scheme": "FP8", "targets": "Linear", "kv_cache_scheme": KV}),
    "llmc-fp8-dynamic": ("narrow", plain, {"scheme": "FP8_DYNAMIC", "targets": "Linear"}),
    "llmc-fp8-block": ("square", plain, {"scheme": "FP8_BLOCK", "targets": "Linear"}),
    "llmc-nvfp4": ("narrow", plain, {"scheme": "NVFP4", "targets": "Linear"}),
    "llmc-nvfp4a16": ("narrow", plain, {"scheme": "NVFP4A16", "targets": "Linear"}),
    "llmc-mxfp4": ("narrow", plain, {"scheme": "MXFP4", "targets": "Linear"}),
    "llmc-mxfp4a16": ("narrow", plain, {"scheme": "MXFP4A16", "targets": "Linear"}),
    "llmc-mxfp8": ("narrow", plain, {"scheme": "MXFP8", "targets": "Linear"}),
}


def make(source, modifiers, options, sources, out):
    """Quantize, save, load decoded."""
    torch.manual_seed(0)
    path = sources / source
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ones = [[1] * len(row) for row in CALIBRATION]
    data = Dataset.from_dict({"input_ids": CALIBRATION, "attention_mask": ones})
    oneshot(
        model=model, dataset=data, recipe=modifiers(**options), max_seq_length=len(CALIBRATION[0]),
        num_calibration_samples=len(CALIBRATION),
    )  # fmt: skip
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    weights = {name: module.weight for name, module in linears(loaded).items()}
    shown = json.dumps(options, default=lambda item: item.model_dump(exclude_unset=True))
    return {
        "source": source,
        "made": f"oneshot, {modifiers.__name__}, {shown}",
        "dtype": "bfloat16",
        "decoded": {name: digest(w.detach().float().numpy()) for name, w in weights.items()},
    }


run(
    {name: partial(make, *recipe) for name, recipe in RECIPES.items()},
    ("llmcompressor", "compressed-tensors", "transformers", "torch"),
)
