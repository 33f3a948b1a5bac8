"""compressed-tensors artifacts in stock transformers: largest difference of logits, float32."""

import torch
from compare import run
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def measure(path, expected):
    """Load and compare."""
    # Asymmetric files need it: the packed loader of compressed-tensors 0.18 to 0.20 does not take their zero points.
    options = (
        {"quantization_config": CompressedTensorsConfig(dequantize=True)}
        if "asym" in path.name
        else {}
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(expected["ids"])[None]).logits[0, :-1]
    return float((logits - torch.from_numpy(expected["logits"])).abs().max())


run(
    measure,
    ("transformers", "compressed-tensors", "torch"),
    lambda name: name == "source" or name.startswith("ct-"),
)
