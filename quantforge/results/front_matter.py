"""Front matter of a card: the fields by which the hub lists a model, written by the hub's own library.

Of the source's card the licence, the languages and the task stay true and are carried over. ``base_model`` is a name of
the hub or nothing: with any other name the hub refuses the card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.hub import is_hub_name
from quantforge_files.roles import CARD

CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_MOST = 1 << 14  # characters of these fields: reading YAML is slow
_MAKER = "quantforge"
_TASK = "text-generation"


def carried_fields(card: Path | None) -> dict[str, Any]:
    """Return the fields of the source's card that stay true of the result; none where it has none that are YAML."""
    if card is None:
        return {}
    text = FILES.read(card, CARD, card.parent).decode("utf-8", "replace")
    front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    if front is None:
        return {}
    # A key with its indented lines, so that lists stay whole.
    lines = re.findall(r"^(\w+):(.*(?:\n(?:[ \t-].*))*)", front[1].replace("\r", ""), re.MULTILINE)
    fields = "".join(f"{key}:{value}\n" for key, value in lines if key in CARRIED)
    return _texts(fields) if len(fields) <= _MOST else {}


def _texts(fields: str) -> dict[str, Any]:
    """Return fields whose values are texts or lists of texts; as texts, so that the language ``no`` is not False."""
    import yaml

    try:
        found = yaml.load(fields, yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    given = found if isinstance(found, Mapping) else {}
    return {key: value for key, value in given.items() if value and _is_text(value)}


def _is_text(value: object) -> bool:
    lines = value if isinstance(value, list) else [value]
    return all(isinstance(line, str) for line in lines)


def base_model(stated: str, document: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the original model by its name on the hub, "" where none is known.

    Args:
        stated: by a user.
        document: the manifest; of an export its chain is gone back to the first model.
        config: of the source.
    """
    chain: list[Any] = [config.get("_name_or_path")]
    told: Any = document
    while isinstance(told, Mapping):
        source = told.get("source")
        if isinstance(source, Mapping) and "revision" in source:  # it came from the hub
            chain.append(source.get("model"))
        chain.append(told.get("base_model"))
        told = told.get("lineage")
    known = (stated, *reversed(chain))
    return next((name for name in known if isinstance(name, str) and is_hub_name(name)), "")


def front_matter(
    base: str, library: str, tags: list[str], carried: Mapping[str, Any], *, tuned: bool
) -> str:
    """Return the front matter of a card as YAML, without its dashes.

    Args:
        base: the original model's name on the hub, or "".
        library: that loads the result, as the hub calls it.
        tags: beside ours.
        carried: see `carried_fields`.
        tuned: whether an adapter was merged into the base.
    """
    from huggingface_hub import ModelCardData

    # The hub knows one relation: with an adapter merged it is not the base in fewer bits.
    relation = "finetune" if tuned else "quantized"
    related = {"base_model": base, "base_model_relation": relation} if base else {}
    fields = {**related, "library_name": library, "pipeline_tag": _TASK, **carried}
    data = ModelCardData(**fields, quantized_by=_MAKER, tags=[_MAKER, *tags])
    return str(data.to_yaml())
