"""Independent decoders of the codes of each file format, written from the descriptions of the formats.

A second implementation of what the package reads and writes, by name of the linear: so that writer and reader cannot be
wrong together.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from tests.acceptance.support import config, tensors

Tensors = dict[str, torch.Tensor]
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each field of a word holds


def decode(result: Path) -> Tensors:
    """Return the float32 weights of all quantized linears of a result, by their names without ``.weight``."""
    if result.is_file():
        return _gguf(result)
    stored, settings = tensors(result), config(result)
    if "quantization" in settings:
        return _mlx(stored, settings["quantization"])
    quantization = settings["quantization_config"]
    decoders: dict[str, Any] = {
        "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "bitsandbytes": _bitsandbytes, "fp8": _fp8,
    }  # fmt: skip
    weights: Tensors = decoders[quantization["quant_method"]](stored, quantization)
    return weights


def _modules(stored: Tensors, suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of int32 words along the last dimension, the lowest first."""
    shifts = torch.arange(0, 32, bits)
    fields = (words.long()[..., None] & 0xFFFFFFFF) >> shifts & (2**bits - 1)
    return fields.flatten(-2)


def _by_group(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | float
) -> torch.Tensor:
    """Codes ``[out, in]`` with a scale and a zero point ``[out, groups]``."""
    width = codes.shape[1] // scales.shape[1]
    zeros = zeros.repeat_interleave(width, 1) if isinstance(zeros, torch.Tensor) else zeros
    return (codes.float() - zeros) * scales.float().repeat_interleave(width, 1)


def _compressed(stored: Tensors, settings: Any) -> Tensors:
    weights = {}
    for name in _modules(stored, ".weight_packed"):
        packed = stored[f"{name}.weight_packed"]
        if f"{name}.weight_global_scale" in stored:  # nvfp4
            codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
            values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
            scales = stored[f"{name}.weight_scale"].float() / stored[f"{name}.weight_global_scale"]
            weights[name] = _by_group(values, scales, 0.0)
            continue
        rows, columns = stored[f"{name}.weight_shape"].tolist()
        (bits,) = {group["weights"]["num_bits"] for group in settings["config_groups"].values()}
        if 32 % bits:  # fields that cross words
            stream = _fields(packed, 1)[:, : columns * bits].reshape(rows, columns, bits)
            codes = (stream << torch.arange(bits)).sum(-1)
        else:
            codes = _fields(packed, bits)[:, :columns]
        zeros: torch.Tensor | float = 2.0 ** (bits - 1)
        if f"{name}.weight_zero_point" in stored:
            packed_zeros = stored[f"{name}.weight_zero_point"]  # along the rows
            zeros = _fields(packed_zeros.T.contiguous(), bits)[:, :rows].T.float()
        weights[name] = _by_group(codes, stored[f"{name}.weight_scale"], zeros)
    for name in _modules(stored, ".weight_scale"):
        weight = stored.get(f"{name}.weight")
        if weight is not None and name not in weights:
            weights[name] = weight.float() * _spread(stored[f"{name}.weight_scale"], weight.shape)
    return weights


def _spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scales of rows, groups of 128 columns, or tiles of 128 x 128, for every element."""
    scales = scales.float().reshape(-1, 1) if scales.dim() < 2 else scales.float()
    for axis, size in enumerate(shape):
        if scales.shape[axis] not in (1, size):
            scales = scales.repeat_interleave(128, axis).narrow(axis, 0, size)
    return scales.expand(shape)


def _gptq(stored: Tensors, settings: Any) -> Tensors:
    bits, weights = settings["bits"], {}
    for name in _modules(stored, ".qweight"):
        codes = _fields(stored[f"{name}.qweight"].T.contiguous(), bits)  # [out, in]
        zeros = _fields(stored[f"{name}.qzeros"], bits).T.float()  # [out, groups]
        if settings.get("checkpoint_format") != "gptq_v2":
            zeros = zeros + 1  # the first version stores them less one
        index = stored[f"{name}.g_idx"].long()
        scales = stored[f"{name}.scales"].T.float()
        weights[name] = (codes - zeros[:, index]) * scales[:, index]
    return weights


def _awq(stored: Tensors, settings: Any) -> Tensors:
    order = torch.tensor(AWQ_ORDER)
    weights = {}
    for name in _modules(stored, ".qweight"):

        def columns(words: torch.Tensor) -> torch.Tensor:
            fields = _fields(words, 4).reshape(len(words), -1, 8)
            placed = torch.empty_like(fields)
            placed[..., order] = fields
            return placed.flatten(1)

        codes = columns(stored[f"{name}.qweight"]).T  # [out, in]
        zeros = columns(stored[f"{name}.qzeros"]).T.float()
        weights[name] = _by_group(codes, stored[f"{name}.scales"].T, zeros)
    return weights


def _bitsandbytes(stored: Tensors, settings: Any) -> Tensors:
    weights = {}
    for name in _modules(stored, ".SCB"):
        weights[name] = stored[f"{name}.weight"].float() * stored[f"{name}.SCB"][:, None] / 127
    for name in _modules(stored, ".weight.absmax"):
        (state,) = (key for key in stored if key.startswith(f"{name}.weight.quant_state."))
        details = json.loads(bytes(stored[state].tolist()))
        packed = stored[f"{name}.weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten().long()
        values = torch.tensor(NF4)[codes].reshape(-1, details["blocksize"])
        scales = stored[f"{name}.weight.absmax"].float()
        if f"{name}.weight.nested_absmax" in stored:
            nested = stored[f"{name}.weight.nested_quant_map"][scales.long()]
            blocks = stored[f"{name}.weight.nested_absmax"].repeat_interleave(
                details["nested_blocksize"]
            )
            scales = nested * blocks[: len(nested)] + details["nested_offset"]
        weights[name] = (values * scales[:, None]).reshape(details["shape"])
    return weights


def _fp8(stored: Tensors, settings: Any) -> Tensors:
    return {
        name: stored[f"{name}.weight"].float()
        * _spread(stored[f"{name}.weight_scale_inv"], stored[f"{name}.weight"].shape)
        for name in _modules(stored, ".weight_scale_inv")
    }


def _mlx(stored: Tensors, settings: Any) -> Tensors:
    weights = {}
    for name in _modules(stored, ".scales"):
        layer_settings = settings.get(name, settings)
        scales, biases = stored[f"{name}.scales"].float(), stored[f"{name}.biases"].float()
        codes = _fields(stored[f"{name}.weight"].to(torch.int64), layer_settings["bits"]).float()
        width = layer_settings["group_size"]
        weights[name] = codes * scales.repeat_interleave(width, 1) + biases.repeat_interleave(
            width, 1
        )
    return weights


PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _gguf(file: Path) -> Tensors:
    """Linears of the blocks of a llama, decoded by llama.cpp's own package."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader, weights = GGUFReader(file), {}
    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    for tensor in reader.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if match is None or match[2] not in PARTS:
            continue
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if match[2] in heads:  # llama.cpp holds the two halves of a head's rows in turns
            count = heads[match[2]]
            values = values.reshape(count, -1, 2, values.shape[1]).transpose(1, 2).flatten(0, 2)
        weights[f"model.layers.{match[1]}.{PARTS[match[2]]}"] = values
    return weights


def gguf_types(file: Path) -> dict[str, str]:
    """The type of every tensor of a GGUF file."""
    from gguf import GGUFReader

    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}


def gguf_key(file: Path, name: str) -> Any:
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get(name)
    return None if field is None else field.contents()
