"""Artifacts of bitsandbytes as transformers serializes them, decoded by bitsandbytes."""

from functools import partial

import torch
from bitsandbytes.functional import dequantize_4bit
from record import digest, linears, run
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

# Name: options of a BitsAndBytesConfig.
RECIPES = {
    "bnb-nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb-nf4-double": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "bnb-fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bnb-int8": {"load_in_8bit": True},
}  # fmt: skip


def decoded(module):
    """The weight that the codes of a module stand for, in float32."""
    weight = module.weight
    if weight.dtype == torch.int8:
        return weight.float() * (weight.SCB[:, None] / 127)
    weight.quant_state.dtype = torch.float32
    return dequantize_4bit(weight.data, weight.quant_state)


def make(options, sources, out):
    """Quantize while loading, save, load again, decode."""
    path = sources / "narrow"
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**options)
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(path).save_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    weights = {name: decoded(module) for name, module in linears(loaded).items()}
    return {
        "source": "narrow",
        "made": f"from_pretrained, {options}",
        "dtype": "float32",
        "decoded": {name: digest(weight.numpy()) for name, weight in weights.items()},
    }


run(
    {name: partial(make, recipe) for name, recipe in RECIPES.items()},
    ("bitsandbytes", "transformers", "accelerate", "torch"),
)
