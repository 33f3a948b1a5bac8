"""Choose the transformers class for a configuration: the text decoder, or a model with further towers.

The configuration class comes from transformers' own table of ``model_type``. An unknown ``model_type`` belongs to a
model with custom code, which never runs; if its ``architectures`` name a class of transformers, it is treated as that
family.
Keys that make a loader run or fetch code (``auto_map``, all private keys) are removed first. Nothing here accesses the
network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantforge.architectures import architecture_of, text_config
from quantforge.errors import InputError
from quantforge.events import Event
from quantforge_files.strict_json import INFINITY_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_REMOVED_KEYS = frozenset(
    {
        "auto_map",
        "trust_remote_code",
        "quantization_config",
        "attn_implementation",
        "dtype",
        "torch_dtype",
    }
)
_TEXT_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING"
_MULTIMODAL_TABLES = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")


def resolve_model_type(config: Mapping[str, Any]) -> tuple[str, Event | None]:
    """Return the ``model_type`` that transformers knows, and an event if the configuration declares another one.

    Raises:
        InputError: neither the type nor a class in ``architectures`` is known.
    """
    declared_type = config.get("model_type")
    if isinstance(declared_type, str) and declared_type in CONFIG_MAPPING:
        return declared_type, None
    class_list = config.get("architectures") if isinstance(declared_type, str) else ()
    for table in (_TEXT_TABLE, *_MULTIMODAL_TABLES):
        for model_type, classes in getattr(modeling_auto, f"{table}_NAMES").items():
            class_names = {classes} if isinstance(classes, str) else set(classes)
            if isinstance(class_list, list) and class_names & set(filter(_is_string, class_list)):
                return model_type, Event(
                    "unknown-model-type",
                    str(declared_type),
                    f"unknown to transformers, computed as {model_type}, as architectures say",
                )
    raise InputError(
        f"model_type {declared_type!r} is unknown to transformers",
        "remote code is never executed",
        subject="config.json",
    )


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def model_class(
    config: Mapping[str, Any], *, whole: bool = False
) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the parsed configuration and the class of the decoder, or of the whole model with ``whole``.

    For a family with declarations, the decoder alone is used if transformers has a class for it. Exceptions of
    transformers about unexpected values pass through.

    Raises:
        InputError: transformers does not know the ``model_type``, or not as a decoder.
    """
    if architecture_of(config) is not None and not whole:
        parsed = _parse_config(_decoder_config(config))
        text_class = _class_in_tables((_TEXT_TABLE,), parsed, ())
        if text_class is not None:
            return parsed, text_class
    parsed = _parse_config(config)
    return parsed, _whole_model_class(config, parsed)


def stock_model_class(config: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the parsed configuration and the class that ``from_pretrained`` would choose.

    Exceptions of transformers about unexpected values pass through.

    Raises:
        InputError: transformers does not know the ``model_type``, or not as a decoder.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise InputError(
            f"model_type {model_type!r} is unknown to transformers",
            "remote code is never executed",
            subject="config.json",
        )
    values = _remove_private_keys(config)
    values.pop("model_type")
    parsed: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    return parsed, _whole_model_class(config, parsed)


def _whole_model_class(
    config: Mapping[str, Any], parsed: PreTrainedConfig
) -> type[PreTrainedModel]:
    """Return the class of the whole model: one named by the configuration, else the first in the tables."""
    tables = (
        (*_MULTIMODAL_TABLES, _TEXT_TABLE)
        if "text_config" in config
        else (_TEXT_TABLE, *_MULTIMODAL_TABLES)
    )
    class_list = config.get("architectures")
    found_class = _class_in_tables(
        tables, parsed, class_list if isinstance(class_list, list) else ()
    )
    if found_class is None:
        raise InputError(
            f"transformers has no decoder for model_type {config.get('model_type')!r}",
            "models that write text are quantized",
            subject="config.json",
        )
    return found_class


def _decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder, with the keys that the whole model overrides."""
    tower = dict(text_config(config))
    if "tie_word_embeddings" in config:
        tower["tie_word_embeddings"] = config["tie_word_embeddings"]
    return tower


def _parse_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    values = _remove_private_keys(config)
    model_type, _ = resolve_model_type(config)
    values.pop("model_type", None)
    architecture = architecture_of(config)
    if architecture is not None and "layer_types" in values:
        model_type = architecture.model_type_with_layer_types.get(model_type, model_type)
    parsed: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    return parsed


def _class_in_tables(
    tables: tuple[str, ...], parsed: PreTrainedConfig, class_list: Any
) -> type[PreTrainedModel] | None:
    """Return the class named by the configuration if the tables have it, else their first class for it."""
    classes = [kind for table in tables for kind in _classes_in_table(table, parsed)]
    return next(
        (kind for kind in classes if kind.__name__ in class_list), classes[0] if classes else None
    )


def _classes_in_table(table: str, parsed: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    mapping = getattr(modeling_auto, table)
    try:
        kinds = mapping[type(parsed)]  # imports the family's module
    except KeyError:  # its `in` does not know all that it has
        return
    yield from kinds if isinstance(kinds, list | tuple) else (kinds,)


def _remove_private_keys(value: Any) -> Any:
    """Remove private keys and keys that load code or quantized layers, at every depth."""
    if isinstance(value, Mapping):
        if value.keys() == {INFINITY_KEY} and value[INFINITY_KEY] in {
            "Infinity",
            "-Infinity",
            "NaN",
        }:
            return float(value[INFINITY_KEY])
        return {
            key: _remove_private_keys(item)
            for key, item in value.items()
            if not key.startswith("_") and key not in _REMOVED_KEYS
        }
    return [_remove_private_keys(item) for item in value] if isinstance(value, list) else value
