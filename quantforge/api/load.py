"""Load: a model of any format that is read, ready to compute with its weights still packed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.files.hub import resolve
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
        device: where it computes.
        dtype: of activations and of weights that are not quantized; float32 when left out.
        offline: never ask the hub.

    Raises:
        InputError: the model is missing or damaged, no format reads its quantization, or it cannot be built.
        RefusedError: it is written by this program and not run.
        UsageError: there is no such device.
        ResourceError: a GPU has no room for it.
    """
    check_device(device)
    import torch

    from quantforge.runtime.load import load as loaded

    return loaded(resolve(str(model), offline), device, dtype or torch.float32)
