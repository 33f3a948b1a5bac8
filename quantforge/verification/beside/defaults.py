"""Default values that a family's configuration class in transformers fills into a configuration.

Only the source's own values reach the class, never the artifact's, except for the few numbers of its rotary embedding:
what a stranger wrote is compared with what comes out, and decides nothing. No code of a model is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from quantforge.verification.beside.trees import Path, at

# Keys that load code, hold weights, or make a class allocate by a number.
_KEPT_OUT = frozenset(
    {"auto_map", "trust_remote_code", "quantization_config", "quantization", "num_labels", "id2label", "label2id",
     "attn_implementation", "_attn_implementation_internal", "_commit_hash"}
)  # fmt: skip
# All spellings of the rotary embedding: the older ones are moved into the first when transformers loads.
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
        "rotary_pct", "rotary_emb_base", "original_max_position_embeddings")  # fmt: skip
_NEW, _OLD = "rope_parameters", ("rope_scaling", "rope_theta", "rope_local_base_freq")
_MOST_NUMBERS = 4096  # in a table of rotary factors


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with its family's defaults, as plain data; {} where transformers does not know it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils import logging

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return {}
    given = _without(deepcopy(dict(config)))
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        found = CONFIG_MAPPING[model_type].from_dict(given).to_dict()
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
            StrictDataclassError, TypeError, ValueError):  # fmt: skip
        return {}
    finally:
        logging.set_verbosity(level)
    plain = _plain(found)
    assert isinstance(plain, dict)
    return plain


def without(config: Mapping[str, Any], places: Iterable[Path]) -> dict[str, Any]:
    """Return a copy of a configuration without what is at some places."""
    left = deepcopy(dict(config))
    for path in places:
        inner = at(left, path[:-1])
        if isinstance(inner, dict):
            inner.pop(path[-1], None)
    return left


def same_rope(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the rotary embedding of ``own`` is that of the source ``other``, whichever spelling is read."""
    expected = _rope(other)
    if expected is None or not _small({key: own[key] for key in ROPE if key in own}):
        return False
    bare = {key: value for key, value in other.items() if key not in ROPE}
    bare["max_position_embeddings"] = own.get(
        "max_position_embeddings", bare.get("max_position_embeddings")
    )
    stated = {key: own[key] for key in ROPE if key in own}
    readings = [stated]
    if stated.get(_NEW) is not None and any(stated.get(key) is not None for key in _OLD):
        readings = [_read_new(stated), _read_old(stated)]
    return all(_rope({**bare, **reading}) == expected for reading in readings)


def _read_new(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader sees that does not know the older spellings."""
    return {key: value for key, value in stated.items() if key not in _OLD}


def _read_old(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader sees that takes an older spelling first, and the newer where there is none."""
    found = {key: value for key, value in stated.items() if key != _NEW}
    newer = stated[_NEW]
    if found.get("rope_scaling") is None and isinstance(newer, Mapping):
        found["rope_scaling"] = {key: value for key, value in newer.items() if key not in found}
    return found


def _rope(config: Mapping[str, Any]) -> object:
    """Return the rotary parameters of a configuration and what lies beside them; None where they cannot be known."""
    found = filled(config)
    if not found:
        return None
    return {key: _numbers(found[key]) for key in ROPE if found.get(key) is not None}


def _numbers(value: Any) -> Any:
    """Return integers as real numbers, and a ``type`` that equals ``rope_type`` under this later name alone."""
    if isinstance(value, Mapping):
        twice = value.get("type") == value.get("rope_type")
        return {key: _numbers(item) for key, item in value.items() if key != "type" or not twice}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _small(value: Any) -> bool:
    """Return whether there are few enough values, and none of them huge."""
    todo, count = [value], 0
    while todo:
        item = todo.pop()
        count += 1
        if count > _MOST_NUMBERS or (isinstance(item, int) and abs(item) >= 1 << 53):
            return False
        inner = item.values() if isinstance(item, Mapping) else item
        todo += inner if isinstance(item, Mapping | list) else ()
    return True


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in _KEPT_OUT}
    return [_without(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: keys are texts, tuples and sets are lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value
