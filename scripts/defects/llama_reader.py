"""Ask llama.cpp itself how it understands a GGUF file: what it prints while loading it, and how it cuts texts.

gguf-py shows keys, not what the engine takes where one is missing. Run as a program with the path of a file, because
an engine that fails may end the process and prints to its standard error: the last line on stdout is a document.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

# Of the lines on the model that the engine prints, those that speak of the file and not of what is computed.
_OF_THE_FILE = re.compile(r"file (format|type|size)|general\.|model (type|params|ftype)")
_LINE = re.compile(r"print_info: (?P<name>[^=]+?) *= (?P<value>.*)")
SECONDS = 60
TEXTS = (
    "The quick brown fox",
    " jumps over 12 lazy dogs.\n",
    "naïve 東京 😀",
    "<s></s><|endoftext|>",
)


@cache
def understood(path: Path) -> dict[str, str]:
    """Return sizes, special tokens and tokens of `TEXTS` as the engine has them; ``{"failed": ...}`` if it refuses."""
    run = subprocess.run(
        [sys.executable, __file__, str(path)], capture_output=True, timeout=SECONDS, check=False
    )
    printed = (run.stdout + b"\n" + run.stderr).decode(errors="replace")
    found = {
        match["name"]: match["value"]
        for match in map(_LINE.search, printed.splitlines())
        if match and not _OF_THE_FILE.match(match["name"])
    }
    answers = [line for line in printed.splitlines() if line.startswith('{"tokens"')]
    if run.returncode or not answers or not found:
        return {"failed": f"llama.cpp ends with {run.returncode}"}
    return found | {"tokens": answers[-1]}


def _serve(path: str) -> dict[str, Any]:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_ctx = 64
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.warmup = False
    settings.verbosity = 5
    settings.port = 0  # any that is free
    server = xllamacpp.Server(settings)
    return {"tokens": [_tokens(server.listening_address, text) for text in TEXTS]}


def _tokens(address: str, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True}).encode()
    request = Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=SECONDS) as answer:
        found: list[int] = json.loads(answer.read())["tokens"]
    return found


if __name__ == "__main__":
    answer = json.dumps(_serve(sys.argv[1]))
    sys.stdout.write(f"\n{answer}\n")
