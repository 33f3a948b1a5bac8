"""Values of a configuration that no model computes with: refused before work that would not meet them.

Whoever runs the model sees its whole configuration, and transformers checks it when it is read. Rounding without data
runs nothing, and only reads sizes. What stands under the keys below is what every family means by them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quantforge.errors import InputError

FINAL_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Names of activations that transformers knows: the keys of `transformers.activations.ACT2FN`.
_KNOWN = re.compile(
    "gelu(_10|_accurate|_fast|_new|_python|_python_tanh|_pytorch_tanh)?|quick_gelu|relu[26]?|leaky_relu|prelu|silu"
    "|swish|hardswish|tanh|sigmoid|mish|laplace|linear|sqrtsoftplus|xielu"
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
    return value is None or _activation(
        value
    )  # null where another key names it, as of the first Gemma


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
    """Refuse values of a (text) configuration that nothing computes with; ``declared``: its family has declarations.

    Raises:
        InputError: naming the key.
    """
    rules = (*_RULES, *_OF_DECLARED) if declared else _RULES
    for key, value in config.items():
        for rule in rules:
            if rule.keys.fullmatch(key) and not rule.holds(value):
                raise InputError(f"config.json: {key} = {str(value)[:40]!r}", rule.wanted)
