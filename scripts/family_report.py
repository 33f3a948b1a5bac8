"""What became of every family: verdicts, and the table of docs/results/families.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

OK, REFUSED, WRONG, CRASH, LATE, SKIPPED = "ok", "refused", "wrong", "crash", "late", "-"
UNLOADED = "not loaded"  # stock transformers does not take the artifact, and the plan says so
MOST = 0.9  # share of the blocks that a family has to have rounded to count as working
VERDICTS = ("works", UNLOADED, "partly", "refused", "silently wrong", "crash", "late")


def verdict(document: Mapping[str, Any]) -> str:
    """Return what a family counts as: the worst that happened, or that all steps went well."""
    found = {step: value[0] for step, value in document["found"].items()}
    if found["build"] != OK:
        return "not built"
    if document["wrong"]:
        return "silently wrong"
    for state in (CRASH, LATE):
        if state in found.values():
            return "crash" if state == CRASH else "late"
    if REFUSED in found.values():
        return "refused"
    if document["share"] < MOST:
        return "partly"
    return UNLOADED if UNLOADED in found.values() else "works"


def table(documents: Sequence[Mapping[str, Any]], steps: Sequence[str]) -> str:
    """Return the report as Markdown."""
    counts = Counter(verdict(document) for document in documents)
    built = len(documents) - counts["not built"]
    passed = {s: sum(d["found"].get(s, ("",))[0] == OK for d in documents) for s in steps}
    commits = Counter(str(document.get("commit", "")) for document in documents)
    lines = [
        "# Families", "",
        "Every family of transformers' tables of causal language models and of models from images and text to text,",
        "built tiny (4 layers, 64 features, 4 experts of which 2 are active, every kind of layer, random bfloat16",
        "weights) and put through all verbs at `int4:g16:sym` by `scripts/families.py`, whose text says what each",
        "column is and what counts as silently wrong. A family works where every step ends well; it is `not loaded`",
        "where stock transformers does not take the artifact, as the plan says, so that only our own decoding was",
        f"compared; `partly` where less than {MOST:.0%} of the weights inside blocks are rounded.", "",
        f"Of {len(documents)} families transformers builds {built}: "
        + ", ".join(f"{counts[k]} {k}" for k in VERDICTS) + ".", "",
        "Run in turn, each family on the commit that the JSON beside this file names: "
        + ", ".join(f"{name} ({count})" for name, count in commits.most_common()) + ".", "",
        "| step | ends well |", "|---|---|",
        *(f"| {name} | {count} |" for name, count in passed.items()), "",
        "| family | verdict | share of blocks | " + " | ".join(steps) + " |",
        "|---|---|---|" + "---|" * len(steps),
    ]  # fmt: skip
    for document in documents:
        share = document["share"]
        cells = [document["found"].get(s, ("",))[0] for s in steps]
        lines.append(
            f"| {document['family']} | {verdict(document)} | {'' if share != share else f'{share:.1%}'} | "
            + " | ".join(cells) + " |"
        )  # fmt: skip
    lines += ["", "## Why", ""]
    for document in documents:
        reasons = [f"silently wrong: {text}" for text in document["wrong"]]
        reasons += [f"{s}: {state}: {text}" for s, (state, text) in document["found"].items()
                    if state in {REFUSED, CRASH, LATE, UNLOADED}]  # fmt: skip
        lines += [f"- **{document['family']}** " + "; ".join(reasons)] if reasons else []
    return "\n".join(lines) + "\n"
