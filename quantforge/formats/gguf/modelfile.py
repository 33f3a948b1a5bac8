"""Ollama ``Modelfile`` for a GGUF file, with the model's context length and stop tokens.

Ollama translates the chat template of a file itself where it knows it; its own template language is another one, so
that none is written here. ``ollama create NAME -f FILE.Modelfile`` uses the weights without quantizing them again.
"""

from __future__ import annotations

import json
from pathlib import Path

from quantforge.formats.gguf.parsing import read_gguf

MAX_CONTEXT = 8192  # memory grows with it; more is for the user to ask for


def modelfile(path: Path) -> str:
    """Return the text of a ``Modelfile`` for a GGUF file in the same directory.

    Raises:
        InputError: the file is damaged.
    """
    file = read_gguf(path)
    arch = file.value("general.architecture", str)
    tokens = file.value("tokenizer.ggml.tokens", list, [""])
    lines = [f"FROM ./{path.name}"]
    context = file.value(f"{arch}.context_length", int, MAX_CONTEXT)
    lines.append(f"PARAMETER num_ctx {min(context, MAX_CONTEXT)}")
    for role in ("eos", "eot"):
        number = file.value(f"tokenizer.ggml.{role}_token_id", int, -1)
        if 0 <= number < len(tokens):
            lines.append(f"PARAMETER stop {json.dumps(tokens[number], ensure_ascii=False)}")
    licence = file.value("general.license", str, "")
    if licence:
        lines.append(f"LICENSE {json.dumps(licence)}")
    return "\n".join(lines) + "\n"
