"""GPTQ and AWQ artifacts in transformers with gptqmodel: largest difference of logits, float32."""

import torch
from compare import figures, run
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig


def measure(path, expected):
    """Load with the plain torch kernels and compare."""
    options = {}
    if path.name.startswith("gptq"):
        options = {"quantization_config": GPTQConfig(bits=4, backend="torch")}
    if path.name.startswith("awq"):
        options = {"quantization_config": AwqConfig(bits=4, backend="torch_awq")}
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, device_map="cpu", **options
    )
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(expected["ids"])[None]).logits[0, :-1]
    return figures(logits.float(), expected)


run(
    measure,
    ("gptqmodel", "optimum", "transformers", "torch"),
    lambda name: name.startswith(("source", "gptq", "awq")),
)
