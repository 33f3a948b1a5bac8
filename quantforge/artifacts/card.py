"""The model card of a directory: what hubs list it by, and what a person wants to know before loading it.

It depends on the plan and the manifest alone. The part for measured figures is empty until ``eval --card`` fills it
(`quantforge.artifacts.card_figures`). The front matter, the fields by which the hub lists a model, is written by the
hub's own library. Of the source's card the licence, the languages and the task stay true and are carried over.
``base_model`` is a name of the hub or nothing: with any other name the hub refuses the card.
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
from quantforge.artifacts.manifest import adapter_name, stated_adapters, stated_experts
from quantforge.artifacts.number_text import sized
from quantforge.engines import snippets
from quantforge.events import KINDS
from quantforge.files.hub import is_hub_name
from quantforge.files.opener import FILES
from quantforge.formats import load_format
from quantforge.plans import Action, Plan
from quantforge_files.roles import CARD

_WEIGHTS = (".safetensors", ".gguf")
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_MOST = 1 << 14  # characters of these fields: reading YAML is slow
_MAKER = "quantforge"
_TASK = "text-generation"


def model_card(
    plan: Plan, document: Mapping[str, Any], base: str, source_card: Path | None, *, chat: bool
) -> bytes:
    """Return ``README.md``.

    Args:
        plan: that was carried out.
        document: the manifest so far.
        base: the original model's name on the hub, "" where it is not known.
        source_card: the source's own card.
        chat: whether the result has a chat template.
    """
    about = load_format(plan.format).INFO
    fields = front_matter(
        base,
        about.hub_library,
        [plan.format],
        carried_fields(source_card),
        tuned=bool(stated_adapters(document)),
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
        *_engines(plan),
        "",
        LOADING.begin,
        loading(plan, HERE, chat=chat),
        LOADING.end,
        "",
        "## What was done",
        "",
        *steps(document),
        *_calibration(document),
        *_experts(plan, document),
        "",
        *_schemes(plan),
        "",
        "## Events",
        "",
        *events(document),
        *_recipe(document),
        "",
    ]
    return "\n".join(lines).encode()


def _summary(plan: Plan, document: Mapping[str, Any], base: str) -> Iterator[str]:
    made = first(document)
    done = f"quantized by {code(str(made.get('method')))}" if _rounded(plan, made) else "stored"
    yield f"{origin(document, base)}, {done} in the format `{plan.format}`: {plan.density}."
    yield f"Made by QuantForge {__version__}."
    yield ""
    before = _source_bytes(document)
    ratio = f", {before / plan.output_bytes:.2f} times less" if before > plan.output_bytes else ""
    yield f"- files: {sized(plan.output_bytes)} in {len(plan.shards)}"
    if before:
        yield f"- the source's files: {sized(before)}{ratio}"


def title(plan: Plan, document: Mapping[str, Any]) -> str:
    """Return the heading: what the result is, not what a directory that holds it is called."""
    made = first(document)
    name = cell(str(made.get("source", {}).get("model")).rpartition("/")[2])
    done = f" quantized by {cell(str(made.get('method')))}" if _rounded(plan, made) else ""
    return f"{name}{_merged(document, name_only=True)}{done} ({plan.format})"


def _rounded(plan: Plan, made: Mapping[str, Any]) -> bool:
    return bool(plan.quantized() and made.get("recipe"))


def origin(document: Mapping[str, Any], base: str) -> str:
    """Return the original model, by a link to the hub or the name that it had, and what became of all of it."""
    named = code(str(first(document).get("source", {}).get("model")))
    if base:
        named = f"[{base}](https://huggingface.co/{base})"
    return f"{named}{_merged(document)}"


def _merged(document: Mapping[str, Any], *, name_only: bool = False) -> str:
    """Return which adapters a model got and which experts it kept, in words that stand after its name; "" for none."""
    found = stated_adapters(document)
    if name_only:
        words = [f" with {cell(adapter_name(said))}" for said in found]
    else:
        words = [f" with the adapter {code(said)} merged into it" for said in found]
    return "".join([*words, *(f" with {with_experts(said)}" for said in stated_experts(document))])


def with_experts(said: str) -> str:
    """Return what a manifest says of kept experts, for a card: ``6 of 8 experts in each layer``."""
    return cell(said).replace(" in ", " experts in ", 1)


def chain(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what manifests say of a result and of those that it was made from, the last first."""
    found = [document]
    while isinstance(earlier := found[-1].get("lineage"), Mapping) and "source" in earlier:
        found.append(earlier)
    return found


def first(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what manifests say of the first result of the chain, which was made from the original model."""
    return chain(document)[-1]


def _source_bytes(document: Mapping[str, Any]) -> int:
    files = first(document)["source"].get("files", {})
    return sum(entry["bytes"] for name, entry in files.items() if name.endswith(_WEIGHTS))


def _engines(plan: Plan) -> Iterator[str]:
    yield from ("| engine | loads | |", "|---|---|---|")
    for verdict in plan.engines:
        yield f"| {verdict.engine} | {verdict.word} | {cell(verdict.reason)} |"


def loading(plan: Plan, place: str, *, chat: bool) -> str:
    """Return the code that loads a result, as Markdown.

    Args:
        plan: that was carried out.
        place: `HERE`, or its name on the hub.
        chat: whether it has a chat template.
    """
    lines = [
        f"{LOADED_FROM}`{place}`; the path of this directory, or its name on the hub, may stand there."
    ]
    for item in snippets(load_format(plan.format).INFO, plan.engines, place, chat=chat):
        lines += ["", f"### {item.engine}", "", f"```{item.language}", item.code, "```"]
    return "\n".join(lines)


def steps(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a result came to be, from the original model on, a line for each result of the chain."""
    for number, told in enumerate(reversed(chain(document)), 1):
        source, form = told["source"], code(str(told.get("format", "")))
        revision = f", revision {code(str(source['revision']))}" if "revision" in source else ""
        if told.get("recipe"):
            done = f"quantized by {code(str(told.get('method')))} into {form}"
        else:
            but = " but for the embedding" if "embedding-rounded" in told["event_counts"] else ""
            done = f"exported to {form}, which restates its numbers{but}"
        alone = {"source": source}  # what was merged in this step
        yield f"{number}. {code(str(source.get('model')))}{revision}{_merged(alone)}: {done}"


def _calibration(document: Mapping[str, Any]) -> Iterator[str]:
    for told in chain(document):
        found = told.get("calibration")
        if isinstance(found, Mapping):
            rows, length, sources, digest = map(found.get, ("rows", "length", "sources", "digest"))
            named = ", ".join(map(str, sources)) if isinstance(sources, list | tuple) else "a text"
            drawn = found.get("random_rows")
            random = f", {code(str(drawn))} of them of random tokens" if drawn else ""
            yield ""
            yield (
                f"Calibrated on {code(str(rows))} rows of {code(str(length))} tokens from {code(named)}{random};"
                f" SHA-256 of the token ids {code(str(digest))}."
            )
            return


def _experts(plan: Plan, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many calibration tokens single experts saw."""
    seen = {entry["name"]: entry["tokens"] for entry in document["tensors"] if "tokens" in entry}
    counts = {
        (tensor.block, tensor.expert): int(seen[tensor.name])
        for tensor in plan.tensors
        if tensor.name in seen and tensor.expert >= 0
    }
    if counts:
        found = sorted(counts.values())
        yield ""
        yield (
            f"Its {len(found)} experts saw {found[0]:,} to {found[-1]:,} calibration tokens each,"
            f" {statistics.median(found):,.0f} in the middle."
        )


def _schemes(plan: Plan) -> Iterator[str]:
    schemes = Counter(str(tensor.scheme) for tensor in plan.quantized())
    yield from ("| scheme | tensors |", "|---|---|")
    yield from (f"| `{scheme}` | {count} |" for scheme, count in sorted(schemes.items()))
    yield f"| as in the source | {sum(item.action is Action.KEEP for item in plan.tensors)} |"


def events(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each kind of event: what it means, how often it came, and where first."""
    for kind, count in document["event_counts"].items():
        first = next(event for event in document["events"] if event["kind"] == kind)
        often = "once" if count == 1 else f"{count} times, first"
        yield (
            f"- {KINDS[kind][0].upper()}{KINDS[kind][1:]}: {often} at {code(first['where'])}"
            f" ({cell(first['detail'])})."
        )
    if not document["event_counts"]:
        yield "None: nothing came out less than asked for."


def _recipe(document: Mapping[str, Any]) -> Iterator[str]:
    recipes = [told["recipe"] for told in chain(document) if told.get("recipe")]
    if recipes:
        yield from ("", "## Recipe", "", "```toml", str(recipes[0]).rstrip(), "```")


def code(text: str) -> str:
    """Return a text of a foreign file as code in Markdown: it cannot end the code, nor a line or a cell."""
    text = _printable(text)
    if not {"`", "|"} & set(text):
        return f"`{text}`"
    kept = "".join(c if c.isalnum() or c in " .-" else f"&#{ord(c)};" for c in text)
    return f"<code>{kept}</code>"


def cell(text: str) -> str:
    """Return a text that stands in a sentence or a cell: nothing in it is markup."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in _printable(text))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


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
