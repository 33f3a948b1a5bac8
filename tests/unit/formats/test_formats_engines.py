"""The table of engines, as a user reads it in ``plan``."""

import pytest

from quantforge.formats import FORMATS, format_of
from quantforge.formats.engines import ENGINES
from quantforge.scheme import LayerScheme, parse

NAMES = ["transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx"]


def loading(key, *schemes, shape=(128, 256)):
    layers = [(LayerScheme(parse(scheme)), shape) for scheme in schemes]
    return {verdict.engine: verdict for verdict in format_of(key).engines(layers)}


def test_every_format_has_a_verdict_of_every_engine():
    assert set(ENGINES) == set(FORMATS) - {"gguf"}  # which judges whole files
    for key in ENGINES:
        assert [verdict.engine for verdict in format_of(key).engines([])] == NAMES


@pytest.mark.parametrize(
    ("key", "scheme", "engines"),
    [
        ("compressed-tensors", "int4:g128:sym", "transformers vllm sglang"),
        ("compressed-tensors", "int4:g32:sym", "transformers vllm sglang"),
        ("bnb", "nf4:g64:sym", "transformers vllm sglang"),
        ("mlx", "int4:g64:min", "mlx"),
        ("compressed-tensors", "int4:row:sym", "transformers vllm sglang"),
        ("compressed-tensors", "int4:g128:asym", "vllm sglang"),
        ("compressed-tensors", "int8:row:sym", "transformers vllm sglang"),
        ("compressed-tensors", "int3:g128:sym", "transformers"),
        ("compressed-tensors", "int4:g16:sym", "transformers"),
        ("gptq", "int4:g128:sym", "transformers vllm sglang"),
        ("gptq", "int4:row:sym", "transformers vllm sglang"),
        ("gptq", "int8:g32:sym", "transformers vllm sglang"),
        ("gptq", "int4:g128:asym", "transformers"),
        ("gptq_v2", "int2:g64:sym", "transformers"),
        ("awq", "int4:g128:asym", "transformers vllm sglang mlx"),
        ("awq", "int4:g16:asym", "transformers"),
    ],
)
def test_who_loads_what(key, scheme, engines):
    verdicts = loading(key, scheme)
    assert [name for name in NAMES if verdicts[name].loads] == engines.split()
    assert all(verdict.reason for verdict in verdicts.values() if not verdict.loads)


def test_one_layer_in_the_way_is_enough_and_is_explained():
    verdict = loading("compressed-tensors", "int4:g128:sym", "int3:g128:sym")["vllm"]
    assert not verdict.loads
    assert verdict.reason == "kernels for 4 and 8 bits only, not 3"


def test_what_is_good_to_know_comes_with_a_yes():
    assert "GPU" in loading("gptq", "int8:g128:sym")["vllm"].reason
    assert "96x256" in loading("gptq", "int4:g128:sym", shape=(96, 256))["vllm"].reason
    assert loading("gptq", "int4:g128:sym")["vllm"].reason == ""
    assert "vllm-bnb-plugin" in loading("bnb", "nf4:g64:sym")["vllm"].reason
    assert (
        "dequantize=True" in loading("compressed-tensors", "int4:g128:asym")["transformers"].reason
    )
    assert "0.18" in loading("compressed-tensors", "int3:g128:sym")["transformers"].reason


def test_plain_files_load_everywhere_but_in_llama_cpp():
    assert [name for name, verdict in loading("plain").items() if not verdict.loads] == [
        "llama.cpp"
    ]
