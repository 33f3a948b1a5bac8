"""The child process of `chat`: lines of JSON on stdin; one answer on stdout, a line of JSON and the texts.

The first line is the request, each further one a conversation: the number of its template and the variables that it is
given. The texts follow as they are, one behind the other: JSON would write six bytes for every control character.
Run by path with ``python -P``; it imports nothing of this package. The limits are set before the
template is parsed, since Jinja folds constants, and ``'a' * 10**9`` is one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """``{% generation %}``: marks the assistant's turns for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as declared by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements up to ``endgeneration``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def set_limits(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process for good: CPU seconds, bytes of address space, no byte written to a file, no core dump.

    Windows has no such limits and macOS may take none of memory: there the clock of `chat` is what ends a template.
    """
    try:
        import resource
    except ImportError:
        return
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)  # may be lower already, and can only be lowered
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):
            if sys.platform != "darwin":
                raise


def environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox with what published templates expect of ``transformers``."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise
    # The date is part of the text that is measured, and a result must not depend on the day.
    sandbox.globals["strftime_now"] = datetime(2024, 7, 26).strftime
    return sandbox


def answer(
    request: Mapping[str, Any], conversations: Sequence[tuple[int, Mapping[str, Any]]]
) -> tuple[list[bytes], str, int | None]:
    """Render the conversations, up to the one with which the texts are enough.

    Returns:
        The texts; the reason why there are none, else ""; and the number of the conversation that failed, if one did.
    """
    left, enough = request["limits"]["output_characters"], request["enough"]
    texts: list[bytes] = []
    at = None
    try:
        sandbox = environment()
        templates = [sandbox.from_string(text) for text in request["templates"]]
        for at, (number, given) in enumerate(conversations):
            pieces = []
            variables = {"add_generation_prompt": request["answer"], **request["tokens"], **given}
            for piece in templates[number].generate(variables):
                left -= len(piece)
                if left < 0:
                    return [], "it writes too much", at
                pieces.append(piece)
            text = "".join(pieces)
            cut = text[:enough]
            cut = cut if cut.strip() else text  # it stays what it is: a document or none
            texts.append(cut.encode(errors="surrogatepass"))
            if enough is not None and text.strip():  # what is blank is no document
                enough -= len(text)
                if enough <= 0:
                    break
    except MemoryError:
        return [], "it needs more memory than it may use", at
    except Exception as error:  # a template can raise whatever its expressions raise
        return [], f"{type(error).__name__}: {error}", at
    return texts, "", None


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def main() -> None:
    """Serve one request."""
    request, *conversations = map(json.loads, sys.stdin)
    set_limits(request["limits"]["cpu_seconds"], request["limits"]["memory_bytes"])
    texts, error, at = answer(request, conversations)
    head = json.dumps({"error": error, "at": at, "bytes": [len(text) for text in texts]})
    for part in (head.encode(), b"\n", *texts):
        sys.stdout.buffer.write(part)


if __name__ == "__main__":
    main()
