"""``load``: load a model of any supported format for inference, with its weights still packed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.files.hub import resolve_model
from quantforge.settings import check_device

if TYPE_CHECKING:
    import torch

    from quantforge.runtime.load import Loaded


@check_arguments()
@torch_defaults()
def load(
    model: str | Path,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    offline: bool = False,
) -> Loaded:
    """Load a model; `Loaded.model` is a causal language model of transformers.

    Args:
        model: a directory, a GGUF file, or ``org/name[@revision]``.
        device: device to run on.
        dtype: dtype of activations and unquantized weights; float32 when left out.
        offline: never access the hub.

    Raises:
        InputError: the model is missing or damaged, its quantization is not supported, or it cannot be built.
        RefusedError: QuantForge can write this kind of model, but not run it.
        UsageError: the device does not exist.
        ResourceError: it does not fit into GPU memory.
    """
    check_device(device)
    import torch

    from quantforge.runtime.load import load as loaded

    return loaded(resolve_model(str(model), offline), device, dtype or torch.float32)
