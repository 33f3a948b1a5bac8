"""What is checked when files of a format are read, in this order.

- The configuration against the tensors (`agree` and others): engines believe one or the other, so a contradiction is
  not read. A key that is missing, or null, says nothing.
- Headers against what the format announces (`require` and others): type and shape of every tensor.
- Values (`sound` and others): scales are finite and positive, group numbers are in range.
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

_SCALES = {kind.value: kind for kind in ScaleType}
_NAMES = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}


# The configuration against the tensors


def agree(config: Mapping[str, Any], key: str, actual: object, what: str) -> None:
    """Raise `InputError` if ``key`` is there and not ``actual``; ``what`` says what the tensors hold."""
    stated = config.get(key)
    if stated is not None and (
        stated != actual or isinstance(stated, bool) != isinstance(actual, bool)
    ):
        raise denied(f"{key} = {stated!r}", what)


def agree_on_head(config: Mapping[str, Any], key: str, modules: Iterable[str]) -> None:
    """Raise `InputError` if ``key`` says of the head that it is packed where it is not, or the other way round."""
    packed = any(module.endswith("lm_head") for module in modules)
    agree(config, key, packed, f"lm_head is {'packed' if packed else 'not packed'}")


def one_name(config: Mapping[str, Any], first: str, second: str) -> None:
    """Raise `InputError` if two keys of one meaning are both there and differ: engines read the one or the other."""
    said = [config.get(key) for key in (first, second)]
    if None not in said and said[0] != said[1]:
        raise denied(f"{first} = {said[0]!r}", f"{second} = {said[1]!r}")


def has_group_index(
    act_order: bool | None, index_name: str, groups: int, tensor_names: Collection[str]
) -> None:
    """Raise `InputError` if columns are said to be ``act_order`` over groups and no tensor ``index_name`` says how."""
    if act_order and groups > 1 and index_name not in tensor_names:
        raise denied("groups are said to be scattered", f"{index_name} is missing", index_name)


def not_excepted(config: Mapping[str, Any], key: str, modules: Collection[str]) -> None:
    """Raise `InputError` if the list ``key`` of modules that stay as they are names one of the packed ``modules``."""
    entries = config.get(key)
    if not isinstance(entries, list):
        return
    for entry in filter(None, (item for item in entries if isinstance(item, str))):
        for module in modules:
            if module == entry or module.endswith(f".{entry}"):
                raise denied(f"{key} names {entry!r}", f"{module} is packed", module)


def denied(said: str, what: str, module: str = "") -> InputError:
    """Return the error for something ``said`` that ``what`` the tensors hold denies, of one ``module`` if given."""
    return InputError(
        f"config.json: {said}, but {what}",
        "engines believe the one or the other: correct the configuration, or fetch the model again",
        tensor=module or None,
    )


# Headers


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
    layout: ModuleLayout, packed_tensors: Callable[..., tuple[StoredTensor, ...]]
) -> list[StoredTensor]:
    """Return what ``packed_tensors`` announces of the tensors that a module has, with its type of scales."""
    scale = (layout.scheme.weight.scale or ScaleType.F16).value.upper()
    return [
        StoredTensor(tensor.name, scale if tensor.dtype == "F16" else tensor.dtype, tensor.shape)
        for tensor in packed_tensors(layout.module, layout.scheme, layout.shape)
        if tensor.name in layout.tensor_names
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


# Values


def positive(name: str, scales: Tensor) -> Tensor:
    """Return scales of any type as float32, if they are finite and positive; else raise `InputError`."""
    scales = scales.float()
    if not bool((scales > 0).all()) or not bool(scales.isfinite().all()):
        finite = bool(scales.isfinite().all())
        raise InputError(
            f"{name}: {scales.flatten().tolist()[:4]} is no scale",
            tensor=name,
            fault=Fault.SCALE if finite else Fault.NOT_FINITE,
        )
    return scales


def scalar(name: str, scale: Tensor) -> Tensor:
    """Return a single positive scale, in whatever shape and type it is stored, as float32 ``[1, 1]``."""
    flat = positive(name, scale).reshape(-1)
    if len(flat) != 1:
        raise InputError(f"{name}: {flat.tolist()[:4]} is no scale", tensor=name, fault=Fault.SCALE)
    return flat.view(1, 1)


def by_group_index(
    tensor: QuantizedTensor, index: Tensor, name: str, *, act_order: bool | None = None
) -> QuantizedTensor:
    """Apply the group number of each column (``g_idx``) to a tensor read as if it had none.

    Scattered groups (``desc_act``) become groups of one column, with each column's own copy of its
    scale: exact, readable by everything, and storable by nothing, which is how it should be.

    Raises:
        InputError: a number is out of range, or the index scatters groups although the configuration says that it
            does not (``act_order`` False): engines then leave the index out.
    """
    import torch

    from quantforge.packers.tensor import QuantizedTensor as Quantized

    columns = tensor.shape[1]
    require(described({name: index}), [StoredTensor(name, "I32", (columns,))])
    groups = tensor.scheme.groups(columns)
    if bool((index < 0).any()) or bool((index >= groups).any()):
        raise InputError(f"{name}: a group number is outside of 0..{groups - 1}", tensor=name)
    in_order = torch.arange(columns, dtype=index.dtype) // tensor.scheme.group_size(columns)
    if torch.equal(index, in_order):
        return tensor
    if act_order is False:
        raise denied("the groups are runs of columns", f"{name} scatters them", name)
    scheme = Scheme(tensor.scheme.grid, PerGroup(1), tensor.scheme.zero, tensor.scheme.scale)
    per_column = {key: value[:, index.long()] for key, value in tensor.parameters.items()}
    return Quantized(tensor.codes, per_column, scheme)


def sound(tensor: QuantizedTensor, name: str) -> QuantizedTensor:
    """Return ``tensor`` if its scales (stored as ``name``) are finite, and those of integers 0 only for zeros.

    Where minima are stored, a group of scale 0 is its minimum, whatever its codes are.

    Raises:
        InputError: naming the tensor and the position of the first other scale.
    """
    if "exponents" in tensor.parameters:  # 255 stands for no number
        exponents = tensor.parameters["exponents"]
        scales = exponents.float().masked_fill(exponents == 255, float("nan"))
    else:
        scales = tensor.parameters["scales"].float()
    finite(name, scales)
    if tensor.scheme.integer and "mins" not in tensor.parameters and bool((scales == 0).any()):
        _refuse_lost(tensor, name)
    return tensor


def finite(name: str, parameters: Tensor, what: str = "scale") -> Tensor:
    """Return ``parameters`` ``[rows, groups]``, stored as ``name``, if they are finite.

    Raises:
        InputError: naming the tensor and the position of the first that is not.
    """
    bad = ~parameters.isfinite()
    if bool(bad.any()):
        row, group = bad.nonzero()[0].tolist()
        raise InputError(
            f"{name}: {what} {parameters[row, group].item()} of row {row}, group {group}",
            "the checkpoint is damaged, or its scales overflowed when it was written",
            tensor=name,
            fault=Fault.NOT_FINITE,
        )
    return parameters


def whole_tiles(
    scheme: Scheme, columns: int, parameters: Mapping[str, Tensor]
) -> tuple[Scheme, dict[str, Tensor]]:
    """Return the same numbers in narrower tiles that divide the columns, where the last tile of a row was cut off."""
    tile = scheme.granularity
    if not isinstance(tile, Tile) or not columns % tile.columns:
        return scheme, dict(parameters)
    size = math.gcd(tile.columns, columns)
    spread = {
        key: value.repeat_interleave(tile.columns // size, 1)[:, : columns // size].contiguous()
        for key, value in parameters.items()
    }
    return replace(scheme, granularity=Tile(tile.rows, size)), spread


def _refuse_lost(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a group that decodes to zeros although its codes are not zeros."""
    empty = tensor.parameters["scales"] == 0
    rows = empty.any(dim=1).nonzero().flatten()
    codes = tensor.codes[rows].view(len(rows), empty.shape[1], -1)
    zeros = tensor.parameters["zeros"][rows].unsqueeze(-1) if "zeros" in tensor.parameters else 0
    lost = (codes != zeros).any(dim=-1) & empty[rows]
    if bool(lost.any()):
        row, group = lost.nonzero()[0].tolist()
        raise InputError(
            f"{name}: scale 0 for non-zero codes in row {int(rows[row])}, group {group}",
            "the scale underflowed when the checkpoint was written",
            tensor=name,
            fault=Fault.SCALE,
        )
