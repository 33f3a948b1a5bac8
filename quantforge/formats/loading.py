"""Code for the card of a result: a Python program for engines that are libraries, else a command and a request.

Which packages an engine needs for a format is declared in the format (`About.packages`), how the engine is started in
`targets`. Engines that load the result and have an entry in `targets` get code.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantforge.formats import About
from quantforge.formats.targets import TARGETS, command_of
from quantforge.plans import EngineVerdict, Serving

_CALLED = "model"  # in requests: a directory has another name wherever it is copied
_PROMPT, _QUESTION = "The first thing to know is", "What can you do?"
_MESSAGES = f'messages = [{{"role": "user", "content": "{_QUESTION}"}}]\n'
# For engines that are libraries: a program, and its inputs for a model without and with a chat template.
_PROGRAMS: Mapping[str, tuple[str, str, str]] = {
    "transformers": (
        """\
from transformers import AutoModelForCausalLM, AutoTokenizer

place = "{name}"
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place, dtype="auto", device_map="auto")
{inputs}
output = model.generate(**inputs.to(model.device), max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))""",
        f'inputs = tokenizer("{_PROMPT}", return_tensors="pt")',
        f"{_MESSAGES}inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)',
    ),
    "mlx": (
        """\
from mlx_lm import generate, load

model, tokenizer = load("{name}")
{inputs}
print(generate(model, tokenizer, prompt=prompt, max_tokens=64))""",
        f'prompt = "{_PROMPT}"',
        f"{_MESSAGES}prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
    ),
}


@dataclass(frozen=True, slots=True)
class Snippet:
    """Code for one engine, and its language as Markdown names it."""

    engine: str
    language: str
    code: str


def snippets(
    about: About,
    verdicts: Iterable[EngineVerdict],
    place: str,
    *,
    chat: bool,
    repository: str = "",
) -> list[Snippet]:
    """Return code for every engine that loads a result; none if the path has characters that a line cannot hold.

    Args:
        about: facts of the format.
        verdicts: verdicts of engines on the result.
        place: a directory, a file, or a name on the hub.
        chat: whether the model has a chat template.
        repository: repository on the hub from which the file is downloaded first; "" for none.
    """
    found = []
    if not place.isprintable():  # a line of it could end the block that the code stands in
        return []
    for engine in (verdict.engine for verdict in verdicts if verdict.loads):
        if engine not in TARGETS:
            continue
        packages = f"{TARGETS[engine].packages} {about.packages.get(engine, '')}".strip()
        install = f"pip install {packages}\n" if packages else ""
        if repository:
            install += f"hf download {shlex.quote(repository)} {shlex.quote(place)} --local-dir .\n"
        if engine in _PROGRAMS:
            comments = "".join(f"# {line}\n" for line in install.splitlines())
            code = comments + _program(engine, place, chat=chat)
            found.append(Snippet(engine, "python", code))
        else:
            found.append(Snippet(engine, "bash", install + _served(engine, place, chat=chat)))
    return found


def _program(engine: str, place: str, *, chat: bool) -> str:
    """Return the program that loads a result and generates text."""
    program, plain, with_template = _PROGRAMS[engine]
    name = json.dumps(place, ensure_ascii=False)[1:-1]  # between the quotes of the program
    return program.format(name=name, inputs=with_template if chat else plain)


def _served(engine: str, place: str, *, chat: bool) -> str:
    """Return the command that serves a result, and a request to it."""
    target = TARGETS[engine]
    label = place.rpartition(".gguf")[0] or _CALLED
    command = command_of(engine, place, Serving(), name=label)
    if not target.port:
        return command
    asked = {"messages": [{"role": "user", "content": _QUESTION}]} if chat else {"prompt": _PROMPT}
    request = json.dumps({"model": label if target.named else place, **asked, "max_tokens": 64})
    route = "chat/completions" if chat else "completions"
    return (
        f"{command}\n\n# in another terminal\n"
        f"curl http://localhost:{target.port}/v1/{route} -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(request)}"
    )
