"""The model card (``README.md``) of a result: metadata for the hub, and what to know before loading.

It depends only on the plan and the manifest. The section for measured figures is empty until ``eval --card`` fills it
(`quantforge.artifacts.card_figures`). The front matter, by which the hub lists a model, is written by the hub's own
library. Licence, languages and task of the source's card still apply and are copied. ``base_model`` is the name of a
repository on the hub or missing: the hub refuses a card with any other name.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantforge import __version__
from quantforge.artifacts.card_figures import EMPTY_FIGURES, EMPTY_INDEX, HERE, LOADED_FROM, LOADING
from quantforge.artifacts.manifest import adapter_name, recorded_adapters, recorded_kept_experts
from quantforge.artifacts.number_text import size_and_bytes
from quantforge.engines import snippets
from quantforge.events import KINDS
from quantforge.files.hub import is_hub_name
from quantforge.files.opener import FILES
from quantforge.formats import load_format
from quantforge.plans import Action, Plan
from quantforge_files.roles import CARD

_WEIGHTS = (".safetensors", ".gguf")
COPIED_FIELDS = ("license", "license_name", "license_link", "language", "pipeline_tag")
_MAX_FIELD_CHARACTERS = 1 << 14  # of these fields: parsing YAML is slow
_QUANTIZED_BY = "quantforge"
_TASK = "text-generation"


def model_card(
    plan: Plan, document: Mapping[str, Any], base: str, source_card: Path | None, *, chat: bool
) -> bytes:
    """Return ``README.md``.

    Args:
        plan: the plan that was executed.
        document: the manifest without its outputs.
        base: name of the original model on the hub, "" if unknown.
        source_card: the source's own card, or None.
        chat: whether the result has a chat template.
    """
    fields = front_matter(
        base,
        hub_library(plan),
        [plan.format],
        source_card_fields(source_card),
        tuned=bool(recorded_adapters(document)),
    )
    lines = [
        "---",
        fields,
        EMPTY_INDEX,
        "---",
        "",
        f"# {title(plan, document)}",
        "",
        *_summary(plan, document, base),
        "",
        EMPTY_FIGURES,
        "",
        "## Loading",
        "",
        *_engine_table(plan),
        "",
        LOADING.begin,
        loading(plan, HERE, chat=chat),
        LOADING.end,
        "",
        "## What was done",
        "",
        *steps(document),
        *_calibration_lines(document),
        *_expert_lines(plan, document),
        "",
        *_scheme_table(plan),
        "",
        "## Events",
        "",
        *events(document),
        *_recipe_lines(document),
        "",
    ]
    return "\n".join(lines).encode()


def _summary(plan: Plan, document: Mapping[str, Any], base: str) -> Iterator[str]:
    entry = first(document)
    quantized_text = (
        f"quantized by {code(str(entry.get('method')))}" if _is_quantized(plan, entry) else "stored"
    )
    yield f"{origin(document, base)}, {quantized_text} in the format `{plan.format}`: {plan.density}."
    yield f"Made by QuantForge {__version__}."
    yield ""
    source_bytes = _source_bytes(document)
    ratio = (
        f", {source_bytes / plan.output_bytes:.2f} times less"
        if source_bytes > plan.output_bytes
        else ""
    )
    yield f"- files: {size_and_bytes(plan.output_bytes)} in {len(plan.shards)}"
    if source_bytes:
        yield f"- the source's files: {size_and_bytes(source_bytes)}{ratio}"


def title(plan: Plan, document: Mapping[str, Any]) -> str:
    """Return the heading of the card, which says what the result is."""
    entry = first(document)
    name = cell(str(entry.get("source", {}).get("model")).rpartition("/")[2])
    quantized_text = (
        f" quantized by {cell(str(entry.get('method')))}" if _is_quantized(plan, entry) else ""
    )
    return f"{name}{_changes_text(document, name_only=True)}{quantized_text} ({plan.format})"


def _is_quantized(plan: Plan, manifest_entry: Mapping[str, Any]) -> bool:
    return bool(plan.quantized() and manifest_entry.get("recipe"))


def origin(document: Mapping[str, Any], base: str) -> str:
    """Return the original model (a link to the hub if known) with merged adapters and kept experts."""
    model_link = code(str(first(document).get("source", {}).get("model")))
    if base:
        model_link = f"[{base}](https://huggingface.co/{base})"
    return f"{model_link}{_changes_text(document)}"


def _changes_text(document: Mapping[str, Any], *, name_only: bool = False) -> str:
    """Return the merged adapters and kept experts as text that follows the model's name; "" if there are none."""
    adapters = recorded_adapters(document)
    if name_only:
        texts = [f" with {cell(adapter_name(text))}" for text in adapters]
    else:
        texts = [f" with the adapter {code(text)} merged into it" for text in adapters]
    return "".join(
        [*texts, *(f" with {kept_experts_text(text)}" for text in recorded_kept_experts(document))]
    )


def kept_experts_text(text: str) -> str:
    """Return a manifest's text on kept experts in card form: ``6 of 8 experts in each layer``."""
    return cell(text).replace(" in ", " experts in ", 1)


def chain(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the manifest entries of a result and of those that it was made from, the latest first."""
    entries = [document]
    while isinstance(earlier := entries[-1].get("lineage"), Mapping) and "source" in earlier:
        entries.append(earlier)
    return entries


def first(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the manifest entry of the first result in the chain, which was made from the original model."""
    return chain(document)[-1]


def _source_bytes(document: Mapping[str, Any]) -> int:
    files = first(document)["source"].get("files", {})
    return sum(entry["bytes"] for name, entry in files.items() if name.endswith(_WEIGHTS))


def _engine_table(plan: Plan) -> Iterator[str]:
    yield from ("| engine | loads | |", "|---|---|---|")
    for verdict in plan.engines:
        yield f"| {verdict.engine} | {verdict.word} | {cell(verdict.reason)} |"


def loading(plan: Plan, path: str, *, chat: bool) -> str:
    """Return the code that loads a result, as Markdown.

    Args:
        plan: the plan that was executed.
        path: `HERE`, or the repository's name on the hub.
        chat: whether the result has a chat template.
    """
    lines = [
        f"{LOADED_FROM}`{path}`; the path of this directory, or its name on the hub, may stand there."
    ]
    for item in snippets(load_format(plan.format).INFO, plan.engines, path, chat=chat):
        lines += ["", f"### {item.engine}", "", f"```{item.language}", item.code, "```"]
    return "\n".join(lines)


def steps(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a result was made from the original model, one line for each result of the chain."""
    for number, entry in enumerate(reversed(chain(document)), 1):
        source, format_name = entry["source"], code(str(entry.get("format", "")))
        revision = f", revision {code(str(source['revision']))}" if "revision" in source else ""
        if entry.get("recipe"):
            action_text = f"quantized by {code(str(entry.get('method')))} into {format_name}"
        else:
            exception_text = (
                " but for the embedding" if "embedding-quantized" in entry["event_counts"] else ""
            )
            action_text = f"exported to {format_name}, which restates its numbers{exception_text}"
        single_step = {"source": source}  # what was merged in this step
        yield f"{number}. {code(str(source.get('model')))}{revision}{_changes_text(single_step)}: {action_text}"


def _calibration_lines(document: Mapping[str, Any]) -> Iterator[str]:
    for entry in chain(document):
        text = entry.get("calibration")
        if isinstance(text, Mapping):
            rows, length, sources, digest = map(text.get, ("rows", "length", "sources", "digest"))
            source_names = (
                ", ".join(map(str, sources)) if isinstance(sources, list | tuple) else "a text"
            )
            random_rows = text.get("random_rows")
            random_note = (
                f", {code(str(random_rows))} of them of random tokens" if random_rows else ""
            )
            yield ""
            yield (
                f"Calibrated on {code(str(rows))} rows of {code(str(length))} tokens from {code(source_names)}"
                f"{random_note};"
                f" SHA-256 of the token ids {code(str(digest))}."
            )
            return


def _expert_lines(plan: Plan, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many calibration tokens the experts saw."""
    tokens_by_name = {
        entry["name"]: entry["calibration_tokens"]
        for entry in document["tensors"]
        if "calibration_tokens" in entry
    }
    counts = {
        (tensor.block, tensor.expert): int(tokens_by_name[tensor.name])
        for tensor in plan.tensors
        if tensor.name in tokens_by_name and tensor.expert >= 0
    }
    if counts:
        token_counts = sorted(counts.values())
        yield ""
        yield (
            f"Its {len(token_counts)} experts saw {token_counts[0]:,} to {token_counts[-1]:,} calibration tokens each,"
            f" {statistics.median(token_counts):,.0f} in the middle."
        )


def _scheme_table(plan: Plan) -> Iterator[str]:
    schemes = Counter(str(tensor.scheme) for tensor in plan.quantized())
    yield from ("| scheme | tensors |", "|---|---|")
    yield from (f"| `{scheme}` | {count} |" for scheme, count in sorted(schemes.items()))
    yield f"| as in the source | {sum(item.action is Action.KEEP for item in plan.tensors)} |"


def events(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each kind of event: its meaning, how often it occurred, and where first."""
    for kind, count in document["event_counts"].items():
        first = next(event for event in document["events"] if event["kind"] == kind)
        times_text = "once" if count == 1 else f"{count} times, first"
        yield (
            f"- {KINDS[kind][0].upper()}{KINDS[kind][1:]}: {times_text} at {code(first['where'])}"
            f" ({cell(first['detail'])})."
        )
    if not document["event_counts"]:
        yield "None: nothing came out less than asked for."


def _recipe_lines(document: Mapping[str, Any]) -> Iterator[str]:
    recipes = [entry["recipe"] for entry in chain(document) if entry.get("recipe")]
    if recipes:
        yield from ("", "## Recipe", "", "```toml", str(recipes[0]).rstrip(), "```")


def code(text: str) -> str:
    """Return untrusted text as Markdown code that cannot end the code, the line or the table cell."""
    text = _printable(text)
    if not {"`", "|"} & set(text):
        return f"`{text}`"
    escaped = "".join(c if c.isalnum() or c in " .-" else f"&#{ord(c)};" for c in text)
    return f"<code>{escaped}</code>"


def cell(text: str) -> str:
    """Return untrusted text escaped for a sentence or table cell, without any markup."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in _printable(text))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def source_card_fields(card: Path | None) -> dict[str, Any]:
    """Return the fields of the source's card that also hold for the result; none if it has no valid YAML."""
    if card is None:
        return {}
    text = FILES.read(card, CARD, card.parent).decode("utf-8", "replace")
    front_matter = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    if front_matter is None:
        return {}
    # A key with its indented lines, so that lists stay whole.
    lines = re.findall(
        r"^(\w+):(.*(?:\n(?:[ \t-].*))*)", front_matter[1].replace("\r", ""), re.MULTILINE
    )
    fields = "".join(f"{key}:{value}\n" for key, value in lines if key in COPIED_FIELDS)
    return _parse_text_fields(fields) if len(fields) <= _MAX_FIELD_CHARACTERS else {}


def _parse_text_fields(fields: str) -> dict[str, Any]:
    """Return YAML fields that are texts or lists of texts, unconverted, so that the language ``no`` is not False."""
    import yaml

    try:
        parsed = yaml.load(fields, yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    text_fields = parsed if isinstance(parsed, Mapping) else {}
    return {key: value for key, value in text_fields.items() if value and _is_text(value)}


def _is_text(value: object) -> bool:
    lines = value if isinstance(value, list) else [value]
    return all(isinstance(line, str) for line in lines)


def base_model(given_name: str, document: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the name of the original model on the hub, "" if unknown.

    Args:
        given_name: the name given by the user.
        document: the manifest; its lineage is searched back to the first model.
        config: configuration of the source.
    """
    names: list[Any] = [config.get("_name_or_path")]
    entry: Any = document
    while isinstance(entry, Mapping):
        source = entry.get("source")
        if isinstance(source, Mapping) and "revision" in source:  # it came from the hub
            names.append(source.get("model"))
        names.append(entry.get("base_model"))
        entry = entry.get("lineage")
    known_names = (given_name, *reversed(names))
    return next((name for name in known_names if isinstance(name, str) and is_hub_name(name)), "")


def hub_library(plan: Plan) -> str:
    """Return the library that loads a result, as named by the hub; "" if no engine loads it."""
    if all(verdict.loads is False for verdict in plan.engines):
        return ""
    return load_format(plan.format).INFO.hub_library


def front_matter(
    base: str, library: str, tags: list[str], source_fields: Mapping[str, Any], *, tuned: bool
) -> str:
    """Return the front matter of a card as YAML, without its dashes.

    Args:
        base: name of the original model on the hub, or "".
        library: library that loads the result, as named by the hub; "" if none does.
        tags: tags in addition to QuantForge's.
        source_fields: fields of the source's card, see `source_card_fields`.
        tuned: whether an adapter was merged into the base.
    """
    from huggingface_hub import ModelCardData

    # The hub allows one relation: with a merged adapter the result is more than a quantization of the base.
    relation = "finetune" if tuned else "quantized"
    base_fields = {"base_model": base, "base_model_relation": relation} if base else {}
    library_fields = {"library_name": library} if library else {}
    fields = {**base_fields, **library_fields, "pipeline_tag": _TASK, **source_fields}
    data = ModelCardData(**fields, quantized_by=_QUANTIZED_BY, tags=[_QUANTIZED_BY, *tags])
    return str(data.to_yaml())
