"""Artifacts of compressed-tensors, bitsandbytes and fp8 in stock transformers: largest difference of logits."""

import torch
from compare import figures, run
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

# These decode to bfloat16, or refuse float32; the difference is then the engine's rounding.
BFLOAT16 = ("ct-nvfp4", "ct-mxfp", "fp8-block", "bnb-")


def measure(path, expected):
    """Load and compare."""
    # Asymmetric files need it: the packed loader of compressed-tensors 0.18 to 0.20 does not take their zero points.
    options = (
        {"quantization_config": CompressedTensorsConfig(dequantize=True)}
        if "asym" in path.name
        else {}
    )
    dtype = torch.bfloat16 if path.name.startswith(BFLOAT16) else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(expected["ids"])[None]).logits[0, :-1].float()
    return figures(logits, expected)


run(
    measure,
    ("transformers", "compressed-tensors", "bitsandbytes", "accelerate", "torch"),
    lambda name: not name.startswith(("gptq", "awq", "mlx")),
)
