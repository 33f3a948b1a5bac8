"""``config.json`` of each format: source keys, dtype and the declared quantization."""

import json
import re

import pytest

from quantforge import __version__
from quantforge.errors import RefusedError
from quantforge.formats import load_format
from tests.quantized import format_plan, quantized_plan, unquantized_plan
from tests.thorough import parametrize_each_value

SOURCE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ATTENTION = "model.layers.{}.self_attn.o_proj.weight"
MLP = "model.layers.{}.mlp.down_proj.weight"


def planned_tensors(format_key, schemes, head="lm_head.weight"):
    """Return plans of two blocks with two linears each; a scheme of None keeps the linear."""
    names = [(name.format(block), block) for block in (0, 1) for name in (ATTENTION, MLP)]
    tensors = [unquantized_plan("model.embed_tokens.weight", (64, 128))]
    for (name, block), scheme in zip(names, schemes, strict=True):
        tensors.append(
            unquantized_plan(name, (128, 128), block)
            if scheme is None
            else quantized_plan(format_key, name, scheme, (128, 128), block)
        )
    tensors += [unquantized_plan("model.norm.weight", (128,))]
    return tensors + ([unquantized_plan(head, (64, 128))] if head else [])


def written_files(key, schemes, source=SOURCE, head="lm_head.weight"):
    layout_format = load_format(key)
    files = layout_format.side_files(
        format_plan(layout_format, planned_tensors(layout_format, schemes, head)), source
    )
    return {name: json.loads(data) for name, data in files.items()}


def written_declaration(key, schemes, **options):
    return written_files(key, schemes, **options)["config.json"]["quantization_config"]


def test_plain_config_states_dtype_and_no_quantization():
    source = SOURCE | {"quantization_config": {"quant_method": "gptq"}}
    files = written_files("plain", [None] * 4, source)
    assert files == {"config.json": {**SOURCE, "torch_dtype": "bfloat16", "dtype": "bfloat16"}}
    assert list(files["config.json"])[: len(SOURCE)] == list(SOURCE)


def test_a_single_scheme_targets_linear():
    config = written_files("compressed-tensors", ["int4:g32:sym"] * 4)["config.json"]
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                },
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }  # fmt: skip


def test_several_schemes_target_names_and_ignore_kept_layers():
    declaration = written_declaration(
        "compressed-tensors", ["int4:g32:sym", "int8:row:asym", None, "int8:row:asym"]
    )
    groups = declaration["config_groups"]
    assert [group["targets"] for group in groups.values()] == [
        ["model.layers.0.self_attn.o_proj"],
        ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
    ]
    assert groups["group_1"]["weights"] == {
        "num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel",
    }  # fmt: skip
    assert declaration["ignore"] == ["lm_head", "model.layers.1.self_attn.o_proj"]


@pytest.mark.parametrize("key", ["compressed-tensors", "awq"])
def test_a_tied_head_is_listed_as_unquantized(key):
    declaration = written_declaration(key, ["int4:g32:sym", None] * 2, head=None)
    listed = declaration["ignore" if key == "compressed-tensors" else "modules_to_not_convert"]
    assert listed == ["lm_head", *(f"model.layers.{block}.mlp.down_proj" for block in (0, 1))]


def test_a_quantized_head_unties_the_model():
    source = SOURCE | {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}
    schemes = ["int4:g32:sym"] * 4
    config = written_files("compressed-tensors", schemes, source)["config.json"]
    assert config["tie_word_embeddings"] is True
    layout_format = load_format("compressed-tensors")
    head = quantized_plan(layout_format, "lm_head.weight", "int8:g32:sym", (64, 128), -1)
    plan = format_plan(layout_format, [*planned_tensors(layout_format, schemes, None), head])
    config = json.loads(layout_format.side_files(plan, source)["config.json"])
    assert config["tie_word_embeddings"] is False
    assert config["text_config"]["tie_word_embeddings"] is False
    assert config["quantization_config"]["ignore"] == []


def test_a_quantized_head_is_targeted_by_name():
    """SGLang treats a head targeted only by its class as unquantized."""
    layout_format = load_format("compressed-tensors")
    head = quantized_plan(layout_format, "lm_head.weight", "int4:g32:sym", (64, 128), -1)
    plan = format_plan(
        layout_format, [*planned_tensors(layout_format, ["int4:g32:sym"] * 4, None), head]
    )
    config = json.loads(layout_format.side_files(plan, SOURCE)["config.json"])
    groups = config["quantization_config"]["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear", "lm_head"]]


def gptq(checkpoint_format="gptq", **more):
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": checkpoint_format,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"quantforge:{__version__}"]},
    } | more


@pytest.mark.parametrize("key", ["gptq", "gptq_v2"])
def test_gptq_writes_its_config_to_both_files(key):
    files = written_files(key, ["int4:g32:sym"] * 4)
    assert files["quantize_config.json"] == gptq(key)
    config = files["config.json"]
    assert config["quantization_config"] == gptq(key)
    assert (config["dtype"], config["torch_dtype"]) == ("float16", "float16")


def test_gptq_states_rows_and_zero_points():
    assert written_declaration("gptq", ["int8:row:asym", "int8:tensor:sym"] * 2) == gptq(
        bits=8, group_size=-1, sym=False
    )


def test_gptq_lists_skipped_layers_in_both_keys():
    declaration = written_declaration("gptq", ["int4:g32:sym", None] * 2)
    assert declaration["modules_in_block_to_quantize"] == [["self_attn.o_proj"]]
    for block in (0, 1):
        name = f"model.layers.{block}.mlp.down_proj"
        hits = [rule for rule in declaration["dynamic"] if re.match(rule.removeprefix("-:"), name)]
        assert len(hits) == 1
        assert hits[0].startswith("-:")
        assert re.match(hits[0][2:], f"transformer.{name}")
    for other in ("model.layers.10.mlp.down_proj", "xmodel.layers.0.mlp.down_proj"):
        assert not any(re.match(rule[2:], other) for rule in declaration["dynamic"])


def test_gptq_uses_full_names_when_blocks_differ():
    declaration = written_declaration(
        "gptq", ["int4:g32:sym", "int4:g32:sym", None, "int4:g32:sym"]
    )
    assert declaration["modules_in_block_to_quantize"] == [
        [
            "model.layers.0.self_attn.o_proj",
            "model.layers.0.mlp.down_proj",
            "model.layers.1.mlp.down_proj",
        ]
    ]
    assert list(declaration["dynamic"]) == [r"-:(.*\.)?model\.layers\.1\.self_attn\.o_proj$"]


def test_awq_lists_kept_modules_besides_the_head():
    plain = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    assert written_declaration("awq", ["int4:g32:asym"] * 4) == plain
    assert written_declaration("awq", ["int4:g32:sym"] * 4) == plain | {"zero_point": False}
    unquantized = ["lm_head", "model.layers.0.self_attn.o_proj"]
    assert written_declaration("awq", [None, *["int4:g32:asym"] * 3]) == plain | {
        "modules_to_not_convert": unquantized
    }


@pytest.mark.parametrize("key", ["gptq", "awq"])
@pytest.mark.parametrize("stacked", [True, False])
def test_unquantized_mixtures_are_listed_by_module(key, stacked):
    """vLLM looks up ``experts``: as a substring in AWQ, with ``re.match`` in GPTQ."""
    layout_format, mixture = load_format(key), "model.layers.{}.mlp.experts".format
    names = ["down_proj"] if stacked else ["0.down_proj.weight", "1.down_proj.weight"]
    shape = (2, 128, 128) if stacked else (128, 128)
    tensors = [
        quantized_plan(layout_format, ATTENTION.format(0), "int4:g32:sym", (128, 128), 0),
        *(unquantized_plan(f"{mixture(0)}.{name}", shape, 0) for name in names),
        quantized_plan(
            layout_format, f"{mixture(1)}.0.down_proj.weight", "int4:g32:sym", (128, 128), 1
        ),
        unquantized_plan(f"{mixture(1)}.1.down_proj.weight", (128, 128), 1),
        unquantized_plan("lm_head.weight", (64, 128)),
    ]
    files = layout_format.side_files(format_plan(layout_format, tensors), SOURCE)
    declaration = json.loads(files["config.json"])["quantization_config"]

    def left_out(module):
        if key == "awq":
            return any(name in module for name in declaration["modules_to_not_convert"])
        return any(re.match(rule.removeprefix("-:"), module) for rule in declaration["dynamic"])

    assert left_out(mixture(0))
    assert not left_out(mixture(1))
    assert not left_out(mixture(1) + ".0.down_proj")
    assert not left_out("model.layers.0.self_attn.o_proj")


@parametrize_each_value(
    (
        "key, list_key",
        [
            ("compressed-tensors", "ignore"),
            ("fp8", "modules_to_not_convert"),
            ("bnb", "llm_int8_skip_modules"),
        ],
    ),
    (
        "stacks, mixture",
        [
            (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), "mlp.experts"),
            (("moe.input_linear.weight", "moe.output_linear.weight"), "moe.experts"),
        ],
    ),
)
def test_unquantized_expert_stacks_are_listed_for_engines(key, list_key, stacks, mixture):
    """vLLM looks up ``experts``, and in compressed-tensors also parts of the first expert."""
    layout_format = load_format(key)
    scheme = {"compressed-tensors": "int4:g32:sym", "fp8": "fp8:128x128", "bnb": "nf4:g64"}[key]
    tensors = [
        quantized_plan(layout_format, ATTENTION.format(0), scheme, (128, 128), 0),
        *(unquantized_plan(f"model.layers.0.{name}", (4, 128, 128), 0) for name in stacks),
        unquantized_plan("model.layers.0.mixer.conv1d.weight", (4, 1, 3), 0),
        unquantized_plan("lm_head.weight", (64, 128)),
    ]
    files = layout_format.side_files(
        format_plan(layout_format, tensors), SOURCE | {"num_local_experts": 4}
    )
    named = json.loads(files["config.json"])["quantization_config"][list_key]
    parts = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    expert_parts = [f"{mixture}.0.{part}" for part in parts] if key == "compressed-tensors" else []
    expected = {f"model.layers.0.{name}" for name in (mixture, *expert_parts)}
    assert set(named) == {"lm_head"} | expected


@pytest.mark.parametrize("key", ["gptq", "gptq_v2", "awq"])
def test_gemma2_keeps_bfloat16_in_half_precision_formats(key):
    source = SOURCE | {"model_type": "gemma2"}
    config = written_files(key, ["int4:g32:sym"] * 4, source)["config.json"]
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_config_dtype_defaults_to_the_tensor_dtype():
    source = {key: value for key, value in SOURCE.items() if key != "torch_dtype"}
    for declared in ({}, {"dtype": "auto"}, {"dtype": "torch.bfloat16"}):
        config = written_files("compressed-tensors", ["int4:g32:sym"] * 4, source | declared)[
            "config.json"
        ]
        assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_text_config_states_the_same_dtype():
    source = {
        "model_type": "x",
        "text_config": {"dtype": "bfloat16", "vocab_size": 3},
        "dtype": "bfloat16",
    }
    config = written_files("awq", ["int4:g32:asym"] * 4, source)["config.json"]
    assert config["text_config"] == {"dtype": "float16", "vocab_size": 3}


@pytest.mark.parametrize("key", ["gptq", "awq"])
def test_formats_refuse_plans_without_quantized_layers(key):
    with pytest.raises(RefusedError, match="nothing is quantized"):
        written_files(key, [None] * 4)


def test_config_bytes_are_stable_utf8():
    layout_format = load_format("awq")
    plan = format_plan(layout_format, planned_tensors(layout_format, ["int4:g32:asym"] * 4))
    files = [layout_format.side_files(plan, {"name": "höhe"})["config.json"] for _ in range(2)]
    assert files[0] == files[1]
    assert files[0].startswith('{\n  "name": "höhe",\n'.encode())
    assert files[0].endswith(b"}\n")
