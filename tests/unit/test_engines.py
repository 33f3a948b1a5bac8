"""Defaults and refusals of target engines."""

from __future__ import annotations

import re

import pytest

from quantforge.engines import TARGETS, check_engine, with_engine_defaults
from quantforge.errors import RefusedError, UsageError
from quantforge.formats import load_format
from quantforge.formats.engine_verdicts import layer_verdicts
from quantforge.grids import ScaleType
from quantforge.notation import parse_layer
from quantforge.planning.recipe_options import build_recipe, builtin_recipes
from quantforge.plans import Action, Serving, TensorPlan
from quantforge.recipe import read_recipe
from quantforge.scheme import LayerScheme

MODULE_FORMATS = {"compressed-tensors", "gptq", "mlx", "awq"}
ALONE = Serving()


def planned_tensor(name: str, text: str, shape=(256, 512)) -> TensorPlan:
    layer = parse_layer(text)
    layer = LayerScheme(layer.weight.with_scale(ScaleType.BF16), layer.input)
    return TensorPlan(f"model.layers.0.{name}.weight", "BF16", shape, Action.QUANTIZE, "", layer)


@pytest.mark.parametrize(
    ("engine", "bits"),
    [(name, bits) for name, target in TARGETS.items() for bits in target.default_options],
)
def test_engine_defaults_load_in_their_engine(engine, bits):
    options = with_engine_defaults(engine, {"engine": engine, "bits": bits})
    assert "bits" not in options
    if options["format"] not in MODULE_FORMATS:
        assert options["type"].startswith(f"Q{bits}_")
        return
    tensor = planned_tensor("mlp.up_proj", options["scheme"])
    verdicts = layer_verdicts(
        load_format(options["format"]).INFO.engines, [(tensor.scheme, tensor.matrix)]
    )
    notes = check_engine(engine, ALONE, [tensor], verdicts, options["format"])
    assert notes[-1].startswith("serve it with: ")
    assert "OUT" in notes[-1]


def test_engine_defaults_equal_the_builtin_recipes():
    for name, path in builtin_recipes().items():
        recipe, named = read_recipe(path), re.fullmatch(r"(.+)-(\d)bit", name)
        if recipe.engine is None or named is None:
            continue
        default_recipe = build_recipe(None, engine=recipe.engine, bits=int(named[2]))
        if default_recipe.format == recipe.format:
            assert (default_recipe.type, default_recipe.scheme) == (recipe.type, recipe.scheme)


def test_unsupported_engine_bits_get_the_nearest_as_hint():
    with pytest.raises(UsageError, match="2, 3, 4, 5, 6 or 8 bits") as caught:
        build_recipe(None, engine="mlx", bits=7)
    assert caught.value.hint == "--bits 6"


def test_results_an_engine_does_not_load_are_refused():
    for engine, key, text in (
        ("llama.cpp", "compressed-tensors", "int4:g128:sym"),
        ("tensorrt-llm", "bnb", "nf4"),
        ("vllm", "gptq", "int4:g128:asym"),
        ("vllm", "compressed-tensors", "fp8:g64"),
        ("tensorrt-llm", "compressed-tensors", "FP8_STATIC"),
        ("tensorrt-llm", "compressed-tensors", "nvfp4"),
        ("tensorrt-llm", "compressed-tensors", "W8A8"),
        ("mlx", "gptq", "int4:g128:sym"),
        ("transformers", "mlx", "int4:g64:min"),
    ):
        tensor = planned_tensor("mlp.up_proj", text)
        verdicts = layer_verdicts(load_format(key).INFO.engines, [(tensor.scheme, tensor.matrix)])
        with pytest.raises(RefusedError, match=engine):
            check_engine(engine, ALONE, [tensor], verdicts, key)


def test_layers_must_be_divisible_among_devices():
    tensors = [
        planned_tensor("mlp.up_proj", "int4:g128:sym"),
        planned_tensor("mlp.down_proj", "int4:g128:sym"),
    ]
    assert check_engine("vllm", Serving(devices=4), tensors, (), "compressed-tensors")
    with pytest.raises(RefusedError, match=r"down_proj.*8 devices"):
        check_engine("vllm", Serving(devices=8), tensors, (), "compressed-tensors")
    with pytest.raises(RefusedError, match=r"up_proj.*4 devices"):
        check_engine(
            "sglang",
            Serving(devices=4),
            [planned_tensor("mlp.up_proj", "fp8:128x128")],
            (),
            "compressed-tensors",
        )
    with pytest.raises(RefusedError, match="does not split"):
        check_engine("mlx", Serving(devices=2), tensors, (), "mlx")


def test_explicit_options_override_engine_defaults():
    recipe = build_recipe(None, engine="vllm", bits=8)
    assert (recipe.format, recipe.scheme, recipe.engine) == (
        "compressed-tensors",
        "FP8_DYNAMIC",
        "vllm",
    )
    assert build_recipe(None, engine="vllm", scheme="nvfp4").scheme == "nvfp4"
    assert build_recipe(None, engine="llama.cpp").type == "Q4_K_M"
    assert any("not run" in line for line in check_engine("lmdeploy", ALONE, [], (), "awq"))
    with pytest.raises(UsageError, match="unknown engine"):
        with_engine_defaults("vlm", {})
    with pytest.raises(UsageError, match="4 or 8 bits"):
        with_engine_defaults("vllm", {"bits": 3})
