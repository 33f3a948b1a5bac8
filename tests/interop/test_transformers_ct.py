"""Stock transformers and compressed-tensors load our files and compute our numbers; we read theirs."""

import json

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from quantforge.formats import compressed_tensors as ct
from quantforge.formats.read_checks import tensor_headers
from tests.quantized import (
    dequantize_reference,
    format_plan,
    quantized_plan,
    random_tensor,
    unquantized_plan,
)
from tests.thorough import mark_others_thorough, thorough_case

IDS = torch.arange(48).reshape(1, 48) * 7 % 512
LOWER_BITS = ["int2:g64:sym:f16", "int3:g128:sym:f32", "int3:row:sym:f16", "int5:g64:sym:f32"]
KERNEL_BITS = [
    "int4:g128:sym:f16",
    "int4:g64:sym:f32",
    "int4:row:sym:f16",
    "int8:g128:sym:f16",
    "int8:row:sym:f32",
]


def tiny_llama(tied=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=tied, initializer_range=0.06,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def export(model, scheme_of, directory):
    """Write the linears for which ``scheme_of(name)`` is a scheme, and give ``model`` the decoded weights."""
    tensors, plans = {}, []
    tied = model.config.tie_word_embeddings
    if tied and scheme_of("lm_head.weight"):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for seed, (name, weight) in enumerate(model.state_dict().items()):
        scheme, shape = scheme_of(name), tuple(weight.shape)
        if scheme is not None:
            plan = quantized_plan(ct, name, scheme, shape, -1)
            tensor = random_tensor(plan.scheme.weight, shape, seed)
            tensors |= ct.pack(name.removesuffix(".weight"), tensor)
            weight.copy_(dequantize_reference(tensor))
            plans.append(plan)
        elif name != "lm_head.weight" or not tied:
            tensors[name] = weight.clone()
            plans.append(unquantized_plan(name, shape))
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"dtype": "float32"}
    for name, content in ct.side_files(format_plan(ct, plans), config).items():
        (directory / name).write_bytes(content)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def linears(scheme):
    return lambda name: scheme if name.endswith("_proj.weight") else None


def assert_loads(model, directory, **options):
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        expected, found = model(IDS).logits, loaded(IDS).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "scheme", mark_others_thorough(LOWER_BITS + KERNEL_BITS, *LOWER_BITS[:3:2], *KERNEL_BITS[::4])
)
def test_symmetric_schemes_load(tmp_path, scheme):
    model = tiny_llama()
    export(model, linears(scheme), tmp_path)
    assert_loads(model, tmp_path)


def test_a_tied_model_loads(tmp_path):
    model = tiny_llama(tied=True)
    export(model, linears("int4:g128:sym:f16"), tmp_path)
    assert_loads(model, tmp_path)


@pytest.mark.parametrize(
    "scheme",
    ["int4:g128:asym:f32", thorough_case("int3:g64:asym:f32"), thorough_case("int8:row:asym:f32")],
)
def test_asymmetric_schemes_load_dequantized(tmp_path, scheme):
    """Packed zero points load in no other way with compressed-tensors 0.18 to 0.20.

    That path multiplies in the type of the scales, so only float32 scales can show that all numbers arrive.
    """
    model = tiny_llama()
    export(model, linears(scheme), tmp_path)
    assert_loads(model, tmp_path, quantization_config=CompressedTensorsConfig(dequantize=True))


def test_a_mixture_with_skipped_layers_loads(tmp_path):
    schemes = {
        "gate_proj": "int3:g64:sym:f32", "up_proj": "int3:g64:sym:f32", "down_proj": "int8:row:sym:f16",
        "o_proj": "int4:g128:sym:f16",
    }  # fmt: skip

    def scheme_of(name):
        kind = name.split(".")[-2]
        return None if name == "model.layers.1.self_attn.o_proj.weight" else schemes.get(kind)

    model = tiny_llama()
    export(model, scheme_of, tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert len(found["config_groups"]) == 3
    assert "model.layers.1.self_attn.o_proj" in found["ignore"]
    assert "model.layers.0.self_attn.o_proj" not in found["ignore"]
    assert_loads(model, tmp_path)


def test_a_quantized_head_of_a_tied_model_loads(tmp_path):
    model = tiny_llama(tied=True)
    export(model, lambda name: "int8:g128:sym:f16" if name == "lm_head.weight" else None, tmp_path)
    assert_loads(model, tmp_path)


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 64},
        {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 128},
        {"num_bits": 3, "symmetric": True, "strategy": "channel"},
    ],
    ids=["int4-g64-sym", "int4-g128-asym", "int3-channel-sym"],
)
def test_we_read_what_the_library_saves(tmp_path, weights):
    model = tiny_llama()
    scheme = {"targets": ["re:.*_proj$"], "weights": {"type": "int", **weights}}
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            half = 1 << (weights["num_bits"] - 1)
            noise = torch.rand(module.weight_scale.shape, generator=generator)
            module.weight_scale.data = 0.1 * (1 + noise) / half
            if not weights["symmetric"]:
                zeros = torch.randint(-half, half, noise.shape, generator=generator)
                module.weight_zero_point.data = zeros.to(torch.int8)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "m"
    )
    (tmp_path / "config.json").write_text("{}")
    compressor.update_config(str(tmp_path))
    compressor.decompress_model(model)

    written, stated = load_file(tmp_path / "m"), json.loads((tmp_path / "config.json").read_text())
    layouts = ct.find_layouts(stated, tensor_headers(written))
    assert len(layouts) == 14
    for layout in layouts:
        tensor = ct.unpack(layout, {name: written[name] for name in layout.tensor_names})
        expected = model.get_submodule(layout.module).weight
        torch.testing.assert_close(dequantize_reference(tensor), expected.data, rtol=1e-6, atol=0)
        assert layout.scheme.weight.bits == weights["num_bits"]
