"""Artifacts of mlx-lm, decoded by MLX with its scales as float32."""

import json
from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm import convert
from record import digest, run

# Name: (source, bits, group size, mode).
RECIPES = {
    "mlx-4bit": ("narrow", 4, 64, "affine"),
    "mlx-3bit": ("narrow", 3, 32, "affine"),
    "mlx-mxfp4": ("narrow", 4, 32, "mxfp4"),
    "mlx-nvfp4": ("narrow", 4, 16, "nvfp4"),
    "mlx-mxfp8": ("narrow", 8, 32, "mxfp8"),
}


def make(source, bits, size, mode, sources, out):
    """Convert, then decode what is in the file."""
    convert(
        str(sources / source), str(out), quantize=True, q_group_size=size, q_bits=bits, q_mode=mode
    )
    (out / "README.md").unlink(missing_ok=True)
    found = mx.load(str(out / "model.safetensors"))
    names = [name.removesuffix(".scales") for name in found if name.endswith(".scales")]
    decoded = {}
    for name in names:
        affine = mode == "affine"
        scales = found[f"{name}.scales"]
        scales = scales.astype(mx.float32) if affine else scales
        biases = found[f"{name}.biases"].astype(mx.float32) if affine else None
        weight = mx.dequantize(
            found[f"{name}.weight"], scales, biases, group_size=size, bits=bits, mode=mode,
            dtype=mx.float32,
        )  # fmt: skip
        decoded[name] = digest(np.array(weight))
    made = f"mlx_lm.convert, {json.dumps({'bits': bits, 'group_size': size, 'mode': mode})}"
    return {"source": source, "made": made, "dtype": "float32", "decoded": decoded}


run(
    {name: partial(make, *recipe) for name, recipe in RECIPES.items()},
    ("mlx", "mlx-lm", "transformers"),
)
