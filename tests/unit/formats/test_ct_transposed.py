"""Transposed matrices in compressed-tensors files: decoded by the library and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from quantforge.api import plan
from quantforge.errors import InputError, RefusedError
from quantforge.formats import compressed_tensors as ct
from quantforge.formats.compressed_tensors.groups import weight_arguments
from quantforge.formats.compressed_tensors.linears import (
    pack_transposed,
    packed_transposed_tensors,
    transposed_scheme,
)
from quantforge.formats.read_checks import tensor_headers
from tests.conftest import Tiny
from tests.quantized import bit_equal, dequantize_reference, random_tensor

CONFIG = {"model_type": "gpt2"}


def packed_transposed(
    scheme: str, shape: tuple[int, int]
) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """Return a random matrix, its packed tensors, and the scheme of its config group."""
    tensor = random_tensor(scheme, shape)
    return tensor, pack_transposed("h.0.attn.c_attn", tensor), transposed_scheme(tensor.scheme)


def configuration(blocks: Any, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weight_arguments(blocks)}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": group},
    }
    return CONFIG | {"quantization_config": quantization} | changes  # fmt: skip


@pytest.mark.parametrize("scheme", ["int4:g16:sym:bf16", "int3:g32:sym:f16", "int8:g64:sym:f32"])
def test_compressed_tensors_decodes_transposed_storage(scheme: str) -> None:
    tensor, files, blocks = packed_transposed(scheme, (96, 64))
    arguments = QuantizationScheme(targets=["Linear"], weights=weight_arguments(blocks))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = {name.removeprefix("h.0.attn.c_attn."): value for name, value in files.items()}
    weight = compressor.decompress(packed, arguments)["weight"]
    assert torch.equal(weight, dequantize_reference(tensor).T.to(weight.dtype))


def test_transposed_storage_round_trips() -> None:
    tensor, files, blocks = packed_transposed("int4:g16:sym:bf16", (96, 64))
    (layout,) = ct.find_layouts(configuration(blocks), tensor_headers(files))
    assert (layout.transposed, layout.shape) == (True, (96, 64))
    assert bit_equal(ct.unpack(layout, files), tensor)
    announced = packed_transposed_tensors(layout.module, layout.scheme, layout.shape)
    assert {item.name: item for item in announced} == tensor_headers(files)


def test_damaged_scales_of_transposed_storage_are_refused() -> None:
    _, files, blocks = packed_transposed("int4:g16:sym:bf16", (96, 64))
    files["h.0.attn.c_attn.weight_scale"] = files["h.0.attn.c_attn.weight_scale"][:-1]
    with pytest.raises(InputError, match="weight_scale"):
        ct.find_layouts(configuration(blocks), tensor_headers(files))


def test_only_symmetric_integer_groups_are_stored_transposed(tiny: Tiny) -> None:
    model: Path = tiny("gpt2")
    planned = plan(model, scheme="int4:g32:sym", engine="transformers")
    verdicts = {verdict.engine: verdict for verdict in planned.engines}
    assert verdicts["transformers"].loads
    assert "decoded on loading" in verdicts["transformers"].reason
    assert not verdicts["vllm"].loads
    assert all(tensor.codes_transposed for tensor in planned.quantized())
    assert not any(tensor.codes_transposed for tensor in plan(model, scheme="int4:g32:sym").tensors)
    for scheme in ("int4:g32:asym", "int4:row:sym"):
        with pytest.raises(RefusedError, match="Conv1D"):
            plan(model, scheme=scheme, engine="transformers")
    with pytest.raises(RefusedError, match="Conv1D"):
        plan(model, scheme="int4:g32:sym", lm_head="int8:g32:sym", engine="transformers")
