"""Headers of stored tensors: what a format announces has to be there, with its type and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from quantforge.checkpoint.safetensors import TORCH_NAMES
from quantforge.errors import Fault, InputError
from quantforge.formats import ModuleLayout
from quantforge.grids import ScaleType
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = {kind.value: kind for kind in ScaleType}
_NAMES = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}


def described(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return the headers of tensors in memory, to be compared with an announcement."""
    return {
        name: StoredTensor(
            name, _NAMES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape)
        )
        for name, tensor in tensors.items()
    }


def require(
    found: Mapping[str, StoredTensor], expected: Iterable[StoredTensor], hint: str = ""
) -> None:
    """Raise `InputError` unless each expected tensor is there with its type and shape."""
    for tensor in expected:
        actual = found.get(tensor.name)
        if actual is None:
            raise InputError(
                f"{tensor.name}: missing, although config.json asks for it",
                hint,
                tensor=tensor.name,
            )
        if (actual.dtype, actual.shape) != (tensor.dtype, tensor.shape):
            raise InputError(
                f"{tensor.name}: {actual.dtype} {list(actual.shape)}, config.json asks for "
                f"{tensor.dtype} {list(tensor.shape)}",
                hint or "quantization_config and the tensors disagree",
                tensor=tensor.name,
            )


def announced(
    layout: ModuleLayout, stored: Callable[..., tuple[StoredTensor, ...]]
) -> list[StoredTensor]:
    """Return what ``stored`` announces for a module: of its stored tensors only, with its type of scales."""
    scale = (layout.scheme.weight.scale or ScaleType.F16).value.upper()
    return [
        StoredTensor(tensor.name, scale if tensor.dtype == "F16" else tensor.dtype, tensor.shape)
        for tensor in stored(layout.module, layout.scheme, layout.shape)
        if tensor.name in layout.stored
    ]


def matrix(found: Mapping[str, StoredTensor], name: str) -> tuple[int, int]:
    """Return the shape of a tensor; raise `InputError` unless it is a matrix."""
    shape = found[name].shape if name in found else ()
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{name}: missing, or no matrix: {list(shape)}", tensor=name)
    return shape[0], shape[1]


def whole_groups(module: str, columns: int, size: int) -> None:
    """Raise `InputError` unless whole groups of ``size`` fill the columns."""
    if size < 1 or columns % size:
        raise InputError(
            f"{module}: {columns} columns, but config.json says groups of {size}", tensor=module
        )


def scale_of(found: Mapping[str, StoredTensor], name: str) -> ScaleType:
    """Return the type of the scales stored as ``name``; raise `InputError` for none or another type."""
    if name not in found:
        raise InputError(
            f"{name}: missing, the scales of packed weights",
            "the checkpoint is damaged: fetch it again",
            tensor=name,
            fault=Fault.SCALE,
        )
    kind = _SCALES.get(found[name].dtype.lower())
    if kind is None:
        raise InputError(
            f"{name}: scales in {found[name].dtype} are not read",
            "F16, BF16 and F32 are; quantize again from the original model",
            tensor=name,
            fault=Fault.SCALE,
        )
    return kind


def bare_codes(tensors: Mapping[str, StoredTensor], suffix: str) -> None:
    """Raise `InputError` for codes whose scale, named by ``suffix``, is missing."""
    for name, tensor in tensors.items():
        codes = tensor.dtype in {"I8", "F8_E4M3", "F8_E5M2"} and name.endswith(".weight")
        if codes and name + suffix not in tensors:
            if f"{name}_scale" in tensors:  # as vLLM and ModelOpt name it
                raise InputError(
                    f"{name}: its scale is stored as {name}_scale, which quant_method fp8 names {name}{suffix}",
                    'put "quant_method": "modelopt" into quantization_config, whose names these are',
                    tensor=name,
                )
            raise InputError(
                f"{name}: {tensor.dtype} codes without {name}{suffix}",
                "without its scale a tensor stands for nothing: fetch the checkpoint again",
                tensor=name,
            )


def refuse_open_head(
    config: Mapping[str, object], key: str, tensors: Mapping[str, StoredTensor]
) -> None:
    """Raise `InputError` for a list of unquantized modules that leaves out a head that is not quantized.

    With any list of their own, engines skip nothing else, and quantize the head while they load it.
    """
    skip = config.get(key)
    if not isinstance(skip, list) or not skip or "lm_head" in " ".join(map(str, skip)):
        return
    head = [name for name in tensors if name.endswith("lm_head.weight")]
    if any(tensors[name].dtype in {"F16", "BF16", "F32"} for name in head):
        raise InputError(
            f"config.json: {key} {skip[:4]} leaves lm_head out, which is not quantized",
            'transformers then quantizes it: add "lm_head" to the list',
        )
