"""Draft heads quantized by themselves: linears rounded with RTN, other tensors copied."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import quantforge
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.formats.sources.head_directory import open_draft_heads
from quantforge.plans import Action
from quantforge.runtime.load import load
from quantforge.runtime.speculation.eagle3 import Eagle3Layer
from tests.runs import quantize, recipe, run_command
from tests.unit.runtime.speculation.test_draft_heads import changed, write_eagle, write_medusa
from tests.unit.runtime.speculation.test_speculate import DEMO

LINEARS = {
    "eagle": {f"midlayer.self_attn.{name}_proj" for name in "qkvo"}
    | {f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")},
    "medusa": {f"{head}.{layer}.linear" for head in range(3) for layer in range(2)},
}


@pytest.fixture(scope="module")
def embedding():
    return load(DEMO).model.get_input_embeddings().weight


@pytest.fixture(scope="module")
def heads(tmp_path_factory, embedding):
    """Return a directory of each kind."""
    directory = tmp_path_factory.mktemp("heads")
    return {
        "eagle": write_eagle(directory / "eagle", *embedding.shape, width=128, mlp=256),
        "medusa": write_medusa(directory / "medusa", *embedding.shape),
    }


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("eagle", "int4:g64:sym"), ("eagle", "FP8_DYNAMIC"), ("medusa", "W8A8")],
)
def test_quantized_heads_draft_without_changing_the_text(heads, tmp_path, kind, scheme):
    out = tmp_path / "q"
    quantize(heads[kind], out, recipe(scheme=scheme))
    assert set(open_draft_heads(out).layouts) == LINEARS[kind]
    options = {"raw": True, "max_tokens": 16}
    plain = quantforge.generate(DEMO, "import os, json", **options)
    result = quantforge.generate(DEMO, "import os, json", draft=str(out), **options)
    assert result.tokens == plain.tokens
    assert result.speculation["guessed"] > 0


def test_quantized_head_computes_with_decoded_weights(heads, embedding, tmp_path):
    out = tmp_path / "q"
    quantize(heads["eagle"], out, recipe(scheme="int4:g64:sym", lm_head="int8:row:sym"))
    result = open_draft_heads(out)
    packed, plain = (
        Eagle3Layer(result, embedding, 4),
        Eagle3Layer(open_draft_heads(heads["eagle"]), embedding, 4),
    )
    for name, product in packed.linears.items():
        prefix = f"midlayer.{name}" if "proj" in name else name
        weight = result.read(_shape(heads["eagle"], f"{prefix}.weight"), f"{prefix}.weight")
        x = torch.randn(3, weight.shape[1])
        torch.testing.assert_close(product(x), x @ weight.float().T, rtol=2e-2, atol=2e-2)
        far = (plain.linears[name](x) - product(x)).abs().max()
        assert (far > 0) == (name != "fc")


def _shape(path, name):
    return tuple(load_file(path / "model.safetensors")[name].shape)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_tensors_other_than_linears_are_copied(heads, tmp_path, kind):
    source, out = heads[kind], tmp_path / "q"
    plan = quantforge.plan(source, recipe(bits=4))
    kept = {tensor.name for tensor in plan.tensors if tensor.action is Action.KEEP}
    quantize(source, out, recipe(bits=4))
    (file,) = source.glob("*.safetensors")
    before, after = load_file(file), load_file(out / "model.safetensors")
    assert {f"{name}.weight" for name in LINEARS[kind]} == before.keys() - kept
    for name in kept:
        assert torch.equal(after[name], before[name])
    config, source_config = (
        json.loads((path / "config.json").read_text()) for path in (out, source)
    )
    assert {key: config[key] for key in source_config} == source_config
    if kind == "eagle":
        ignored = config["quantization_config"]["ignore"]
        assert {"fc", "model.fc", "lm_head"} <= set(ignored)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_quantized_heads_are_inspected_and_verified(heads, tmp_path, kind, capsys):
    source, out = heads[kind], tmp_path / "q"
    quantize(source, out, recipe(bits=4))
    named = {"eagle": "eagle3", "medusa": "medusa"}[kind]
    assert quantforge.inspect(out).model_type == named
    for options in ({}, {"source": source}):
        report = quantforge.verify(out, **options)
        assert (report.model_type, report.findings) == (named, [])
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (out / "model.safetensors").write_bytes(data)
    assert quantforge.verify(out).findings
    again = run_command(capsys, "plan", out, "--bits", 4)
    assert (again.code, "already quantized" in again.err) == (3, True)


def test_export_of_heads_converts_or_refuses(heads, tmp_path):
    quantize(heads["eagle"], tmp_path / "q", recipe(bits=8))
    quantforge.export(tmp_path / "q", format="plain", out=tmp_path / "plain")
    assert open_draft_heads(tmp_path / "plain").layouts == {}
    with pytest.raises(RefusedError, match="nothing reads eagle3 heads"):
        quantforge.export(tmp_path / "q", format="gptq", out=tmp_path / "g")


def test_engine_support_of_heads_is_reported(heads):
    options = {"scheme": "int4:g64:sym"}
    result = quantforge.plan(heads["eagle"], recipe(**options))
    loads = {engine.engine: engine.loads for engine in result.engines}
    assert [engine for engine, there in loads.items() if there] == ["vllm"]
    mixed = quantforge.plan(heads["eagle"], recipe(**options, lm_head="int8:row:sym"))
    for plan in (mixed, quantforge.plan(heads["medusa"], recipe(**options))):
        assert not any(engine.loads for engine in plan.engines)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"method": "gptq"}, InputError, "alone read no text"),
        ({"method": "awq+gptq"}, InputError, "alone read no text"),
        ({"kv_cache": "fp8"}, InputError, "alone read no text"),
        ({"scheme": "int8:row:sym+int8:tensor:static", "bits": None}, InputError, "alone read no text"),
        ({"format": "gptq"}, RefusedError, "nothing reads eagle3 heads in this format"),
        ({"format": "gguf"}, RefusedError, "nothing reads eagle3 heads in this format"),
        ({"engine": "vllm"}, UsageError, "beside their model"),
    ],
)  # fmt: skip
def test_options_unsupported_for_heads_are_refused(heads, options, kind, says):
    with pytest.raises(kind, match=says) as raised:
        quantforge.plan(heads["eagle"], recipe(**{"bits": 4, "method": "rtn", **options}))
    assert ("--method rtn" in raised.value.hint) == ("method" in options)


def test_default_method_for_heads_is_rtn(heads):
    assert quantforge.plan(heads["eagle"], bits=4).method == "rtn"


def test_missing_head_tensor_is_named(heads, tmp_path):
    name = "midlayer.mlp.up_proj.weight"
    lacking = changed(heads["eagle"], tmp_path / "h", drop=[name])
    with pytest.raises(InputError, match=r"no tensor .*up_proj"):
        quantforge.plan(lacking, recipe(bits=4))


@pytest.mark.parametrize("verb", ["generate", "eval", "bench"])
def test_heads_are_refused_where_a_model_is_needed(heads, capsys, verb):
    ended = run_command(capsys, verb, heads["medusa"], *(["x"] if verb == "generate" else []))
    assert ended.code == RefusedError.exit_code
    assert "medusa heads, no model" in ended.err
    assert "--draft" in ended.err
    assert "loading" not in ended.err
