"""Which engines load a result, as shown by `plan`, `export` and `verify --for`."""

from dataclasses import replace

import pytest

from quantforge import api
from quantforge.errors import RefusedError
from quantforge.formats import FORMATS, load_format
from quantforge.formats.engine_verdicts import ModelToLoad, engine_verdicts, layer_verdicts
from quantforge.notation import parse, parse_layer
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.scheme import LayerScheme
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests.runs import quantize

NAMES = ["transformers", "vllm", "sglang", "tensorrt-llm", "lmdeploy", "llama.cpp", "mlx"]


def verdicts_by_engine(key, *schemes, shape=(128, 256)):
    layers = [(LayerScheme(parse(scheme)), shape) for scheme in schemes]
    return {
        verdict.engine: verdict for verdict in layer_verdicts(load_format(key).INFO.engines, layers)
    }


def test_every_directory_format_has_a_verdict_of_every_engine():
    records = {key: load_format(key).INFO for key in FORMATS}
    for key, about in records.items():
        if not about.is_single_file:  # such are for engines of their own
            assert list(about.engines) == NAMES, key


@pytest.mark.parametrize(
    ("key", "scheme", "engines"),
    [
        ("compressed-tensors", "int4:g128:sym", "transformers vllm sglang lmdeploy"),
        ("compressed-tensors", "int4:g32:sym", "transformers vllm sglang lmdeploy"),
        ("bnb", "nf4:g64:sym", "transformers vllm sglang"),
        ("mlx", "int4:g64:min", "mlx"),
        ("compressed-tensors", "int4:row:sym", "transformers vllm sglang"),
        ("compressed-tensors", "int4:g128:asym", "vllm sglang"),
        ("compressed-tensors", "int8:row:sym", "transformers vllm sglang"),
        ("compressed-tensors", "int3:g128:sym", "transformers"),
        ("compressed-tensors", "int4:g16:sym", "transformers"),
        ("gptq", "int4:g128:sym", "transformers vllm sglang lmdeploy"),
        ("gptq", "int4:row:sym", "transformers vllm sglang"),
        ("gptq", "int8:g32:sym", "transformers vllm sglang"),
        ("gptq", "int4:g128:asym", "transformers"),
        ("gptq_v2", "int2:g64:sym", "transformers"),
        ("awq", "int4:g128:asym", "transformers vllm sglang lmdeploy mlx"),
        ("awq", "int4:g16:asym", "transformers"),
    ],
)
def test_engines_that_load_each_format_and_scheme(key, scheme, engines):
    verdicts = verdicts_by_engine(key, scheme)
    assert [name for name in NAMES if verdicts[name].loads] == engines.split()
    assert all(verdict.reason for verdict in verdicts.values() if not verdict.loads)


def test_one_unsupported_layer_is_refused_with_a_reason():
    verdict = verdicts_by_engine("compressed-tensors", "int4:g128:sym", "int3:g128:sym")["vllm"]
    assert not verdict.loads
    assert verdict.reason == "kernels for 4 and 8 bits only, not 3"


def test_positive_engine_verdicts_carry_caveats():
    assert "GPU" in verdicts_by_engine("gptq", "int8:g128:sym")["vllm"].reason
    assert "96x256" in verdicts_by_engine("gptq", "int4:g128:sym", shape=(96, 256))["vllm"].reason
    assert verdicts_by_engine("gptq", "int4:g128:sym")["vllm"].reason == ""
    assert "vllm-bnb-plugin" in verdicts_by_engine("bnb", "nf4:g64:sym")["vllm"].reason
    assert (
        "dequantize=True"
        in verdicts_by_engine("compressed-tensors", "int4:g128:asym")["transformers"].reason
    )
    assert (
        "0.18" in verdicts_by_engine("compressed-tensors", "int3:g128:sym")["transformers"].reason
    )


def test_plain_files_load_everywhere_but_in_llama_cpp():
    assert [name for name, verdict in verdicts_by_engine("plain").items() if not verdict.loads] == [
        "llama.cpp"
    ]


@pytest.mark.parametrize(
    ("key", "facts", "engine", "reason"),
    [
        ("compressed-tensors", {"transposed": True}, "transformers", "Conv1D"),
        ("compressed-tensors", {"transposed": True}, "vllm", ""),
        ("gptq", {"transposed": True}, "transformers", ""),
        (
            "compressed-tensors",
            {"quantized_embedding": True},
            "transformers",
            "quantized embedding",
        ),
        ("mlx", {"quantized_embedding": True}, "mlx", ""),
        ("bnb", {"module": "mlp.experts.3.up_proj"}, "transformers", "joins the matrices"),
        ("fp8", {"module": "mlp.experts.3.up_proj"}, "transformers", ""),
        ("bnb", {"module": "mlp.experts.3.up_proj"}, "vllm", ""),
        (
            "bnb",
            {"unquantized": ("mlp.experts.3.up_proj.weight",)},
            "vllm",
            "all experts for packed",
        ),
        ("awq", {"unquantized": ("mlp.experts.3.up_proj.weight",)}, "vllm", ""),
        ("gptq", {"model_types": ("", "falcon")}, "transformers", "falcon does not load"),
    ],
)
def test_engine_verdicts_depend_on_model_facts(key, facts, engine, reason):
    about = load_format(key).INFO
    facts = {"module": "mlp.up_proj", "model_types": ("llama",), **facts}
    layers = {facts.pop("module"): (parse_layer(about.example_schemes[0]), (128, 256))}
    verdict = next(
        v for v in engine_verdicts(about, ModelToLoad(layers, **facts)) if v.engine == engine
    )
    assert verdict.loads is not bool(reason)
    assert reason in verdict.reason


def expert_model(*schemes):
    """Return a model with one expert layer for each scheme."""
    layers = {
        f"mlp.experts.{index}.up_proj": (parse_layer(scheme), (128, 256))
        for index, scheme in enumerate(schemes)
    }
    return ModelToLoad(layers, ("mixtral",))


def vllm_verdict(key, model):
    return next(v for v in engine_verdicts(load_format(key).INFO, model) if v.engine == "vllm")


def test_vllm_needs_one_scheme_for_all_experts():
    alike, divided = (
        expert_model(*["int4:g128:sym"] * 2),
        expert_model("int4:g128:sym", "int8:g128:sym"),
    )
    assert vllm_verdict("compressed-tensors", alike).loads
    assert "packed alike" in vllm_verdict("compressed-tensors", divided).reason
    other = {"other.experts.0.up_proj": divided.layers["mlp.experts.1.up_proj"]}
    assert vllm_verdict(
        "compressed-tensors", replace(alike, layers={**alike.layers, **other})
    ).loads
    for unquantized, loads in (
        ("mlp.experts.2.up_proj.weight", False),
        ("mlp.experts.0.up_proj.bias", True),
        ("other.experts.0.up_proj.weight", True),
        ("mlp.gate.weight", True),
    ):
        assert vllm_verdict("gptq", replace(alike, unquantized=(unquantized,))).loads is loads


def test_the_vllm_bnb_plugin_has_no_8_bit_experts():
    assert "in 8 bits" in vllm_verdict("bnb", expert_model("int8:row:sym")).reason
    assert vllm_verdict("bnb", expert_model("nf4:g64:sym")).loads


def test_quantize_export_and_verify_agree_on_engines(tiny, tmp_path):
    none = CalibrationOptions(source="none")
    packed = Recipe(scheme="int4:g32:sym", scales="absmax", calibration=none)
    quantize(tiny("gpt2"), tmp_path / "gpt2", packed)
    api.export(
        str(tmp_path / "gpt2"), Recipe(format="compressed-tensors"), tmp_path / "ct", Settings()
    )
    for name in ("gpt2", "ct"):
        findings = verify(tmp_path / name, engine="transformers").findings
        assert [(item.check, "Conv1D" in item.detail) for item in findings] == [("engine", True)]
    file = tmp_path / "m.gguf"
    quantize(tiny("llama-wide"), file, Recipe(type="Q8_0", scales="absmax", calibration=none))
    recipe = Recipe(format="compressed-tensors", engine="transformers")
    with pytest.raises(RefusedError, match="quantized embedding"):
        api.export(str(file), recipe, tmp_path / "no", Settings())
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("unstacked", [True, False])
def test_plain_unstacked_experts_load_if_published_unstacked(unstacked: bool) -> None:
    unquantized_names = ("model.layers.0.feed_forward.experts.0.up_proj.weight",)
    model = ModelToLoad(
        {}, ("llama4_text",), unstacked_experts=unstacked, unquantized=unquantized_names
    )
    verdicts = {
        item.engine: item.loads for item in engine_verdicts(load_format("plain").INFO, model)
    }
    assert verdicts["transformers"] is not unstacked
