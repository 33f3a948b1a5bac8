"""The model card of an artifact: front matter that hubs read, and what a person wants to know first."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge import __version__
from quantforge.checkpoint.files import FILES
from quantforge.formats import format_of
from quantforge.plans import Action, Plan
from quantforge_files.roles import CARD

# Front matter of the source that stays true of the result.
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")


def carried_fields(card: Path | None) -> str:
    """Return the lines of the source's front matter that are carried over."""
    if card is None:
        return ""
    text = FILES.read(card, CARD, card.parent).decode("utf-8", "replace")
    front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    if front is None:
        return ""
    # A key with its indented lines, so that lists stay whole.
    fields = re.findall(r"^(\w+):(.*(?:\n(?:[ \t-].*))*)", front[1].replace("\r", ""), re.MULTILINE)
    return "".join(f"{key}:{value}\n" for key, value in fields if key in CARRIED)


def model_card(
    plan: Plan, document: Mapping[str, Any], base_model: str, source_card: Path | None
) -> bytes:
    """Return ``README.md``; it depends on the plan and the manifest ``document`` only."""
    base_model = "".join(c if c.isprintable() else "?" for c in base_model)
    calibration = document["calibration"]
    schemes = Counter(str(tensor.scheme) for tensor in plan.quantized())
    kept = sum(tensor.action is Action.KEEP for tensor in plan.tensors)
    lines = [
        "---",
        f"base_model: {json.dumps(base_model, ensure_ascii=False)}",
        "base_model_relation: quantized",
        "library_name: transformers",
        f"tags: [quantforge, {plan.format}]",
        carried_fields(source_card) + "---",
        "",
        f"# {base_model}, quantized with {plan.method}",
        "",
        f"Made by QuantForge {__version__} in the format `{plan.format}`:"
        f" {plan.density}, {plan.output_bytes:,} bytes of weights.",
        "",
        "| scheme | layers |",
        "|---|---|",
        *(f"| `{scheme}` | {count} |" for scheme, count in sorted(schemes.items())),
        f"| kept | {kept} tensors |",
        "",
    ]
    lines += ["## Loading", "", "```", *format_of(plan.format).ABOUT.loading, "```", ""]
    lines += [
        f"- {v.engine}: {'yes' if v.loads else 'no'}{f' ({v.reason})' if v.reason else ''}"
        for v in plan.engines
    ]
    if calibration is not None:
        lines += [
            "", "## Calibration", "",
            f"{calibration['rows']} rows of {calibration['length']} tokens from `{', '.join(calibration['sources'])}`;"
            f" SHA-256 of the token ids `{calibration['digest']}`.",
        ]  # fmt: skip
    lines += ["", "## Events", ""]
    lines += [f"- {kind}: {count}" for kind, count in document["event_counts"].items()] or [
        "None: nothing fell back."
    ]
    if document["recipe"]:
        lines += ["", "## Recipe", "", "```toml", document["recipe"].rstrip(), "```"]
    lines.append("")
    return "\n".join(lines).encode()
