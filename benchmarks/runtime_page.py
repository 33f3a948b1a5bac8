"""Write docs/results/runtime.md of what `runtime` and `near_ties` measured.

    python benchmarks/runtime_page.py --machine WORDS FILE.json... [--out docs/results/runtime.md]

Parts that were not measured are named as such. Parts of several files go into one page; a later file wins.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

# Part, path of the figure in it, what it is, and at least or at most how much it is to be.
GENERATE = "last rung / transformers' generate, bfloat16"
NAIVE = "last rung / own naive loop, 16 bits"
AIMS: tuple[tuple[str, tuple[str, ...], str, str, float], ...] = (
    ("gap", ("chunks of 96", "whole / this, gap"), "longest gap, whole / chunks of 96", ">=", 12),
    ("gap", ("chunks of 96", "this / whole, first token"), "its first token, chunks / whole", "<=", 1.25),
    ("waste", ("pages",), "places reserved and not used / reserved", "<=", 0.04),
    ("waste", ("contiguous, 1024 tokens each",), "the same, contiguous for 1024 tokens each", "", 0),
    ("scheduler", ("scheduler's share, 64 requests",), "the scheduler's share of a step of 64 requests", "<=", 0.02),
    ("scheduler", ("recorded / not",), "steps per second of 16 requests, recorded / not", "", 0),
    ("ladder", (f"{GENERATE}, a batch of 16",), f"{GENERATE}, a batch of 16", ">=", 12),
    ("ladder", (f"{GENERATE}, one at a time",), f"{GENERATE}, one at a time", "", 0),
    ("ladder", (NAIVE,), NAIVE, ">=", 4.5),
)  # fmt: skip
TABLES = ("gap", "scheduler", "ladder")


def verdicts(found: dict[str, Any]) -> list[str]:
    """Rows of the table of aims."""
    rows = []
    for part, path, words, sign, aim in AIMS:
        value: Any = found.get(part)
        for key in path if value is not None else ():
            value = value[key]
        wanted = f"{sign} {aim}" if sign else ""
        met = (
            "" if value is None or not sign else "yes" if (value >= aim) == (sign == ">=") else "no"
        )
        shown = "not measured" if value is None else f"{value:.3g}"
        rows.append(f"| {words} | {shown} | {wanted} | {met} |")
    return rows


def lines(values: dict[str, Any]) -> list[str]:
    """Rows of a part; a dict of dicts has a column per figure."""
    if all(isinstance(value, dict) for value in values.values()):
        names = list(next(iter(values.values())))
        rows = [[name, *(f"{one[key]:.3g}" for key in names)] for name, one in values.items()]
        return [" | ".join(["|", *names]) + " |", "|---" * (len(names) + 1) + "|",
                *("| " + " | ".join(row) + " |" for row in rows)]  # fmt: skip
    rows = [f"| {name} | {value:.3g} |" for name, value in values.items()]
    return ["| | |", "|---|---|", *rows]


def ties(found: dict[str, Any]) -> list[str]:
    """The section on near ties."""
    rows = [
        f"| {name} | {one['other tokens']} of {one['requests']} | "
        f"{', '.join(map(str, one['distances']))} |"
        for name, one in found.items()
        if "requests" in one
    ]
    speed = lines(found["speed"])
    return [
        "## Neighbours", "",
        "The bundled model in int4 g128 by rtn (`benchmarks/near_ties.py MODEL`, one thread):",
        "greedy requests with another token than alone; how far apart the two best logits were at the first.",
        "",
        "| | requests | distances |", "|---|---|---|", *rows, "", "The same model:", "", *speed, "",
    ]  # fmt: skip


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/results/runtime.md"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    settings = []
    for path in options.files:
        read = json.loads(path.read_text())
        if "16 at once" in read:
            found["ties"] = read
            continue
        parts = ", ".join(part for part in ("waste", *TABLES) if part in read)
        settings.append(
            f"- {parts}: medians of {read['rounds']} rounds, {read['threads']} threads, torch {read['torch']}, "
            f"load at the start {read['load'][0]}"
        )
        found |= {part: read[part] for part in (*TABLES, "waste") if part in read}
    text = [
        "# The serving engine", "",
        "`benchmarks/runtime.py`: a random llama with the widths of Llama 3.2 1B in int4 g128.", "",
        options.machine, "", *settings, "",
        "| | measured | aim | met |", "|---|---|---|---|", *verdicts(found), "",
    ]  # fmt: skip
    for part in TABLES:
        if part in found:
            text += [f"## {part.capitalize()}", "", *lines(found[part]), ""]
    if "ties" in found:
        text += ties(found["ties"])
    options.out.write_text("\n".join(text))


if __name__ == "__main__":
    main()
