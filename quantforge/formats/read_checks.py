"""Checks of a quantized checkpoint, applied in this order when it is read.

- The configuration against the tensors (`check_config_value` and others): engines believe one or the other, so a
  contradiction is an error. A key that is missing or null is not compared.
- Headers against those that the format expects (`require_headers` and others): dtype and shape of every tensor.
- Values (`require_valid_scales` and others): scales are finite and positive, group numbers are in range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.errors import Fault, InputError
from quantforge.files.safetensors import TORCH_NAMES
from quantforge.formats import ModuleLayout
from quantforge.grids import PerGroup, ScaleType, Tile
from quantforge.plans import StoredTensor
from quantforge.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

_SCALE_TYPES = {kind.value: kind for kind in ScaleType}
_SAFETENSORS_DTYPES = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}


# The configuration against the tensors


def check_config_value(
    config: Mapping[str, Any], key: str, expected: object, description: str
) -> None:
    """Raise `InputError` if the configuration has a value under ``key`` that is not ``expected``."""
    declared = config.get(key)
    if declared is not None and (
        declared != expected or isinstance(declared, bool) != isinstance(expected, bool)
    ):
        raise contradiction_error(f"{key} = {declared!r}", description)


def check_head_declaration(config: Mapping[str, Any], key: str, modules: Iterable[str]) -> None:
    """Raise `InputError` if ``key`` declares whether the head is packed and the tensors contradict it."""
    packed = any(module.endswith("lm_head") for module in modules)
    check_config_value(config, key, packed, f"lm_head is {'packed' if packed else 'not packed'}")


def check_aliases_agree(config: Mapping[str, Any], first: str, second: str) -> None:
    """Raise `InputError` if two keys with the same meaning are both present and differ."""
    values = [config.get(key) for key in (first, second)]
    if None not in values and values[0] != values[1]:
        raise contradiction_error(f"{first} = {values[0]!r}", f"{second} = {values[1]!r}")


def require_group_index(
    act_order: bool | None, index_name: str, groups: int, tensor_names: Collection[str]
) -> None:
    """Raise `InputError` if act-order is declared and the tensor with the group of each column is missing."""
    if act_order and groups > 1 and index_name not in tensor_names:
        raise contradiction_error(
            "groups are said to be scattered", f"{index_name} is missing", index_name
        )


def check_not_in_skip_list(
    config: Mapping[str, Any], skip_list_key: str, modules: Collection[str]
) -> None:
    """Raise `InputError` if the list of unquantized modules names one of the packed ``modules``."""
    entries = config.get(skip_list_key)
    if not isinstance(entries, list):
        return
    for entry in filter(None, (item for item in entries if isinstance(item, str))):
        for module in modules:
            if module == entry or module.endswith(f".{entry}"):
                raise contradiction_error(
                    f"{skip_list_key} names {entry!r}", f"{module} is packed", module
                )


def contradiction_error(declared: str, actual: str, module: str = "") -> InputError:
    """Return the error for a configuration (``declared``) that contradicts the tensors (``actual``)."""
    return InputError(
        f"{declared}, but {actual}",
        "engines believe the one or the other: correct the configuration, or fetch the model again",
        tensor=module or None,
        subject="config.json",
    )


# Headers


def tensor_headers(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return the headers of tensors in memory."""
    return {
        name: StoredTensor(
            name, _SAFETENSORS_DTYPES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape)
        )
        for name, tensor in tensors.items()
    }


def require_headers(
    headers: Mapping[str, StoredTensor], expected: Iterable[StoredTensor], hint: str = ""
) -> None:
    """Raise `InputError` unless each expected tensor is present with its dtype and shape."""
    for tensor in expected:
        actual = headers.get(tensor.name)
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


def expected_headers(
    layout: ModuleLayout, packed_tensors: Callable[..., tuple[StoredTensor, ...]]
) -> list[StoredTensor]:
    """Return the headers from ``packed_tensors`` for the tensors that a module has, with its scale type."""
    scale = (layout.scheme.weight.scale or ScaleType.F16).value.upper()
    return [
        StoredTensor(tensor.name, scale if tensor.dtype == "F16" else tensor.dtype, tensor.shape)
        for tensor in packed_tensors(layout.module, layout.scheme, layout.shape)
        if tensor.name in layout.tensor_names
    ]


def matrix_shape(headers: Mapping[str, StoredTensor], name: str) -> tuple[int, int]:
    """Return the shape of a tensor; raise `InputError` unless it is a matrix."""
    shape = headers[name].shape if name in headers else ()
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{name}: missing, or no matrix: {list(shape)}", tensor=name)
    return shape[0], shape[1]


def require_whole_groups(module: str, columns: int, size: int) -> None:
    """Raise `InputError` unless the group size divides the columns."""
    if size < 1 or columns % size:
        raise InputError(
            f"{module}: {columns} columns, but config.json says groups of {size}", tensor=module
        )


def scale_type_of(headers: Mapping[str, StoredTensor], name: str) -> ScaleType:
    """Return the type of the scales stored as ``name``; raise `InputError` if they are missing or of another type."""
    if name not in headers:
        raise InputError(
            f"{name}: missing, the scales of packed weights",
            "the checkpoint is damaged: fetch it again",
            tensor=name,
            fault=Fault.SCALE,
        )
    kind = _SCALE_TYPES.get(headers[name].dtype.lower())
    if kind is None:
        raise InputError(
            f"{name}: scales in {headers[name].dtype} are not read",
            "F16, BF16 and F32 are; quantize again from the original model",
            tensor=name,
            fault=Fault.SCALE,
        )
    return kind


def require_scales(tensors: Mapping[str, StoredTensor], scale_suffix: str) -> None:
    """Raise `InputError` for codes whose scale tensor is missing."""
    for name, tensor in tensors.items():
        codes = tensor.dtype in {"I8", "F8_E4M3", "F8_E5M2"} and name.endswith(".weight")
        if codes and name + scale_suffix not in tensors:
            if f"{name}_scale" in tensors:  # as vLLM and ModelOpt name it
                raise InputError(
                    f"{name}: its scale is stored as {name}_scale, which quant_method fp8 names {name}{scale_suffix}",
                    'put "quant_method": "modelopt" into quantization_config, whose names these are',
                    tensor=name,
                )
            raise InputError(
                f"{name}: {tensor.dtype} codes without {name}{scale_suffix}",
                "without its scale a tensor stands for nothing: fetch the checkpoint again",
                tensor=name,
            )


def require_head_in_skip_list(
    config: Mapping[str, object], skip_list_key: str, tensors: Mapping[str, StoredTensor]
) -> None:
    """Raise `InputError` if an unquantized head is missing from a non-empty list of unquantized modules.

    With any list of their own, engines skip nothing else, and quantize the head while they load it.
    """
    skip_list = config.get(skip_list_key)
    if (
        not isinstance(skip_list, list)
        or not skip_list
        or "lm_head" in " ".join(map(str, skip_list))
    ):
        return
    head = [name for name in tensors if name.endswith("lm_head.weight")]
    if any(tensors[name].dtype in {"F16", "BF16", "F32"} for name in head):
        raise InputError(
            f"{skip_list_key} {skip_list[:4]} leaves lm_head out, which is not quantized",
            'transformers then quantizes it: add "lm_head" to the list',
            subject="config.json",
        )


# Values


def require_positive(name: str, scales: Tensor) -> Tensor:
    """Return scales as float32; raise `InputError` unless all are finite and positive."""
    scales = scales.float()
    if not bool((scales > 0).all()) or not bool(scales.isfinite().all()):
        finite = bool(scales.isfinite().all())
        raise InputError(
            f"{name}: {scales.flatten().tolist()[:4]} is no scale",
            tensor=name,
            fault=Fault.SCALE if finite else Fault.NOT_FINITE,
        )
    return scales


def scalar_scale(name: str, scale: Tensor) -> Tensor:
    """Return a single positive scale of any shape and dtype as float32 ``[1, 1]``."""
    flat = require_positive(name, scale).reshape(-1)
    if len(flat) != 1:
        raise InputError(f"{name}: {flat.tolist()[:4]} is no scale", tensor=name, fault=Fault.SCALE)
    return flat.view(1, 1)


def apply_group_index(
    tensor: QuantizedTensor, index: Tensor, name: str, *, act_order: bool | None = None
) -> QuantizedTensor:
    """Apply the group index of each column (``g_idx``) to a tensor that was read without it.

    Scattered groups (``desc_act``) become groups of one column, with each column's own copy of its
    scale: exact, readable by everything, and storable by nothing, which is how it should be.

    Raises:
        InputError: a number is out of range, or the index scatters groups although the configuration says that it
            does not (``act_order`` False): engines then leave the index out.
    """
    import torch

    from quantforge.packers.tensor import QuantizedTensor as Quantized

    columns = tensor.shape[1]
    require_headers(tensor_headers({name: index}), [StoredTensor(name, "I32", (columns,))])
    groups = tensor.scheme.groups(columns)
    if bool((index < 0).any()) or bool((index >= groups).any()):
        raise InputError(f"{name}: a group number is outside of 0..{groups - 1}", tensor=name)
    in_order = torch.arange(columns, dtype=index.dtype) // tensor.scheme.group_size(columns)
    if torch.equal(index, in_order):
        return tensor
    if act_order is False:
        raise contradiction_error("the groups are runs of columns", f"{name} scatters them", name)
    scheme = Scheme(tensor.scheme.grid, PerGroup(1), tensor.scheme.zero, tensor.scheme.scale)
    per_column = {key: value[:, index.long()] for key, value in tensor.parameters.items()}
    return Quantized(tensor.codes, per_column, scheme)


def require_valid_scales(tensor: QuantizedTensor, name: str) -> QuantizedTensor:
    """Return ``tensor`` if its scales are finite and no integer group with scale 0 has nonzero codes.

    Where minima are stored, a group of scale 0 is its minimum, whatever its codes are.

    Raises:
        InputError: naming the tensor and the position of the first other scale.
    """
    if "exponents" in tensor.parameters:  # 255 stands for no number
        exponents = tensor.parameters["exponents"]
        scales = exponents.float().masked_fill(exponents == 255, float("nan"))
    else:
        scales = tensor.parameters["scales"].float()
    require_finite(name, scales)
    if tensor.scheme.integer and "mins" not in tensor.parameters and bool((scales == 0).any()):
        _refuse_zero_scales(tensor, name)
    return tensor


def require_finite(name: str, parameters: Tensor, description: str = "scale") -> Tensor:
    """Return ``parameters`` ``[rows, groups]``, stored as ``name``; raise `InputError` unless all are finite.

    Raises:
        InputError: naming the tensor and the position of the first that is not.
    """
    is_nonfinite = ~parameters.isfinite()
    if bool(is_nonfinite.any()):
        row, group = is_nonfinite.nonzero()[0].tolist()
        raise InputError(
            f"{name}: {description} {parameters[row, group].item()} of row {row}, group {group}",
            "the checkpoint is damaged, or its scales overflowed when it was written",
            tensor=name,
            fault=Fault.NOT_FINITE,
        )
    return parameters


def split_ragged_tiles(
    scheme: Scheme, columns: int, parameters: Mapping[str, Tensor]
) -> tuple[Scheme, dict[str, Tensor]]:
    """Return the scheme and parameters with narrower tiles that divide the columns, if the last tile was cut off."""
    tile = scheme.granularity
    if not isinstance(tile, Tile) or not columns % tile.columns:
        return scheme, dict(parameters)
    size = math.gcd(tile.columns, columns)
    repeated_parameters = {
        key: value.repeat_interleave(tile.columns // size, 1)[:, : columns // size].contiguous()
        for key, value in parameters.items()
    }
    return replace(scheme, granularity=Tile(tile.rows, size)), repeated_parameters


def _refuse_zero_scales(tensor: QuantizedTensor, name: str) -> None:
    """Raise `InputError` if a group with scale 0 has codes that are not zero."""
    zero_scales = tensor.parameters["scales"] == 0
    rows = zero_scales.any(dim=1).nonzero().flatten()
    codes = tensor.codes[rows].view(len(rows), zero_scales.shape[1], -1)
    zeros = tensor.parameters["zeros"][rows].unsqueeze(-1) if "zeros" in tensor.parameters else 0
    all_lost = (codes != zeros).any(dim=-1) & zero_scales[rows]
    if bool(all_lost.any()):
        row, group = all_lost.nonzero()[0].tolist()
        raise InputError(
            f"{name}: scale 0 for non-zero codes in row {int(rows[row])}, group {group}",
            "the scale underflowed when the checkpoint was written",
            tensor=name,
            fault=Fault.SCALE,
        )
