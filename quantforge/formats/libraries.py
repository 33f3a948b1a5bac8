"""Engines that are libraries of Python: the program that loads a result and lets it write."""

from __future__ import annotations

import json
from dataclasses import dataclass

PROMPT, QUESTION = "The first thing to know is", "What can you do?"


@dataclass(frozen=True, slots=True)
class Library:
    """A program: ``{name}`` is the result, ``{inputs}`` is ``plain``, or ``chat`` where there is a chat template."""

    program: str
    plain: str
    chat: str

    def code(self, name: str, *, chat: bool) -> str:
        """Return the program for a result; ``chat``: whether that has a chat template."""
        inputs = self.chat if chat else self.plain
        quoted = json.dumps(name, ensure_ascii=False)[1:-1]  # between the quotes of the program
        return self.program.format(name=quoted, inputs=inputs)


_MESSAGES = f'messages = [{{"role": "user", "content": "{QUESTION}"}}]\n'
TRANSFORMERS = Library(
    """\
from transformers import AutoModelForCausalLM, AutoTokenizer

place = "{name}"
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place, dtype="auto", device_map="auto")
{inputs}
output = model.generate(**inputs.to(model.device), max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))""",
    f'inputs = tokenizer("{PROMPT}", return_tensors="pt")',
    f"{_MESSAGES}inputs = tokenizer.apply_chat_template(\n"
    '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)',
)
MLX = Library(
    """\
from mlx_lm import generate, load

model, tokenizer = load("{name}")
{inputs}
print(generate(model, tokenizer, prompt=prompt, max_tokens=64))""",
    f'prompt = "{PROMPT}"',
    f"{_MESSAGES}prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
)
