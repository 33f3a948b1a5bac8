"""Engines that load compressed-tensors: which of its many formats each has kernels for, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

from quantforge.formats.engines import (
    GROUPS,
    MARLIN,
    UNTRIED,
    Engine,
    Shape,
    at_bits,
    bits_in,
    by_engine,
    grid_in,
    groups_in,
    of_integers,
    symmetric,
)
from quantforge.grids import PerGroup, PerTensor
from quantforge.scheme import LayerScheme, Scheme


def _no_fp8_groups(scheme: Scheme, _: Shape) -> str:
    grouped = scheme.grid.startswith("fp8") and isinstance(scheme.granularity, PerGroup)
    return "fp8 per tensor, row or 128x128 tile only" if grouped else ""


def _fp8_rows_or_tiles(scheme: Scheme, _: Shape) -> str:
    whole = scheme.grid.startswith("fp8") and isinstance(scheme.granularity, PerTensor)
    return "fp8 per row or tile only" if whole else ""


def _four_by_four(layer: LayerScheme) -> str:
    bare = layer.weight.grid == "nvfp4" and layer.input is None
    return "nvfp4 with nvfp4 inputs only (NVFP4_W4A4)" if bare else ""


def _integers_only(scheme: Scheme, _: Shape) -> str:
    return "" if scheme.integer else "integers only of this format"


def _no_inputs(layer: LayerScheme) -> str:
    return "" if layer.input is None else "no quantized inputs of this format"


def _joined_experts(layer: LayerScheme) -> str:
    """Return why transformers 5.23 does not load such experts rightly: seen with mixtral and qwen3_moe."""
    known = layer.weight.integer or layer.weight.grid in {"fp8_e4m3", "mxfp4"}
    inputs = layer.input is None or layer.weight.grid == "fp8_e4m3"
    return "" if known and inputs else "its loader cannot join packed experts of this scheme"


_FLOATS = (
    grid_in(
        ("fp8_e4m3",),
        "8-bit floats are fast from compute capability 8.9 on; a CPU has kernels with inputs by token (or tiles, "
        "with AMX) only",
    ),
    grid_in(("nvfp4", "mxfp4", "mxfp8"), "kernels run on a GPU only"),
)
_PACKED = Engine(
    refuses=(*of_integers(bits_in(4, 8), GROUPS), _no_fp8_groups),
    notes=(*of_integers(*MARLIN), *_FLOATS),
)
_ZERO_POINTS = (
    "compressed-tensors 0.18 to 0.20 cannot load packed zero points: load with "
    "CompressedTensorsConfig(dequantize=True)"
)
_DENSE = tuple(at_bits(width, "needs compressed-tensors 0.18 or later") for width in (3, 5, 6, 7))

# Tried: transformers 5.23 with compressed-tensors 0.20.
_CONV1D = (
    "its Conv1D layers take no packed weights and would stay random; quantforge eval loads them, and --for "
    "transformers stores symmetric integers in groups, of one scheme, for it to decode on loading"
)
_MIXED_EXPERTS = (
    "its loader joins the matrices of experts into one tensor, so that all of them need one scheme"
)
_JOINED_WHOLE = (
    "beside packed layers its loader joins packed experts alone, and these stay as they are"
)
ENGINES = by_engine(
    transformers=Engine(
        refuses=(symmetric(_ZERO_POINTS),),
        notes=of_integers(*_DENSE),
        transposed=_CONV1D,
        kept_experts=_JOINED_WHOLE,
        packed_experts=_joined_experts,
        mixed_experts=_MIXED_EXPERTS,
        unrolls=True,
        decodes=True,
    ),
    vllm=replace(_PACKED, unrolls=True),
    sglang=_PACKED,
    tensorrt_llm=Engine(
        refuses=(
            lambda scheme, _: "reads no integers of this format" if scheme.integer else "",
            _no_fp8_groups,
            _fp8_rows_or_tiles,
            grid_in(("mxfp8",), "no kernel for mxfp8"),
        ),
        inputs=_four_by_four,
        note=UNTRIED,
    ),
    lmdeploy=Engine(
        refuses=(
            _integers_only,
            bits_in(4),
            groups_in(32, 128, row=False),
            symmetric("no zero points"),
        ),
        inputs=_no_inputs,
        mixture="it reads one group of the configuration, for all layers",
        note=UNTRIED,
    ),
    mlx=Engine(never="reads this format of a few model families only, others not: take --for mlx"),
)
