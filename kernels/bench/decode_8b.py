"""Measure decoding speed with random weights of given sizes."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from quantforge.architectures import Stack
from quantforge.grids import ScaleType, Tile
from quantforge.model.skeleton import build_skeleton
from quantforge.notation import parse
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import DecodingStep, prefill
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.model_sizes import bytes_per_token
from quantforge.runtime.packed_experts import is_supported, packed_experts
from quantforge.scheme import Scheme

PROMPT, STEPS, WARM_UPS = 128, 48, 4


def measure_decode(
    config: dict[str, Any], scheme: str | None, bandwidth: float, device: str = "cuda"
) -> dict[str, float]:
    """Build the model (head and embedding in bf16), prefill, decode one sequence.

    Returns:
        Tokens per second of the median step, bytes of weights read per token, share of the roofline.
    """
    model = random_model(config, None if scheme is None else parse(scheme), device)
    decoder = Decoder(model)
    cache = decoder.cache(1, PROMPT + STEPS + WARM_UPS)
    ids = torch.randint(0, config["vocab_size"], (1, PROMPT), device=device)
    with torch.inference_mode():
        token = prefill(decoder, ids, cache, STEPS + WARM_UPS).argmax(-1)
        step = DecodingStep(decoder, cache)
        times = []
        for _ in range(STEPS + WARM_UPS):
            start = perf_counter()
            token = step(token).argmax(-1)
            token.tolist()  # waits
            times.append(perf_counter() - start)
    read = bytes_per_token(model)
    tpot = median(times[WARM_UPS:])
    return {
        "tokens_per_second": 1 / tpot,
        "read_bytes": read,
        "roofline_share": read / bandwidth / tpot,
    }


def random_model(
    config: dict[str, Any], scheme: Scheme | None, device: str, head: Scheme | None = None
) -> Any:
    """Build a model of random weights: its blocks' linears packed in ``scheme``, its output layer in ``head``."""
    model = build_skeleton(config)
    target_device = torch.device(device)
    for name, module in list(model.named_modules()):
        module_scheme = head if name == "lm_head" else scheme
        if isinstance(module, nn.Linear) and module_scheme is not None:
            tensor = random_tensor(
                module_scheme, (module.out_features, module.in_features), target_device
            )
            model.set_submodule(name, PackedLinear(tensor, None, torch.bfloat16, target_device))
            continue
        if module_scheme is not None and is_supported(module):
            model.set_submodule(name, random_experts(module, module_scheme, target_device))
            continue
        for key, value in list(module.named_parameters(recurse=False)):
            factory_args = {"dtype": torch.bfloat16, "device": target_device}
            filled = torch.ones(value.shape, **factory_args)
            if value.dim() > 1:
                filled = torch.randn(value.shape, **factory_args) * 0.02
            setattr(module, key, nn.Parameter(filled, requires_grad=False))
        for key, value in list(module.named_buffers(recurse=False)):
            setattr(module, key, value.to(target_device))
    return model


def random_experts(module: Any, scheme: Scheme, device: torch.device) -> nn.Module:
    """Build packed experts to replace a module whose stacks are ``[experts, out, in]``, gate before up."""
    shapes = {"gate": module.gate_up_proj, "up": module.gate_up_proj, "down": module.down_proj}
    sizes = {name: (value.shape[1], value.shape[2]) for name, value in shapes.items()}
    for name in ("gate", "up"):
        sizes[name] = (sizes[name][0] // 2, sizes[name][1])
    stacks = (Stack("gate_up_proj", ("gate", "up")), Stack("down_proj", ("down",)))
    packed = packed_experts(
        module,
        stacks,
        lambda linear, _: random_tensor(scheme, sizes[linear], device),
        torch.bfloat16,
        device,
    )
    assert packed is not None
    return packed


def random_tensor(scheme: Scheme, shape: tuple[int, int], device: torch.device) -> QuantizedTensor:
    """Return random codes under scales that give weights of ordinary size."""
    scheme = scheme.with_scale(ScaleType.BF16)
    size = scheme.parameter_shape(shape)
    codes = torch.randint(0, 1 << scheme.bits, shape, dtype=torch.uint8, device=device)
    if scheme.grid.startswith("fp8"):
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).view(torch.float8_e4m3fn)
    elif scheme.integer and scheme.symmetric:
        codes = (codes.short() - (1 << (scheme.bits - 1))).to(torch.int8)
    assert not isinstance(scheme.granularity, Tile)
    factory_args = torch.float32 if scheme.scale is ScaleType.F32 else torch.bfloat16
    scales = torch.full(size, 0.02 / (1 << (scheme.bits - 1)), dtype=factory_args, device=device)
    return QuantizedTensor(codes, {"scales": scales}, scheme)
