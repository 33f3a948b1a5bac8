"""Add noise to the Q4_1 linears of a decoded GGUF file: uniform within half a step of each group of 32 weights.

    python scripts/released_model_noise.py FILE.gguf FOLDER SEED

``FOLDER`` holds the decoded weights of FILE.gguf in float32 and is changed in place. `scripts/released_model` says why.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantforge.formats import detect_format
from quantforge.formats.open_model import open_model


def add_noise(file: Path, folder: Path, seed: int) -> int:
    """Move every weight of the file's Q4_1 matrices by less than half a step; return the number of matrices."""
    checkpoint, weights = open_model(file), load_file(folder / "model.safetensors")
    form, generator = detect_format(checkpoint.config), torch.Generator().manual_seed(seed)
    headers = checkpoint.stored_tensors()
    moved = 0
    for layout in sorted(
        form.find_layouts(checkpoint.config, headers), key=lambda item: item.module
    ):
        if layout.scheme.weight.grid != "q4_1":
            continue
        stored = {name: checkpoint.read(name) for name in layout.tensor_names}
        step = form.unpack(layout, stored).parameters["scales"].float()
        weight = weights[f"{layout.module}.weight"]
        uniform = torch.rand(weight.shape, generator=generator) - 0.5
        weight += uniform * step.repeat_interleave(weight.shape[1] // step.shape[1], 1)
        moved += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for described in (
        "quantforge.manifest.json",
        "README.md",
    ):  # they state the weights without noise
        (folder / described).unlink()
    return moved


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    print(f"noise in {add_noise(given.file, given.folder, given.seed)} matrices")
