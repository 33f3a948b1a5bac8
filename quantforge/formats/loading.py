"""Code that loads a result, for its card: Python where an engine is a library, a command and a request where it serves.

What is installed beside an engine is a fact of the format (`About.packages`), how it is served one of the engine
(`targets`). Of the engines that a plan names, those that load the result get code; one without an entry in `targets`
gets none.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from quantforge.formats import About
from quantforge.formats.commands import COMMANDS, command_of
from quantforge.formats.libraries import PROMPT, QUESTION
from quantforge.formats.targets import TARGETS
from quantforge.plans import EngineVerdict, Serving

_CALLED = "model"  # in requests: a directory has another name wherever it is copied


@dataclass(frozen=True, slots=True)
class Snippet:
    """Code for one engine: its language as Markdown names it, and what is typed."""

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
    """Return code for every engine that loads a result; none for a place that no line can hold.

    Args:
        about: facts of the format.
        verdicts: of the plan.
        place: of the result: a directory, a file, or a name on the hub.
        chat: whether it has a chat template.
        repository: on the hub, from which the file is fetched first; "" where it is there.
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
        library = TARGETS[engine].library
        if library is not None:
            code = library.code(place, chat=chat)
            found.append(
                Snippet(
                    engine, "python", "".join(f"# {line}\n" for line in install.splitlines()) + code
                )
            )
        else:
            found.append(Snippet(engine, "bash", install + _served(engine, place, chat=chat)))
    return found


def _served(engine: str, place: str, *, chat: bool) -> str:
    """Return the command that serves a result, and a request to it."""
    target = TARGETS[engine]
    label = place.rpartition(".gguf")[0] or _CALLED
    command = command_of(engine, place, Serving(), name=label)
    if not target.port:
        return command
    asked = {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": PROMPT}
    request = json.dumps(
        {"model": label if COMMANDS[engine].named else place, **asked, "max_tokens": 64}
    )
    route = "chat/completions" if chat else "completions"
    return (
        f"{command}\n\n# in another terminal\n"
        f"curl http://localhost:{target.port}/v1/{route} -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(request)}"
    )
