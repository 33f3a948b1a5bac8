"""Invalid configuration values are refused before weights are quantized without data."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.activations import ACT2FN

from quantforge.architectures import architecture_of, text_config
from quantforge.architectures.configuration import check_values
from quantforge.errors import InputError
from scripts.tiny_families import configuration, families


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", None),
        ("hidden_act", ["silu"]),
        ("hidden_act", "silly"),
        ("mlp_hidden_act", 0),
        ("hidden_activation", "x"),
        ("rms_norm_eps", None),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", -1e-5),
        ("norm_eps", float("nan")),
        ("layer_norm_epsilon", True),
        ("rope_parameters", "x"),
        ("rope_scaling", 8.0),
        ("residual_multiplier", "x"),
        ("ssm_multipliers", [1.0, "x"]),
        ("logits_scaling", {}),
        ("routed_scaling_factor", float("inf")),
        ("tie_word_embeddings", "false"),
        ("attention_bias", 2),
        ("logits_soft_cap", 0),
    ],
    ids=str,
)
def test_invalid_configuration_values_are_refused(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{key} = "):
        check_values({key: value}, declared=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 0),
        ("rms_norm_eps", 1e-5),
        ("layer_norm_eps", None),
        ("hidden_activation", None),  # of the first Gemma, beside hidden_act
        ("rope_scaling", None),
        ("rope_parameters", {"rope_theta": 1e4}),
        ("mlp_multipliers", [1.0, 0.5]),
        ("routed_scaling_factor", None),
        ("attention_bias", None),
        ("norm_topk_prob", True),
        ("hidden_dropout", "x"),  # of training
        *(("hidden_act", name) for name in sorted(ACT2FN)),
    ],
    ids=str,
)
def test_valid_configuration_values_are_accepted(key: str, value: Any) -> None:
    check_values({key: value}, declared=True)


def test_undeclared_models_may_use_unknown_activations_and_no_epsilon() -> None:
    check_values({"hidden_act": "silly", "rms_norm_eps": None}, declared=False)
    with pytest.raises(InputError, match="rope_scaling"):
        check_values({"rope_scaling": "x"}, declared=False)


def test_default_configurations_of_all_families_are_accepted() -> None:
    for family in families():
        config = configuration(family).to_dict()
        check_values(text_config(config), declared=architecture_of(config) is not None)
