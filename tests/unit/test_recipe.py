"""Recipes round-trip through TOML, and errors name the nearest key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantforge.errors import InputError, UsageError
from quantforge.planning.recipe_options import build_recipe
from quantforge.recipe import (
    AwqOptions,
    CalibrationOptions,
    GptqOptions,
    Recipe,
    Rule,
    from_toml,
    read_recipe,
)

# TOML holds every scalar value but surrogates, and so must what is written.
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
RECIPES = st.builds(
    Recipe,
    method=TEXT,
    bits=st.none(),
    scheme=st.one_of(st.none(), TEXT),
    format=TEXT,
    scales=st.sampled_from(["absmax", "search"]),
    ignore=st.lists(TEXT, max_size=3).map(tuple),
    rules=st.lists(st.builds(Rule, TEXT, TEXT), max_size=3).map(tuple),
    lm_head=TEXT,
    max_shard_bytes=st.integers(1, 10**15),
    calibration=st.builds(
        CalibrationOptions,
        source=TEXT,
        samples=st.integers(1, 10**6),
        seed=st.integers(-(10**9), 10**9),
        chat_template=st.booleans(),
    ),
    gptq=st.builds(
        GptqOptions,
        damping=st.floats(1e-9, 0.99),
        shrinkage=st.none() | st.floats(0, 1),
        refine=st.integers(0, 9),
    ),
    awq=st.builds(AwqOptions, search_samples=st.integers(1, 99)),
)


@given(RECIPES)
def test_recipes_round_trip_through_toml(recipe):
    text = recipe.to_toml()
    assert from_toml(text) == recipe
    assert from_toml(text).to_toml() == text


def test_every_recipe_key_is_written():
    text = Recipe(bits=4, rules=(Rule("down_proj", "int8"),)).to_toml()
    for key in (
        "method",
        "bits",
        "scales",
        "[[rule]]",
        "[gptq]",
        "damping",
        "[awq]",
        "[calibration]",
        "micro_batch",
    ):
        assert key in text
    assert from_toml("") == Recipe()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('methd = "rtn"', "'methd'", "'method'"),
        ('[gptq]\nrefin = 1', "'refin'", "'refine'"),
        ('[calibration]\nsmaples = 1', "'smaples'", "'samples'"),
        ('[[rule]]\nmach = "x"\nscheme = "int4"', "'mach'", "'match'"),
        ('[[rule]]\nscheme = "int4"', "'match' is missing", "scheme"),
        ('[[rule]]\nmatch = "q_proj"', "'scheme' is missing", "match"),
        ("rules = []", "'rules'", "[[rule]]"),
        ("rle = []", "'rle'", "'rule'"),
        ("rule = 3", "list", "["),
        ("bits = 4.0", "int", "e.g. bits = 4"),
        ("bits = true", "int", "e.g. bits = 4"),
        ('bits = "4"', "int", "e.g. bits = 4"),
        ('ignore = "lm_head"', "list", "["),
        ("gptq = 3", "table", "[gptq]"),
        ('bits = 4\nscheme = "int4"', "both", "--scheme"),
        ('scales = "serach"', "serach", "'search'"),
        ("[gptq]\ndamping = 0", "damping", "0.01"),
        ("[gptq]\ndamping = nan", "damping", "0.01"),
        ("[gptq]\nshrinkage = 1.5", "too large", "to 1"),
        ("[gptq]\nshrinkage = nan", "shrinkage", "to 1"),
        ("[gptq]\nshrinkage = -0.1", "too small", "from 0"),
        ("[awq]\nsearch_samples = 0", "search_samples", "from 1"),
        ("[calibration]\nsamples = 0", "too small", "from 1"),
        (f"[calibration]\nseed = {2**63}", "too large", f"to {2**63 - 1}"),
        (f"[calibration]\nseed = {-(2**63) - 1}", "too small", f"from {-(2**63)}"),
        ("[gptq]\nrefine = 18446744073709551615", "too large", "to 1000"),
        ("bits = " + "9" * 5000, "not TOML", "recipes"),
        ("bits = ", "not TOML", "recipes"),
        ("bits = 17", "bits", "2 to 8"),
        ("[calibration]\nchat_template = True", "not TOML", "true, not True"),
        ("tune = -1", "mine.toml: tune = -1 is too small", "from 0"),
        ("effort = 'max'", "mine.toml: effort = 'max'", "high"),
    ],
)  # fmt: skip
def test_recipe_mistakes_name_the_key_and_a_fix(text, message, hint):
    with pytest.raises(InputError) as caught:
        from_toml(text, "mine.toml")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_an_integer_is_accepted_for_a_float():
    with pytest.raises(InputError, match="damping"):
        from_toml("[gptq]\ndamping = 1")


def test_unreadable_recipe_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"absent\.toml"):
        read_recipe(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read_recipe(tmp_path / "binary.toml")


@pytest.mark.parametrize("kind", ["k=int8,v=int4", "int8", "INT4"])
def test_unsupported_kv_cache_kinds_are_refused_with_a_reason(kind):
    with pytest.raises(InputError) as raised:
        Recipe(kv_cache=kind)
    assert "scales of fp8 alone" in raised.value.hint
    with pytest.raises(UsageError) as typed:
        build_recipe(None, kv_cache=kind)
    assert "scales of fp8 alone" in typed.value.hint


def test_a_misspelt_kv_cache_kind_gets_a_suggestion():
    with pytest.raises(InputError) as raised:
        Recipe(kv_cache="fp8_heads")
    assert "'fp8_head'" in raised.value.hint
