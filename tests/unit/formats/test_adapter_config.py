"""The configuration of a LoRA adapter: numbers per module, listed modules and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantforge.errors import InputError
from quantforge.formats.sources.adapter import (
    check_config,
    module_number,
    modules_saved_whole,
    target_modules,
)

FILE = Path("adapter_config.json")
MODULE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("value", [1, 16, 128, 0.5, 2**31 - 1, -8])
def test_valid_module_numbers_are_returned_unchanged(value: float) -> None:
    assert (
        module_number(FILE, {"lora_alpha": value}, "lora_alpha", "alpha_pattern", MODULE) == value
    )


@pytest.mark.parametrize("value", [0, -1, 2**31, True, "8", None, float("nan"), float("inf"), [8]])
def test_invalid_ranks_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"r = .* of model\.layers\.0") as refused:
        module_number(FILE, {"r": value}, "r", "rank_pattern", MODULE)
    assert "the number of rows of lora_A" in refused.value.hint


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"q_proj": 4}, 4),
        ({"self_attn.q_proj": 4}, 4),
        ({MODULE: 4}, 4),
        ({r"layers\.[01]\..*": 4}, 4),
        ({"k_proj": 5, "q_proj": 4, ".*": 6}, 4),  # the first that fits
        ({"proj": 4}, 8),  # no end at a dot
        ({"q": 4}, 8),
        ({"self_attn": 4}, 8),
        (None, 8),
        ({}, 8),
    ],
)
def test_rank_patterns_match_whole_names_or_suffixes(table: Any, expected: int) -> None:
    assert (
        module_number(FILE, {"r": 8, "rank_pattern": table}, "r", "rank_pattern", MODULE)
        == expected
    )


def test_a_rank_pattern_that_is_no_table_is_refused() -> None:
    with pytest.raises(InputError, match="rank_pattern is no table"):
        module_number(FILE, {"r": 8, "rank_pattern": [4]}, "r", "rank_pattern", MODULE)


def test_saved_and_target_modules_are_read_from_the_config() -> None:
    assert modules_saved_whole({"modules_to_save": ["lm_head", "norm", "lm_head"]}) == (
        "lm_head",
        "norm",
    )
    assert modules_saved_whole({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}) == ()
    assert modules_saved_whole({"modules_to_save": ["lm_head"], "ensure_weight_tying": False}) == (
        "lm_head",
    )
    assert modules_saved_whole({}) == modules_saved_whole({"modules_to_save": None}) == ()
    options = {"target_modules": ["q_proj", "v_proj"]}
    assert target_modules(options) == ("q_proj", "v_proj")
    assert target_modules(
        {**options, "layers_to_transform": None, "exclude_modules": None}
    ) == target_modules(options)
    assert target_modules({**options, "layers_to_transform": [0]}) == ()
    assert target_modules({**options, "layers_to_transform": 0}) == ()
    assert target_modules({**options, "exclude_modules": ["v_proj"]}) == ()
    assert target_modules({"target_modules": "all-linear"}) == target_modules({}) == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_qalora": True}, "use_qalora = True"),
        ({"init_lora_weights": "OLoRA"}, "has changed the weights of the model"),
        ({"use_dora": "no"}, "another type"),
        ({"modules_to_save": "lm_head"}, "another type"),
        ({"modules_to_save": 5}, "another type"),
        ({"target_modules": {"q": 1}}, "another type"),
        ({"modules_to_save": ["x"] * 1001}, "more than 1000 entries"),
    ],
)
def test_unsupported_adapter_settings_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_config(FILE, {"peft_type": "LORA", **values})


def test_harmless_adapter_settings_are_accepted() -> None:
    check_config(FILE, {"peft_type": "LORA"})
    check_config(FILE, {
        "peft_type": "LORA", "use_qalora": False, "trainable_token_indices": None, "init_lora_weights": "gaussian",
        "use_rslora": None, "modules_to_save": ["x"] * 1000, "target_modules": "all-linear", "lora_dropout": 0.1,
    })  # fmt: skip
