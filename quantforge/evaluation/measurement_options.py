"""Options of an evaluation: the text, and what to measure on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from quantforge.evaluation.reference_text import Prompts
from quantforge.evaluation.tasks import Tasks
from quantforge.evaluation.text_windows import DEFAULT_LENGTH


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Validated options of an evaluation.

    Attributes:
        text: the text to score.
        text_name: name of the text in the report.
        text_found: whether the text was not given by the user: a file next to the reference, or the built-in text.
        windows: most windows to score.
        length: tokens of a window.
        speed: whether to measure speed and memory.
        caches: KV cache kinds (see `quantforge.cache_kinds`) to compare with a 16-bit cache; speed is measured with
            the first one, or with the model's default if empty.
        engine: "llama.cpp" to also score GGUF files in that engine.
        correction: directory of an adapter applied to the other model, whose weights are not changed.
        tasks: lm-eval tasks to run on every model.
        prompts: prompts that every model answers; models are also scored along the reference's answers.
    """

    text: str = field(repr=False)
    text_name: str
    windows: int = 80
    length: int = DEFAULT_LENGTH
    speed: bool = True
    caches: tuple[str, ...] = ()
    engine: str = ""
    correction: Path | None = None
    tasks: Tasks | None = None
    prompts: Prompts | None = None
    text_found: bool = False
