"""Read and check general configuration values: context length, tied embeddings, multipliers, activations.

Values that no model computes with are refused before any work, even if that work would not use them. Running a model
reads its whole configuration, and transformers checks it; rounding without data runs nothing and only reads sizes. The
keys below mean the same in every family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quantforge.architectures import architecture_of, text_config
from quantforge.errors import InputError

POSITION_KEYS = ("max_position_embeddings", "n_positions")
# Why a head that is stored a second time is left out
TIED_HEAD_REASON = "equal to the tied embedding"
FINAL_SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Names of activations that transformers knows: the keys of `transformers.activations.ACT2FN`.
_ACTIVATION_NAMES = re.compile(
    "gelu(_10|_accurate|_fast|_new|_python|_python_tanh|_pytorch_tanh)?|quick_gelu|relu[26]?|leaky_relu|prelu|silu"
    "|swish|hardswish|tanh|sigmoid|mish|laplace|linear|sqrtsoftplus|xielu"
)


def max_positions(config: Mapping[str, Any]) -> int:
    """Return the maximum context length in tokens; 2^30 if the configuration sets none."""
    text = text_config(config)
    return min((text[key] for key in POSITION_KEYS if text.get(key)), default=1 << 30)


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size of the embedding; None if neither the configuration nor the family sets one."""
    rows = text_config(config).get("vocab_size")
    if rows is None and (family := architecture_of(config)) is not None:
        rows = family.defaults.get("vocab_size")
    return rows if type(rows) is int else None


def is_head_tied(
    config: Mapping[str, Any], outer: Mapping[str, Any], defaults: Mapping[str, object]
) -> bool:
    """Return whether the output projection is tied to the embedding.

    Args:
        config: configuration of the text decoder.
        outer: the whole configuration, which decides first, as in transformers.
        defaults: the family's defaults.

    Raises:
        InputError: ``tie_word_embeddings`` is neither true nor false.
    """
    for source in (outer, config, defaults):
        value = source.get("tie_word_embeddings")
        if value is not None:
            if not isinstance(value, bool):
                raise InputError(
                    f"tie_word_embeddings = {value!r}", "true or false", subject="config.json"
                )
            return value
    return False


def untie_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with untied embeddings at every level, since families read the key at different ones."""
    nested = config.get("text_config")
    inner = {"text_config": untie_config(nested)} if isinstance(nested, Mapping) else {}
    return {**config, **inner, "tie_word_embeddings": False}


def tied_head_mismatch(embedding: str, head: str) -> InputError:
    """Return the error for a tied head that is stored separately and differs from the embedding."""
    return InputError(
        f"{head} differs from {embedding} although tie_word_embeddings is true",
        'a model with its own head says "tie_word_embeddings": false in config.json',
        tensor=head,
    )


class _ValueRule(NamedTuple):
    keys: re.Pattern[str]
    is_valid: Callable[[Any], bool]
    expected: str


def _is_finite_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _is_null_or_positive(value: Any) -> bool:
    return value is None or (_is_finite_number(value) and value > 0)


def _is_nonnegative(value: Any) -> bool:
    return _is_finite_number(value) and value >= 0


def _is_multiplier(value: Any) -> bool:
    return (
        value is None
        or _is_finite_number(value)
        or (isinstance(value, list) and all(map(_is_finite_number, value)))
    )


def _is_activation(value: Any) -> bool:
    return isinstance(value, str) and _ACTIVATION_NAMES.fullmatch(value) is not None


def _is_null_or_activation(value: Any) -> bool:
    # null where another key names it, as of the first Gemma
    return value is None or _is_activation(value)


def _is_flag(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value in (0, 1))


def _is_null_or_mapping(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _rule(keys: str, is_valid: Callable[[Any], bool], expected: str) -> _ValueRule:
    return _ValueRule(re.compile(keys), is_valid, expected)


_COMMON_RULES = (
    _rule(
        "|".join((*FINAL_SOFTCAP_KEYS, "attn_logit_softcapping")),
        _is_null_or_positive,
        "null, or above 0",
    ),
    _rule(".*_multipliers?|routed_scaling_factor|logits_scaling", _is_multiplier, "a number"),
    _rule("tie_word_embeddings|attention_bias|mlp_bias|norm_topk_prob", _is_flag, "true or false"),
    _rule("rope_parameters|rope_scaling", _is_null_or_mapping, "null, or an object"),
)
# Of families with declarations: the code of others may leave an epsilon out, or know other activations.
_DECLARED_FAMILY_RULES = (
    _rule("rms_norm_eps|norm_eps|layer_norm_epsilon", _is_nonnegative, "a number, at least 0"),
    _rule("(mlp_|mamba_)?hidden_act|activation_function", _is_activation, "a name, such as 'silu'"),
    _rule("hidden_activation", _is_null_or_activation, "a name, such as 'silu', or null"),
)


def check_values(config: Mapping[str, Any], *, declared: bool) -> None:
    """Refuse invalid values in a (text) configuration.

    Args:
        config: the configuration.
        declared: whether its family has declarations, for which more keys are checked.

    Raises:
        InputError: naming the key.
    """
    rules = (*_COMMON_RULES, *_DECLARED_FAMILY_RULES) if declared else _COMMON_RULES
    for key, value in config.items():
        for rule in rules:
            if rule.keys.fullmatch(key) and not rule.is_valid(value):
                raise InputError(
                    f"{key} = {str(value)[:40]!r}", rule.expected, subject="config.json"
                )
