"""KV cache scales: found or refused, and rounded alike in calibration and at runtime."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantforge.errors import InputError
from quantforge.formats import kv_scales
from quantforge.plans import StoredTensor
from quantforge.runtime.cache_scales import CachePeaks, RoundedCache, attach_cache
from quantforge_kernels import kv

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def config(**changes):
    return {
        "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "quantization_config": {"kv_cache_scheme": {**SCHEME, **changes}},
    }  # fmt: skip


def headers(kind=kv_scales.TENSOR):
    tensors = [
        item
        for block in range(2)
        for item in kv_scales.scale_tensors(f"model.layers.{block}.self_attn", kind, 2)
    ]
    return {item.name: item for item in tensors}


@pytest.mark.parametrize("kind", [kv_scales.TENSOR, kv_scales.HEAD])
def test_announced_kv_scales_are_found(kind):
    stored = headers(kind)
    scheme = kv_scales.kv_cache_scheme(stored.values())
    assert scheme is not None
    scales = kv_scales.find_scales(config(**scheme), stored)
    assert (scales.kind, scales.tensor_names) == (kind, stored.keys())
    assert scales.names[1] == (
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.self_attn.v_scale",
    )


def test_models_without_kv_scales_have_none():
    assert (
        kv_scales.kv_cache_scheme([StoredTensor("model.layers.0.mlp.k_scale", "F32", (1,))]) is None
    )
    assert kv_scales.find_scales({}, headers()).tensor_names == frozenset()


@pytest.mark.parametrize(
    "changes", [{"num_bits": 4}, {"type": "int"}, {"strategy": "channel"}, {"dynamic": True}]
)
def test_unsupported_kv_cache_schemes_are_refused(changes):
    with pytest.raises(InputError, match="kv_cache_scheme"):
        kv_scales.find_scales(config(**changes), headers())


def test_missing_or_misshapen_kv_scales_are_named():
    stored = headers()
    name = "model.layers.1.self_attn.v_scale"
    with pytest.raises(InputError, match="v_scale of block 1"):
        kv_scales.find_scales(config(), {key: item for key, item in stored.items() if key != name})
    for wrong in (StoredTensor(name, "F32", (2, 1, 1)), StoredTensor(name, "I32", (1,))):
        with pytest.raises(InputError, match=r"layers\.1\.self_attn\.v_scale"):
            kv_scales.find_scales(config(), {**stored, name: wrong})


@pytest.mark.parametrize("kind", [kv_scales.TENSOR, kv_scales.HEAD])
def test_calibration_and_runtime_caches_round_equally(kind):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 2, 5, 64, generator=generator) * torch.tensor([1.0, 40.0])[:, None, None]
    values = torch.randn(3, 2, 5, 64, generator=generator)
    peaks = CachePeaks()
    for row in range(3):
        same = peaks.update(keys[row : row + 1], values[row : row + 1], 0)
        assert torch.equal(same[0], keys[row : row + 1])
    scales = peaks.scales(kind)
    covered = scales[0].flatten() * 448
    largest = keys.abs().amax((0, 2, 3))
    assert bool((covered >= (largest if kind == kv_scales.HEAD else largest.max())).all())
    assert bool((covered <= 1.008 * (largest if kind == kv_scales.HEAD else largest.max())).all())
    seen = RoundedCache(*scales).update(keys, values)
    for x, rounded, scale in zip((keys, values), seen, scales, strict=True):
        tokens = x.transpose(1, 2).flatten(0, 1)  # [tokens, kv_heads, head]
        encoded = kv.encode(tokens, "fp8", kv.expand_scale(scale, 2, 64, "fp8"))
        stored = kv.decode(encoded, torch.float32)
        assert torch.equal(stored, rounded.transpose(1, 2).flatten(0, 1))
        assert 0 < (rounded - x).norm() / x.norm() < 0.04


def test_unobserved_or_non_finite_cache_peaks_are_refused():
    peaks = CachePeaks()
    with pytest.raises(InputError, match="not seen"):
        peaks.scales(kv_scales.TENSOR)
    peaks.update(torch.full((1, 1, 1, 2), float("inf")), torch.ones(1, 1, 1, 2))
    with pytest.raises(InputError, match="not finite"):
        peaks.scales(kv_scales.TENSOR)


class Kept:
    """A fake cache that records its arguments."""

    length = 7

    def update(self, keys, values, layer):
        self.given = keys, values, layer
        return keys, values


class Attention(nn.Module):
    def forward(self, x, past_key_values=None):
        if past_key_values is not None:
            return past_key_values.update(x, x, 3)[0]
        return x


def test_attached_caches_round_before_the_existing_cache():
    attention, x = Attention(), torch.randn(1, 2, 3, 4)
    handle = attach_cache(attention, RoundedCache(torch.tensor([0.25]), torch.tensor([0.5])))
    existing_cache = Kept()
    rounded = attention(x, past_key_values=existing_cache)
    assert torch.equal(rounded, attention(x))
    assert not torch.equal(rounded, x)
    assert torch.equal(existing_cache.given[0], rounded)
    assert existing_cache.given[2] == 3
    handle.remove()
    assert torch.equal(attention(x), x)
