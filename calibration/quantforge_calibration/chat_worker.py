"""The child process of `chat`: one request on stdin, as JSON; one answer on stdout, a line of JSON and the texts.

The texts follow as they are, one behind the other: JSON would write six bytes for every control character.
Run by path with ``python -P``; it imports nothing of this package. The limits are set before the
template is parsed, since Jinja folds constants, and ``'a' * 10**9`` is one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
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


def answer(request: Mapping[str, Any]) -> tuple[list[bytes], str]:
    """Return the texts, up to the one with which they are enough, and the reason why there are none, else ""."""
    left, enough = request["limits"]["output_characters"], request["enough"]
    texts: list[bytes] = []
    try:
        template = environment().from_string(request["template"])
        for messages in request["conversations"]:
            pieces = []
            for piece in template.generate(
                messages=messages,
                add_generation_prompt=request["answer"],
                tools=None,
                **request["tokens"],
            ):
                left -= len(piece)
                if left < 0:
                    return [], "it writes too much"
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
        return [], "it needs more memory than it may use"
    except Exception as error:  # a template can raise whatever its expressions raise
        return [], f"{type(error).__name__}: {error}"
    return texts, ""


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def main() -> None:
    """Serve one request."""
    request = json.load(sys.stdin)
    set_limits(request["limits"]["cpu_seconds"], request["limits"]["memory_bytes"])
    texts, error = answer(request)
    head = json.dumps({"error": error, "bytes": [len(text) for text in texts]})
    for part in (head.encode(), b"\n", *texts):
        sys.stdout.buffer.write(part)


if __name__ == "__main__":
    main()
