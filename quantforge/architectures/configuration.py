"""What a configuration says beside sizes: how many tokens a model sees, whether its head is tied, what is refused.

Values that no model computes with are refused before work that would not meet them. Whoever runs the model sees its
whole configuration, and transformers checks it when it is read. Rounding without data runs nothing, and only reads
sizes. What stands under the keys below is what every family means by them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quantforge.architectures import architecture_of, text_config
from quantforge.errors import InputError

POSITIONS = ("max_position_embeddings", "n_positions")
SAME = "equal to the tied embedding"  # why a head that is stored a second time is left out
FINAL_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Names of activations that transformers knows: the keys of `transformers.activations.ACT2FN`.
_KNOWN = re.compile(
    "gelu(_10|_accurate|_fast|_new|_python|_python_tanh|_pytorch_tanh)?|quick_gelu|relu[26]?|leaky_relu|prelu|silu"
    "|swish|hardswish|tanh|sigmoid|mish|laplace|linear|sqrtsoftplus|xielu"
)


def positions_in(config: Mapping[str, Any]) -> int:
    """Return the maximum context length in tokens; 2^30 if the configuration sets none."""
    text = text_config(config)
    return min((text[key] for key in POSITIONS if text.get(key)), default=1 << 30)


def embedding_rows(config: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size of the embedding; None if neither the configuration nor the family sets one."""
    rows = text_config(config).get("vocab_size")
    if rows is None and (family := architecture_of(config)) is not None:
        rows = family.defaults.get("vocab_size")
    return rows if type(rows) is int else None


def tied(
    config: Mapping[str, Any], outer: Mapping[str, Any], defaults: Mapping[str, object]
) -> bool:
    """Return whether the output projection is tied to the embedding.

    The outer configuration says it, as transformers reads a model with further towers, else that of the text, else the
    family's default.

    Raises:
        InputError: ``tie_word_embeddings`` is neither true nor false.
    """
    for source in (outer, config, defaults):
        value = source.get("tie_word_embeddings")
        if value is not None:
            if not isinstance(value, bool):
                raise InputError(f"config.json: tie_word_embeddings = {value!r}", "true or false")
            return value
    return False


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with untied embeddings, at every level: families read the key in different places."""
    nested = config.get("text_config")
    inner = {"text_config": untied(nested)} if isinstance(nested, Mapping) else {}
    return {**config, **inner, "tie_word_embeddings": False}


def no_tie(embedding: str, head: str) -> InputError:
    """Return the error for a tied head that is stored separately and differs from the embedding."""
    return InputError(
        f"{head} differs from {embedding} although tie_word_embeddings is true",
        'a model with its own head says "tie_word_embeddings": false in config.json',
        tensor=head,
    )


class _Checked(NamedTuple):
    keys: re.Pattern[str]
    holds: Callable[[Any], bool]
    wanted: str


def _number(value: Any) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and math.isfinite(value)


def _above_zero(value: Any) -> bool:
    return value is None or (_number(value) and value > 0)


def _not_below_zero(value: Any) -> bool:
    return _number(value) and value >= 0


def _factor(value: Any) -> bool:
    return value is None or _number(value) or (isinstance(value, list) and all(map(_number, value)))


def _activation(value: Any) -> bool:
    return isinstance(value, str) and _KNOWN.fullmatch(value) is not None


def _other_activation(value: Any) -> bool:
    # null where another key names it, as of the first Gemma
    return value is None or _activation(value)


def _flag(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value in (0, 1))


def _mapping(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _checked(keys: str, holds: Callable[[Any], bool], wanted: str) -> _Checked:
    return _Checked(re.compile(keys), holds, wanted)


_RULES = (
    _checked("|".join((*FINAL_CAPS, "attn_logit_softcapping")), _above_zero, "null, or above 0"),
    _checked(".*_multipliers?|routed_scaling_factor|logits_scaling", _factor, "a number"),
    _checked("tie_word_embeddings|attention_bias|mlp_bias|norm_topk_prob", _flag, "true or false"),
    _checked("rope_parameters|rope_scaling", _mapping, "null, or an object"),
)
# Of families with declarations: the code of others may leave an epsilon out, or know other activations.
_OF_DECLARED = (
    _checked("rms_norm_eps|norm_eps|layer_norm_epsilon", _not_below_zero, "a number, at least 0"),
    _checked("(mlp_|mamba_)?hidden_act|activation_function", _activation, "a name, such as 'silu'"),
    _checked("hidden_activation", _other_activation, "a name, such as 'silu', or null"),
)


def check_values(config: Mapping[str, Any], *, declared: bool) -> None:
    """Refuse invalid values in a (text) configuration; ``declared``: its family has declarations.

    Raises:
        InputError: naming the key.
    """
    rules = (*_RULES, *_OF_DECLARED) if declared else _RULES
    for key, value in config.items():
        for rule in rules:
            if rule.keys.fullmatch(key) and not rule.holds(value):
                raise InputError(f"config.json: {key} = {str(value)[:40]!r}", rule.wanted)
