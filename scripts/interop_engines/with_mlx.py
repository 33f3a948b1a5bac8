"""Artifacts in mlx-lm on a CPU: difference of logits, float32; weights of MLX files decode as ours, bit for bit."""

import hashlib
import json

import mlx.core as mx
import numpy as np
from compare import figures, run
from mlx_lm import load


def check_weights(path, expected):
    """Decode what is in the file with MLX, its scales as float32, and compare the digests with ours."""
    config = json.loads((path / "config.json").read_text())["quantization"]
    found = mx.load(str(path / "model.safetensors"))
    for name, ours in json.loads(str(expected["digests"])).items():
        own = config.get(name, config)
        mode = own.get("mode", "affine")
        scales, biases = found[f"{name}.scales"], found.get(f"{name}.biases")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = mx.dequantize(
            found[f"{name}.weight"], scales, biases, group_size=own["group_size"], bits=own["bits"],
            mode=mode, dtype=mx.float32,
        )  # fmt: skip
        theirs = hashlib.sha256((np.array(weight) + np.float32(0)).tobytes()).hexdigest()
        if theirs != ours:
            raise ValueError(f"{name}: MLX decodes other values")


def measure(path, expected):
    """Load and compare."""
    if "digests" in expected:
        check_weights(path, expected)
    model, _ = load(str(path), tokenizer_config={"trust_remote_code": False})
    model.set_dtype(mx.float32)
    logits = np.array(model(mx.array(expected["ids"])[None])[0, :-1].astype(mx.float32))
    return figures(logits, expected)


run(
    measure,
    ("mlx", "mlx-lm", "transformers"),
    lambda name: name.startswith(("source", "mlx", "awq", "gptq-int4", "ct-int4")),
)
