"""What tests of evaluation share: a text, a small protocol, and its windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quantforge.evaluation.evaluate import EvaluationOptions
from quantforge.evaluation.windows import Windows, cut
from quantforge.runtime.text_side import tokenizer_of

TEXT = "the weights of the model are rounded to the nearest point of the grid; 1 + 1 = 2. " * 12


def options(**changes) -> EvaluationOptions:
    return replace(EvaluationOptions(TEXT, "a test", 4, 24, speed=False), **changes)


def windows_of(path: Path, **changes) -> Windows:
    chosen = options(**changes)
    return cut(tokenizer_of(path), chosen.text, chosen.windows, chosen.length)
