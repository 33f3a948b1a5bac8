"""Memory and speed forecasts: worked examples, and cache sizes of this runtime and of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from quantforge import api
from quantforge.architectures import architecture_of
from quantforge.architectures.families import declared_families
from quantforge.architectures.match import ModelLayout
from quantforge.cache_kinds import WORDS
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.planning.capacity import (
    USABLE_MEMORY_SHARE,
    CacheSize,
    Capacity,
    Load,
    cache_row_bytes,
    cache_size,
)
from quantforge.planning.gpu_cards import CARDS, Card
from quantforge.planning.weight_traffic import WeightTraffic
from quantforge.recipe import Recipe
from quantforge.runtime.cache import CacheShape, PagedCache
from quantforge.runtime.model_sizes import bytes_per_token
from quantforge_kernels.kv import PAGE_SIZE
from tests import headers
from tests.conftest import FAMILIES, MIXTURES

GB, CACHED_TOKENS = 1e9, 24
LLAMA_2_7B = {"num_hidden_layers": 32, "num_key_value_heads": 32}
LLAMA_2_13B = {
    "num_hidden_layers": 40, "num_key_value_heads": 40, "num_attention_heads": 40, "hidden_size": 5120,
    "intermediate_size": 13824,
}  # fmt: skip
LLAMA_3_8B = {
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def model_layout(config: dict[str, Any]) -> ModelLayout:
    """Return the layout of a model from its configuration alone."""
    family = architecture_of(config)
    assert family is not None
    sizes = family.dimensions(config)
    kinds = family.layer_kinds(config, sizes)
    return ModelLayout(family, config["model_type"], config, sizes, (), layers=kinds)


def cache(layers: int, heads: int, kv_heads: int, head: int, kind: str = "16bit") -> CacheSize:
    config = {
        **headers.LLAMA, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head, "hidden_size": heads * head,
    }  # fmt: skip
    return cache_size(model_layout(config), cache_row_bytes(kind))


def capacity(model: object, load: Load, **options: Any) -> Capacity:
    return api.capacity(str(model), load, **options)[1]


@pytest.mark.parametrize(
    ("sizes", "tokens", "batch", "expected"),
    [
        ((32, 32, 32, 128), 1, 1, 524_288),
        ((32, 32, 32, 128), 8192, 32, 137.4 * GB),
        ((32, 32, 8, 128), 8192, 32, 34.4 * GB),
        ((40, 40, 40, 128), 4096, 16, 53.7 * GB),  # printed as 86 in one place
        ((80, 64, 64, 128), 32_768, 1, 85.9 * GB),
        ((80, 64, 8, 128), 32_768, 1, 10.7 * GB),
        ((32, 32, 8, 128), 1, 1, 131_072),  # Llama 3 8B: printed as 2.5 MB in one place
    ],
)
def test_cache_sizes_equal_worked_examples(sizes, tokens, batch, expected):
    assert batch * cache(*sizes).sequence_bytes(tokens) == pytest.approx(expected, rel=4e-3)


@pytest.mark.parametrize(("scheme", "nominal"), [(None, 14), ("int8:row", 7), ("int4:g128", 3.5)])
def test_weight_bytes_of_a_7b_model(tmp_path, scheme, nominal):
    """The rule of thumb ignores the true 6.74e9 weights and the 16-bit embedding, head and scales."""
    model = headers.llama(tmp_path / "m", **LLAMA_2_7B)
    recipe = Recipe(method="rtn", scheme=scheme) if scheme else Recipe(format="plain")
    estimate = capacity(model, Load(1), recipe=recipe)
    weights, outside = 6_738_415_616, 2 * 32_000 * 4096
    bits = {None: 16, "int8:row": 8, "int4:g128": 4 + 16 / 128}[scheme]
    assert estimate.weights_bytes == pytest.approx(
        (bits * (weights - outside) + 16 * outside) / 8, rel=1e-3
    )
    assert 0.96 < estimate.weights_bytes / (nominal * GB) < 1.11


def test_a_13b_model_fits_24_gb_only_in_4_bits(tmp_path):
    model = headers.llama(tmp_path / "m", **LLAMA_2_13B)
    card = CARDS["rtx-4090"]
    plain = capacity(model, Load(1), recipe=Recipe(format="plain"))
    assert plain.weights_bytes == pytest.approx(26 * GB, rel=2e-3)
    assert not plain.on_card("rtx-4090", card).fits
    assert (
        plain.on_card("rtx-4090", card).largest_batch
        == plain.on_card("", card).largest_context
        == 0
    )
    small = capacity(model, Load(4096), recipe=Recipe(method="rtn", bits=4)).on_card(
        "rtx-4090", card
    )
    assert small.fits
    assert 1 <= small.largest_batch < 10


def test_the_default_context_is_limited_by_the_positions(tmp_path):
    for positions, context in ((1024, 1024), (8192, 4096)):
        sizes = {**LLAMA_3_8B, "max_position_embeddings": positions}
        model = headers.llama(tmp_path / str(positions), **sizes)
        assert capacity(model, Load(), recipe=Recipe(format="plain")).load.context == context
    with pytest.raises(UsageError, match="the model has 1024 positions"):
        capacity(tmp_path / "1024", Load(4096), recipe=Recipe(format="plain"))


def test_largest_batch_and_context_are_maximal(tmp_path):
    model = headers.llama(tmp_path / "m", **LLAMA_3_8B)
    estimate = capacity(model, Load(1024, 8, "fp8"), recipe=Recipe(method="rtn", bits=4))
    card = Card(7.2 * GB, 0.0, 0.0, "")
    row, room = estimate.on_card("", card), USABLE_MEMORY_SHARE * card.memory
    assert row.fits
    assert (
        estimate.needed_bytes(batch=row.largest_batch)
        <= room
        < estimate.needed_bytes(batch=row.largest_batch + 1)
    )
    assert estimate.needed_bytes(context=row.largest_context) <= room
    assert room < estimate.needed_bytes(context=row.largest_context + 1)
    assert (row.seconds_per_token, row.tokens_per_second, row.cost_per_million) == (None,) * 3


def test_cost_per_million_tokens_follows_from_speed_and_price():
    traffic = WeightTraffic(1, 1, 1, 0, 0, 1.0, 1)
    estimate = Capacity(Load(4096), 4096, traffic, cache(2, 4, 4, 64), 1, 1)
    row = estimate.on_card("", Card(0.0, 2000.0 * estimate.step_bytes(), 0.0, ""), price=2.0)
    assert row.tokens_per_second == pytest.approx(2000)
    assert row.cost_per_million == pytest.approx(2 / 7.2)  # 0.28


def test_step_time_follows_the_roofline_model(tmp_path):
    model = headers.llama(tmp_path / "m", **LLAMA_3_8B)
    card = CARDS["h100-sxm"]
    plain = Recipe(format="plain")
    single = capacity(model, Load(4096), recipe=plain)
    read = 2 * (8_030_261_248 - 128_256 * 4096) + 4096 * 131_072  # of the embedding one row
    assert single.step_bytes() == pytest.approx(read, rel=1e-3)
    row = single.on_card("", card)
    assert (row.limited_by, row.seconds_per_token) == ("bandwidth", single.step_bytes() / 3.35e12)
    many = capacity(model, Load(64, 4096), recipe=plain)
    row = many.on_card("", card)
    assert row.limited_by == "compute"
    assert row.seconds_per_token == pytest.approx(2 * 7.505e9 * 4096 / 989e12, rel=1e-3)
    assert row.tokens_per_second == 4096 / row.seconds_per_token


@pytest.mark.parametrize("kind", [*WORDS, "k=int8,v=int4", "k=16bit,v=fp8"])
def test_cache_size_equals_our_paged_cache(kind):
    shape = CacheShape(4, 2, 128, kind, torch.bfloat16)
    paged_cache = PagedCache(shape, 1, PAGE_SIZE, torch.device("cpu"))
    stores = [part for pair in paged_cache.layers for store in pair for part in store.tensors()]
    expected = cache(4, 8, 2, 128, kind)
    assert expected.token_bytes == shape.token_bytes
    assert expected.sequence_bytes(PAGE_SIZE) == sum(part.nbytes for part in stores)


@pytest.mark.parametrize(
    "family",
    [
        "llama", "gpt2", "gpt-neox", "phi3",  # all tokens
        "mistral", "qwen2", "gemma3", "gemma4", "gemma4-equal", "gpt-oss", "afmoe", "llama4",  # windows, chunks
        "deepseek-v3", "deepseek-v32", "kimi-linear",  # latents, one with an indexer
        "qwen3.5", "falcon-h1", "granite-hybrid", "nemotron-h", "lfm2",  # states
    ],
)  # fmt: skip
def test_cache_size_equals_the_cache_of_transformers(family):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    model_type, values, _, _ = {**FAMILIES, **MIXTURES}[family]
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    dynamic_cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(CACHED_TOKENS)[None], past_key_values=dynamic_cache, use_cache=True)
    size = cache_size(
        model_layout(json.loads(json.dumps(config.to_dict(), default=str))),
        cache_row_bytes("16bit"),
    )
    for layer, theirs in zip(size.layers, dynamic_cache.layers, strict=True):
        # transformers holds a window without the token that comes next.
        tokens = min(CACHED_TOKENS, layer.window - 1) if layer.window else CACHED_TOKENS
        assert layer.fixed_bytes + tokens * layer.token_bytes == _bytes(theirs)


def _bytes(layer: Any) -> int:
    """Return the bytes of all states of one layer of a transformers cache."""
    parts = [*vars(layer).values()]
    parts += [part for value in parts if isinstance(value, dict) for part in value.values()]
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor) and part.dim() > 1)


STATES = {"qwen3_next", "nemotron_h", "lfm2", "lfm2_moe", "kimi_linear", "granitemoehybrid", "falcon_h1",
          "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}  # fmt: skip


def test_layer_windows_match_transformers():
    from transformers import AutoConfig
    from transformers.cache_utils import DynamicCache

    sliding = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    seen = 0
    for name in sorted(declared_families().keys() - {"kimi_k2"}):  # which has no class of its own
        for values in ({}, sliding):
            default = AutoConfig.for_model(name).get_text_config(decoder=True)
            accepted = {key: value for key, value in values.items() if hasattr(default, key)}
            text = type(default)(**accepted)
            theirs = [
                getattr(layer, "sliding_window", 0) or 0
                for layer in DynamicCache(config=text).layers
            ]
            declared = text.to_dict()
            rule = architecture_of({"model_type": name}).windows
            assert list(rule.of_layers(declared, len(theirs))) == theirs, name
            if name in STATES or (name == "smollm3" and values):
                continue
            unlisted = {key: value for key, value in declared.items() if key != "layer_types"}
            if "sliding_window" not in values and declared.get("sliding_window") is None:
                unlisted.pop("sliding_window", None)
            assert list(rule.of_layers(unlisted, len(theirs))) == theirs, name
            seen += any(theirs)
    assert seen > 20


def test_windows_without_layer_types_are_refused():
    config = {"sliding_window": 16, "use_sliding_window": True}
    with pytest.raises(InputError, match="layer_types is missing"):
        architecture_of({"model_type": "smollm3"}).windows.of_layers(config, 4)
    rule = architecture_of({"model_type": "qwen2"}).windows
    with pytest.raises(InputError, match="max_window_layers = 'x'"):
        rule.of_layers({**config, "max_window_layers": "x"}, 4)


def test_chunked_layers_follow_no_rope_layers():
    rule = architecture_of({"model_type": "llama4_text"}).windows
    chunked = {"attention_chunk_size": 16}
    assert rule.of_layers({**chunked, "no_rope_layers": [1, 0, 0, 1]}, 4) == (16, 0, 0, 16)
    assert rule.of_layers({**chunked, "no_rope_layers": []}, 5) == (16, 16, 16, 0, 16)
    for flags in ("x", [1, 0], [1, 0, 0, 1, 1], [1, 2, 0, 1]):
        with pytest.raises(InputError, match="no_rope_layers"):
            rule.of_layers({**chunked, "no_rope_layers": flags}, 4)


@pytest.mark.parametrize("model", ["models/demo", "models/demo-moe"])
def test_planned_bytes_per_token_equal_the_runtime(model):
    estimate = capacity(model, Load(1), recipe=Recipe(format="plain"))
    loaded = api.load(model).model.to(torch.bfloat16)
    assert estimate.traffic.step_bytes(1) == pytest.approx(bytes_per_token(loaded), rel=2e-3)
    parameter_bytes = sum(value.nbytes for value in loaded.parameters())
    assert estimate.weights_bytes == pytest.approx(parameter_bytes, rel=1e-3)


def test_step_bytes_grow_with_distinct_experts():
    traffic = WeightTraffic(0, 100, 50, 1000, 500, 2 / 8, 1)
    assert [traffic.step_bytes(n) for n in (1, 2)] == [100 + 250, 100 + 1000 * (1 - 0.75**2)]
    assert traffic.step_bytes(64) == pytest.approx(1100)
    assert traffic.token_weights == 50 + 125


def test_devices_split_kv_heads_but_not_latents():
    heads = model_layout({**headers.LLAMA, "num_key_value_heads": 8})
    on_one_device = cache_size(heads, cache_row_bytes("16bit")).token_bytes
    shares = [
        cache_size(heads, cache_row_bytes("16bit"), n).token_bytes / on_one_device
        for n in (2, 8, 16)
    ]
    assert shares == [1 / 2, 1 / 8, 1 / 8]  # a head at least
    values = MIXTURES["deepseek-v3"][1]
    latent = model_layout({"model_type": "deepseek_v3", **values})
    assert len({cache_size(latent, cache_row_bytes("16bit"), n).token_bytes for n in (1, 4)}) == 1


def test_separate_key_and_value_widths_are_counted():
    heads = model_layout({**headers.LLAMA, "num_key_value_heads": 8})
    keys, values, both = (
        cache_size(heads, cache_row_bytes(kind)).token_bytes
        for kind in ("int8", "int4", "k=int8,v=int4")
    )
    assert both == (keys + values) / 2
    latent = model_layout({"model_type": "deepseek_v3", **MIXTURES["deepseek-v3"][1]})
    with pytest.raises(RefusedError, match="one vector"):
        cache_size(latent, cache_row_bytes("k=int8,v=int4"))
    assert cache_size(latent, cache_row_bytes("k=int8,v=int8")) == cache_size(
        latent, cache_row_bytes("int8")
    )


def test_unknown_loads_caches_and_families_are_refused(tmp_path):
    model = headers.llama(tmp_path / "m")
    with pytest.raises(UsageError, match="4096 positions"):
        capacity(model, Load(4097), recipe=Recipe(format="plain"))
    with pytest.raises(UsageError, match="--cache int5"):
        capacity(model, Load(1, cache="int5"), recipe=Recipe(format="plain"))
    with pytest.raises(UsageError, match="--batch 0"):
        Load(1, 0)
    config = {**headers.LLAMA, "model_type": "strange"}
    unknown = headers.write(tmp_path / "u", config, headers.llama_tensors(config))
    with pytest.raises(InputError, match="'strange' is not declared"):
        capacity(unknown, Load(1), method="rtn", bits=4)
