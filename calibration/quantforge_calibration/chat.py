"""Rendering chat messages through a model's template, in a process that may be killed.

A chat template is a program that arrives with the weights. Jinja's immutable sandbox stops it from
reaching into Python, but not from looping for a year or building a string of a gigabyte, so the
sandbox runs in a child process with limits on CPU time, wall time, memory and output
(`chat_worker`). Nothing is rendered unless the user asks for it; conversions carry templates
unread.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from quantforge_calibration.opening import FILES
from quantforge_calibration.readers import Messages
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import read_tokenizer_config, token_text
from quantforge_files.roles import TEMPLATE

TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
HINT = "use texts instead of messages, or leave chat_template = false"


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Limits of one call of `render`: seconds, bytes of address space, characters of text."""

    cpu_seconds: int = 20
    wall_seconds: float = 60.0
    memory_bytes: int = 512 << 20
    output_characters: int = 32 << 20


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The source of a template, and the special tokens (``bos_token`` ...) that it may name."""

    text: str
    tokens: Mapping[str, str]


def load_chat_template(model: Path) -> ChatTemplate:
    """Read the chat template of a model.

    Raises:
        SourceError: it has none, or as `find_chat_template`.
    """
    found = find_chat_template(model)
    if found is None:
        raise SourceError(f"{model} has no chat template", HINT)
    return found


def find_chat_template(model: Path) -> ChatTemplate | None:
    """Read ``chat_template.jinja``, else ``chat_template`` of tokenizer_config.json (of several, ``default``).

    None where there is neither, or no text.

    Raises:
        SourceError: a file cannot be read or is not UTF-8, or tokenizer_config.json is no JSON object.
    """
    config = read_tokenizer_config(model)
    text: Any = config.get("chat_template")
    if isinstance(text, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in text if isinstance(item, dict)}
        text = named.get("default")
    file = model / "chat_template.jinja"
    try:
        text = FILES.read(file, TEMPLATE, model).decode() if file.is_file() else text
    except UnicodeDecodeError as error:
        raise SourceError(f"{file} cannot be read: {error}", HINT) from error
    if not isinstance(text, str):
        return None
    tokens = {name: token_text(config, name) for name in TOKENS}
    return ChatTemplate(text, {name: token for name, token in tokens.items() if token is not None})


def render(
    template: ChatTemplate,
    conversations: Sequence[Messages],
    limits: ChatLimits = ChatLimits(),
    *,
    answer: bool = False,
    enough: int | None = None,
) -> list[str]:
    """Render conversations, one text each, in a child process.

    Args:
        template: of the model.
        conversations: lists of messages.
        limits: of the child.
        answer: whether a text ends where the model's answer begins.
        enough: characters of texts that are not blank, behind which the texts end.

    Raises:
        SourceError: the template fails, is refused by the sandbox, or exceeds a limit.
    """
    request = {
        "template": template.text,
        "tokens": dict(template.tokens),
        "conversations": list(conversations),
        "limits": asdict(limits),
        "answer": answer,
        "enough": enough,
    }
    try:
        payload = json.dumps(request)
    except (TypeError, ValueError) as error:
        raise SourceError(f"the chat messages are not plain data: {error}", HINT) from error
    # By path, so that the child imports none of us; -P keeps this folder out of its sys.path.
    worker = [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))]
    try:
        done = subprocess.run(
            worker,
            input=payload.encode(),
            capture_output=True,
            timeout=limits.wall_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(
            f"the chat template ran for over {limits.wall_seconds} s", HINT
        ) from error
    if done.returncode != 0:
        raise SourceError(f"the chat template was stopped: {_reason(done, limits)}", HINT)
    end = done.stdout.index(b"\n")
    head = json.loads(done.stdout[:end])
    if head["error"]:
        raise SourceError(f"the chat template cannot be rendered: {head['error']}", HINT)
    ends = list(accumulate(head["bytes"], initial=end + 1))
    return [done.stdout[a:b].decode(errors="surrogatepass") for a, b in pairwise(ends)]


def _reason(done: subprocess.CompletedProcess[bytes], limits: ChatLimits) -> str:
    if done.returncode < 0:  # by a signal, which is how the system enforces limits
        return f"it used more than {limits.cpu_seconds} s of CPU time, or too much memory"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"
