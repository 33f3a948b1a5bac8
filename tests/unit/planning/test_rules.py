"""Rule patterns: meaning, reach, and errors for patterns that match nothing."""

from __future__ import annotations

import pytest

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError
from quantforge.notation import parse
from quantforge.planning.scheme_rules import RecipeRules, matches
from quantforge.plans import StoredTensor
from quantforge.recipe import Recipe, Rule
from quantforge.scheme import LayerScheme
from tests.thorough import parametrize_each_value


def tensor(name: str, role: Role = Role.LINEAR, stored: str = "") -> MatchedTensor:
    return MatchedTensor(name, StoredTensor(stored or name, "BF16", (8, 8)), role)


LAYERS = [
    tensor("model.embed_tokens.weight", Role.EMBEDDING),
    tensor("lm_head.weight", Role.HEAD),
    *(tensor(f"model.layers.{i}.self_attn.{x}_proj.weight") for i in range(12) for x in "qkvo"),
    *(tensor(f"model.layers.{i}.mlp.down_proj.weight") for i in range(12)),
    tensor("model.layers.0.input_layernorm.weight", Role.NORM),
    tensor("vision.layers.0.fc1.weight", Role.FOREIGN),
]


def matching_names(pattern: str) -> set[str]:
    return {t.name.removesuffix(".weight") for t in LAYERS if matches(pattern, t)}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("lm_head", 1),
        ("lm_head.weight", 1),
        ("down_proj", 12),
        ("mlp.down_proj", 12),
        ("layers.1", 0),  # the end of a name at a dot, not the middle
        ("own_proj", 0),
        ("*.layers.1.*", 4 + 1),
        ("*.layers.1*.self_attn.?_proj", 3 * 4),
        ("re:model\\.layers\\.\\d\\.mlp\\.down_proj", 10),
        ("re:down_proj", 0),  # the whole name
        ("re:.*(q|k)_proj", 24),
    ],
)
def test_rule_patterns_match_names_suffixes_or_regexes(pattern, count):
    assert len(matching_names(pattern)) == count


@pytest.mark.parametrize(
    "pattern", [".{1000000000}", "a{2,99999}", "a{,30000000}", "(a{5}){5}", "(b{2}c)+"]
)
def test_huge_repetitions_are_refused_before_compiling(pattern, monkeypatch):
    monkeypatch.setattr("regex.compile", lambda _: pytest.fail("compiled"))
    with pytest.raises(InputError, match="repetition"):
        matches(f"re:{pattern}", tensor("model.layers.0.mlp.up_proj"))


def test_patterns_match_the_stored_name():
    stored = tensor("model.layers.0.mlp.up_proj.weight", stored="language_model.x.up_proj.weight")
    assert matches("language_model.x.up_proj", stored)
    assert matches("model.layers.0.mlp.up_proj", stored)


def chosen_scheme(layer: str, *, ignore: tuple[str, ...] = (), **rules: str) -> str | None:
    patterns = {key.replace("_any_", "*"): value for key, value in rules.items()}
    recipe = Recipe(ignore=ignore, rules=tuple(Rule(k, v) for k, v in patterns.items()))
    target = next(t for t in LAYERS if t.name == f"{layer}.weight")
    choice = RecipeRules(recipe, LAYERS).first_match(target)
    return None if choice is None else str(choice.scheme or "keep")


def test_the_first_rule_decides_and_ignores_come_first():
    layer = "model.layers.3.mlp.down_proj"
    assert chosen_scheme(layer, down_proj="int8", _any_proj="int3") == "int8:g128:sym"
    assert chosen_scheme(layer, _any_proj="int3", down_proj="int8") == "int3:g128:sym"
    assert chosen_scheme(layer, ignore=("*.3.*",), down_proj="int8") == "keep"
    assert chosen_scheme(layer, down_proj="keep") == "keep"
    assert chosen_scheme(layer, q_proj="int8") is None


def test_a_rule_for_the_blocks_does_not_reach_head_and_embedding():
    assert chosen_scheme("lm_head", _any_="int8") is None
    assert chosen_scheme("model.embed_tokens", _any_="int8") is None
    assert chosen_scheme("lm_head", lm_head="int8") == "int8:g128:sym"
    assert chosen_scheme("model.embed_tokens", _any_embed_any_="int8") == "int8:g128:sym"
    assert chosen_scheme("lm_head", ignore=("*",)) == "keep"


def test_a_rule_pattern_with_backtracking_is_refused():
    """There are millions of ways to split the name among the repetitions."""
    with pytest.raises(InputError, match="takes too long for"):
        matches(r"re:(.*)(.*)(.*)(.*)\4\3\2\1x", tensor("a" * 100 + "xb"))


@parametrize_each_value(
    (
        "pattern, near",
        [
            ("q_porj", "'q_proj'"),
            ("lm_haed", "'lm_head'"),
            ("re:.*dwn_proj", "down_proj"),
            ("", "known"),
            ("ffn_down", "here it is down_proj"),
            ("blk.*.attn_q.weight", "here it is q_proj"),
            ("blk.0.attn_q", "here it is model.layers.0.self_attn.q_proj"),
            ("output", "here it is lm_head"),
        ],
    ),
    ("as_rule", [False, True]),
)
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern, near, as_rule):
    rules = (Rule(pattern, "int8"),) if as_rule else ()
    with pytest.raises(InputError, match="matches no layer") as caught:
        RecipeRules(Recipe(ignore=() if as_rule else (pattern,), rules=rules), LAYERS)
    assert near in caught.value.hint


def test_unquantizable_layers_may_be_ignored_but_not_ruled():
    assert RecipeRules(Recipe(ignore=("vision.*",)), LAYERS).first_match(LAYERS[2]) is None
    with pytest.raises(InputError, match="matches no layer"):
        RecipeRules(Recipe(rules=(Rule("vision.*", "int8"),)), LAYERS)
    with pytest.raises(InputError, match="matches no layer"):
        RecipeRules(Recipe(rules=(Rule("input_layernorm", "int8"),)), LAYERS)


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+$", "re:(a*)*", "re:(x+){9}", "re:[", "re:(", "re:a{99999999999}"]
)
def test_invalid_rule_regexes_are_refused(pattern):
    with pytest.raises(InputError) as caught:
        RecipeRules(Recipe(ignore=(pattern,)), LAYERS)
    assert caught.value.hint


def test_rules_accept_aliases_and_refuse_unknown_schemes():
    with pytest.raises(InputError, match="int99"):
        RecipeRules(Recipe(rules=(Rule("q_proj", "int99"),)), LAYERS)
    assert (
        LayerScheme(parse("int8"))
        == RecipeRules(Recipe(rules=(Rule("q_proj", "W8A16"),)), LAYERS)
        .first_match(LAYERS[2])
        .scheme
    )
