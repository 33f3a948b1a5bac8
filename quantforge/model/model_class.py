"""Class of transformers that a configuration names: a decoder of text, or a model with further towers.

The class of the configuration comes from transformers' own table by ``model_type``. A ``model_type`` that is unknown
there belongs to a model with code of its own, which never runs; where its ``architectures`` name a class that
transformers has, it is that family. Keys that make a loader run or fetch code (``auto_map``, everything private) never
reach it; nothing here touches the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantforge.architectures import architecture_of, text_config
from quantforge.errors import InputError
from quantforge.events import Event
from quantforge_files.strict_json import INFINITE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_STRIPPED = frozenset(
    {
        "auto_map",
        "trust_remote_code",
        "quantization_config",
        "attn_implementation",
        "dtype",
        "torch_dtype",
    }
)
_TEXT = "MODEL_FOR_CAUSAL_LM_MAPPING"
_WHOLE = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")


def known_type(config: Mapping[str, Any]) -> tuple[str, Event | None]:
    """Return the ``model_type`` that transformers knows, and an event if the configuration has another one.

    Raises:
        InputError: neither the type nor a class in ``architectures`` is known.
    """
    stated = config.get("model_type")
    if isinstance(stated, str) and stated in CONFIG_MAPPING:
        return stated, None
    named = config.get("architectures") if isinstance(stated, str) else ()
    for table in (_TEXT, *_WHOLE):
        for model_type, classes in getattr(modeling_auto, f"{table}_NAMES").items():
            found = {classes} if isinstance(classes, str) else set(classes)
            if isinstance(named, list) and found & set(filter(_is_text, named)):
                return model_type, Event(
                    "model-type",
                    str(stated),
                    f"unknown to transformers, computed as {model_type}, as architectures say",
                )
    raise InputError(
        f"config.json: model_type {stated!r} is unknown to transformers",
        "remote code is never executed",
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def class_of(
    config: Mapping[str, Any], *, whole: bool = False
) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the parsed configuration and the class of a ``config.json``: that of its decoder, or of the whole model.

    A family with declarations is its decoder alone, wherever transformers has a class for that, unless ``whole``. What
    transformers raises about values that it does not expect passes through.

    Raises:
        InputError: transformers does not know the ``model_type``, or not as a decoder.
    """
    if architecture_of(config) is not None and not whole:
        parsed = _parsed(_tower(config))
        found = _class_in((_TEXT,), parsed, ())
        if found is not None:
            return parsed, found
    parsed = _parsed(config)
    return parsed, _named_class(config, parsed)


def loaded_class(config: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the parsed configuration and the class of a ``config.json`` as a stock loader chooses them.

    What transformers raises about values that it does not expect passes through.

    Raises:
        InputError: transformers does not know the ``model_type``, or not as a decoder.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise InputError(
            f"config.json: model_type {model_type!r} is unknown to transformers",
            "remote code is never executed",
        )
    values = _clean(config)
    values.pop("model_type")
    parsed: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    return parsed, _named_class(config, parsed)


def _named_class(config: Mapping[str, Any], parsed: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the whole model: one that the configuration names, or else the first of its tables."""
    tables = (*_WHOLE, _TEXT) if "text_config" in config else (_TEXT, *_WHOLE)
    named = config.get("architectures")
    found = _class_in(tables, parsed, named if isinstance(named, list) else ())
    if found is None:
        raise InputError(
            f"config.json: transformers has no decoder for model_type {config.get('model_type')!r}",
            "models that write text are quantized",
        )
    return found


def _tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder, with the keys that the whole model overrides."""
    tower = dict(text_config(config))
    if "tie_word_embeddings" in config:
        tower["tie_word_embeddings"] = config["tie_word_embeddings"]
    return tower


def _parsed(config: Mapping[str, Any]) -> PreTrainedConfig:
    values = _clean(config)
    model_type, _ = known_type(config)
    values.pop("model_type", None)
    architecture = architecture_of(config)
    if architecture is not None and "layer_types" in values:
        model_type = architecture.with_layer_types.get(model_type, model_type)
    found: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    return found


def _class_in(
    tables: tuple[str, ...], parsed: PreTrainedConfig, named: Any
) -> type[PreTrainedModel] | None:
    """Return the class for a configuration: the one that it names if the tables have it, or else their first."""
    found = [kind for table in tables for kind in _classes(table, parsed)]
    return next((kind for kind in found if kind.__name__ in named), found[0] if found else None)


def _classes(table: str, parsed: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    mapping = getattr(modeling_auto, table)
    try:
        kinds = mapping[type(parsed)]  # imports the family's module
    except KeyError:  # its `in` does not know all that it has
        return
    yield from kinds if isinstance(kinds, list | tuple) else (kinds,)


def _clean(value: Any) -> Any:
    """Drop private keys and those that load code or quantized layers, at every depth."""
    if isinstance(value, Mapping):
        if value.keys() == {INFINITE} and value[INFINITE] in {"Infinity", "-Infinity", "NaN"}:
            return float(value[INFINITE])
        return {
            key: _clean(item)
            for key, item in value.items()
            if not key.startswith("_") and key not in _STRIPPED
        }
    return [_clean(item) for item in value] if isinstance(value, list) else value
