"""Checks that all formats share: the announced tensors are there, and their values are legal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from quantforge.errors import Fault, InputError, RefusedError
from quantforge.formats import Fit, ModuleLayout, Verdict, patterns
from quantforge.formats.configuration import within_block
from quantforge.formats.contradictions import denied
from quantforge.grids import PerGroup, ScaleType, Tile, Zero
from quantforge.plans import StoredTensor
from quantforge.scheme import LayerScheme, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.packers.tensor import QuantizedTensor

_NAMES = {
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.uint8": "U8",
    "torch.uint32": "U32",
    "torch.int8": "I8",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}


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
            raise InputError(f"{tensor.name}: missing", hint, tensor=tensor.name)
        if (actual.dtype, actual.shape) != (tensor.dtype, tensor.shape):
            raise InputError(
                f"{tensor.name}: {actual.dtype} {list(actual.shape)}, the configuration asks for "
                f"{tensor.dtype} {list(tensor.shape)}",
                hint or "quantization_config and the tensors disagree",
                tensor=tensor.name,
            )


def announced(
    layout: ModuleLayout, stored: Callable[..., tuple[StoredTensor, ...]]
) -> list[StoredTensor]:
    """Return what ``stored`` announces, in the scale type and with the parts of the module."""
    scale = (layout.scheme.weight.scale or ScaleType.F16).value.upper()
    return [
        StoredTensor(tensor.name, scale if tensor.dtype == "F16" else tensor.dtype, tensor.shape)
        for tensor in stored(layout.module, layout.scheme, layout.shape)
        if tensor.name in layout.stored
    ]


def matrix(found: Mapping[str, StoredTensor], name: str) -> tuple[int, int]:
    """Return the shape of a tensor that has to be a matrix."""
    shape = found[name].shape if name in found else ()
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{name}: missing, or no matrix: {list(shape)}", tensor=name)
    return shape[0], shape[1]


def scale_of(found: Mapping[str, StoredTensor], name: str) -> ScaleType:
    """Return the type of the scales stored as ``name``."""
    dtype = found[name].dtype.lower() if name in found else "missing"
    if dtype not in list(ScaleType):
        raise InputError(
            f"{name}: {dtype}, scales are {', '.join(ScaleType)}", tensor=name, fault=Fault.SCALE
        )
    return ScaleType(dtype)


def matches(pattern: str, module: str) -> bool:
    """Return whether a regular expression of ``config.json`` matches the start of a module name."""
    try:
        return patterns.matches(pattern, module, whole=False)
    except InputError as error:
        raise InputError(f"config.json: {error.message}") from error


class Names:
    """Names of modules, and patterns after ``re:``, as a configuration lists them; names are found at once."""

    def __init__(self, entries: Iterable[str]) -> None:
        entries = list(entries)
        self._patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
        self._names = frozenset(entries)

    def rank(self, module: str) -> int | None:
        """Return 0 for a module that is named, 1 for one that a pattern matches, None for any other."""
        if module in self._names:
            return 0
        return 1 if any(matches(pattern, module) for pattern in self._patterns) else None


def grouped(scheme: Scheme, shape: tuple[int, int]) -> Fit | None:
    """Return why the columns cannot be cut into groups, or None."""
    if not isinstance(scheme.granularity, PerGroup | Tile):
        return None
    size, columns = scheme.group_size(shape[1]), shape[1]
    if size > 1 and columns % size == 0:
        return None
    if not scheme.integer:
        reason = f"{columns} columns are not a multiple of {size}"
        return Fit(Verdict.IMPOSSIBLE, reason, "fp8:row:sym" if scheme.bits == 8 else "")
    if size == 1:
        reason = "groups of one column: a file with scattered groups (desc_act) cannot be stored"
        return Fit(Verdict.IMPOSSIBLE, reason)
    fitting = next(number for number in range(min(size, columns), 0, -1) if columns % number == 0)
    text = f"{scheme.grid}:{f'g{fitting}' if fitting > 1 else 'row'}:{scheme.zero.value}"
    return Fit(Verdict.IMPOSSIBLE, f"{columns} columns are not a multiple of {size}", text)


def float16_scales(scheme: Scheme) -> Fit | None:
    """Return why new scales of this type cannot be stored (existing ones may convert), or None."""
    if scheme.scale in {None, ScaleType.F16}:
        return None
    return Fit(
        Verdict.IMPOSSIBLE,
        f"scales are stored as f16, not {scheme.scale}",
        f"{scheme.grid}:{scheme.granularity}:{scheme.zero.value}:f16",
    )


def bare_codes(tensors: Mapping[str, StoredTensor], suffix: str) -> None:
    """Raise `InputError` for codes whose scale, named by ``suffix``, is missing."""
    for name, tensor in tensors.items():
        codes = tensor.dtype in {"I8", "F8_E4M3", "F8_E5M2"} and name.endswith(".weight")
        if codes and name + suffix not in tensors:
            raise InputError(
                f"{name}: {tensor.dtype} codes without {name}{suffix}",
                "without its scale a tensor stands for nothing: fetch the checkpoint again",
                tensor=name,
            )


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


def scalar(name: str, scale: Tensor) -> Tensor:
    """Return a single positive scale, in whatever shape and type it is stored, as float32 ``[1, 1]``."""
    flat = positive(name, scale).reshape(-1)
    if len(flat) != 1:
        raise InputError(f"{name}: {flat.tolist()[:4]} is no scale", tensor=name, fault=Fault.SCALE)
    return flat.view(1, 1)


def integers(layer: LayerScheme) -> Fit | None:
    """Return why a layer is none of integers with plain inputs, or None."""
    scheme = layer.weight
    if not scheme.integer or scheme.zero is Zero.MIN:
        nearest = f"int{8 if scheme.bits > 4 else 4}:g128:sym"
        return Fit(Verdict.IMPOSSIBLE, f"{scheme.grid} codes are not integers on a scale", nearest)
    if layer.input is not None:
        return Fit(Verdict.IMPOSSIBLE, "quantized activations are not written", str(scheme))
    return None


def possible(module: str, fit: Fit) -> None:
    """Raise `RefusedError` for a module that a format cannot hold."""
    if fit.verdict is Verdict.IMPOSSIBLE:
        raise RefusedError(f"{module}: {fit.reason}", f"use {fit.nearest}" if fit.nearest else "")


def by_group_index(
    tensor: QuantizedTensor, index: Tensor, name: str, *, scattered: bool | None = None
) -> QuantizedTensor:
    """Apply the group number of each column (``g_idx``) to a tensor read as if it had none.

    Scattered groups (``desc_act``) become groups of one column, with each column's own copy of its
    scale: exact, readable by everything, and storable by nothing, which is how it should be.

    Raises:
        InputError: a number is no group, or the configuration says that nothing is scattered (``scattered`` false):
            engines then leave the index out.
    """
    import torch

    from quantforge.packers.tensor import QuantizedTensor as Quantized

    columns = tensor.shape[1]
    require(described({name: index}), [StoredTensor(name, "I32", (columns,))])
    groups = tensor.scheme.groups(columns)
    if bool((index < 0).any()) or bool((index >= groups).any()):
        raise InputError(f"{name}: a group number is outside of 0..{groups - 1}", tensor=name)
    plain = torch.arange(columns, dtype=index.dtype) // tensor.scheme.group_size(columns)
    if torch.equal(index, plain):
        return tensor
    if scattered is False:
        raise denied("the groups are runs of columns", f"{name} scatters them", name)
    scheme = Scheme(tensor.scheme.grid, PerGroup(1), tensor.scheme.zero, tensor.scheme.scale)
    spread = {key: value[:, index.long()] for key, value in tensor.parameters.items()}
    return Quantized(tensor.codes, spread, scheme)


def sound(tensor: QuantizedTensor, name: str) -> QuantizedTensor:
    """Return ``tensor`` if its scales (stored as ``name``) are finite, and 0 only for zeros.

    Raises:
        InputError: naming the tensor and the position.
    """
    if "exponents" in tensor.parameters:  # 255 stands for no number
        exponents = tensor.parameters["exponents"]
        scales = exponents.float().masked_fill(exponents == 255, float("nan"))
    else:
        scales = tensor.parameters["scales"].float()
    bad = ~scales.isfinite()
    if bool(bad.any()):
        row, group = bad.nonzero()[0].tolist()
        raise InputError(
            f"{name}: scale {scales[row, group].item()} of row {row}, group {group}",
            "the checkpoint is damaged, or its scales overflowed when it was written",
            tensor=name,
            fault=Fault.NOT_FINITE,
        )
    if tensor.scheme.integer and bool((scales == 0).any()):
        _refuse_lost(tensor, name)
    return tensor


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


def outside_blocks(layers: Iterable[str]) -> Fit | None:
    """Return why GPTQ and AWQ files cannot hold one of these modules, or None."""
    for module in layers:
        if not within_block(module):
            reason = f"{module}: engines expect heads and embeddings of this format as they were"
            return Fit(Verdict.IMPOSSIBLE, reason, "--format compressed-tensors")
    return None
