"""The order of ignores, rules, options and defaults is the same in every format."""

from __future__ import annotations

import pytest

from quantforge import api
from quantforge.plans import Action
from quantforge.recipe import CalibrationOptions, Recipe, Rule
from tests.conftest import Tiny

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
DOWN, KEY, QUERY = "layers.1.mlp.down_proj", "layers.1.self_attn.k_proj", "layers.1.self_attn.q_proj"  # fmt: skip
SCHEMES_BY_FORMAT = {
    "compressed-tensors": ("int8:g32:sym", "int4:g32:sym"),
    "mlx": ("int8:g64:min", "int4:g64:min"),
    "gguf": ("q8_0", "q5_0"),
}


@pytest.mark.parametrize("format_key", SCHEMES_BY_FORMAT)
def test_ignores_precede_rules_options_and_defaults(tiny: Tiny, format_key: str) -> None:
    first, second = SCHEMES_BY_FORMAT[format_key]

    def planned_scheme(layer: str, **values: object) -> str:
        recipe = Recipe(
            format=format_key, bits=4, calibration=CalibrationOptions(source="none"), **values
        )
        tensors = api.plan(str(tiny("llama-wide")), recipe).tensors
        tensor = next(t for t in tensors if t.name.endswith(f"{layer}.weight"))
        return ":".join(str(tensor.scheme).split(":")[:3]) if tensor.scheme else tensor.action.value

    both = (Rule("down_proj", first), Rule("*_proj", second))
    assert planned_scheme(DOWN, rules=both) == first
    assert planned_scheme(DOWN, rules=both[::-1]) == second
    assert planned_scheme(DOWN, rules=both, ignore=("down_proj",)) == Action.KEEP
    default = planned_scheme(DOWN)
    assert default not in {first, Action.KEEP}
    assert planned_scheme(DOWN, lm_head=first, embedding=first) == default
    for option, layer in (("lm_head", HEAD), ("embedding", EMBEDDING)):
        assert planned_scheme(layer, **{option: first}) == first
        assert planned_scheme(layer, **{option: first}, rules=(Rule(layer, second),)) == second
        assert planned_scheme(layer, **{option: first}, ignore=(layer,)) == Action.KEEP
        assert planned_scheme(layer, rules=(Rule("*", first),)) == planned_scheme(layer)
    tied = planned_scheme(QUERY, rules=(Rule(KEY, first),))
    assert tied == (
        planned_scheme(QUERY) if format_key == "gguf" else first
    )  # llama.cpp joins no matrices
