"""Rendering chat messages through a model's template, in a process that may be killed.

A chat template is a program that arrives with the weights. Jinja's immutable sandbox stops it from
reaching into Python, but not from looping for a year or building a string of a gigabyte, so the
sandbox runs in a child process with limits on CPU time, wall time, memory and output
(`chat_worker`). Nothing is rendered unless the user asks for it; conversions carry templates
unread.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from quantforge_calibration.chat_templates import DEFAULT, TOOL_USE, read_templates
from quantforge_calibration.conversations import Conversation
from quantforge_calibration.readers import UnusedColumns
from quantforge_calibration.source_error import SourceError
from quantforge_calibration.tokenizer import read_tokenizer_config, token_text

TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
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
    """The templates of a model by name, and the special tokens (``bos_token`` ...) that they may name.

    Attributes:
        named: at least one.
        tokens: text of each, by name.
        notes: templates of the model that are not used (see `quantforge_calibration.chat_templates`).
    """

    named: Mapping[str, str]
    tokens: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def text_for(self, conversation: Conversation) -> str:
        """Return the template that renders a conversation: ``tool_use`` where that has tools, else ``default``.

        Raises:
            SourceError: there is no default, or it is empty.
        """
        name = TOOL_USE if conversation.tools is not None and TOOL_USE in self.named else DEFAULT
        text = self.named.get(name)
        if text is None:
            raise SourceError(
                f"the model has chat templates {', '.join(sorted(self.named))} and no default", HINT
            )
        if not text.strip():
            raise SourceError(f"the chat template {name} of the model is empty", HINT)
        return text


def load_chat_template(model: Path, *, processor: bool = False) -> ChatTemplate:
    """Read the chat templates of a model.

    Raises:
        SourceError: it has none, or as `find_chat_template`.
    """
    found = find_chat_template(model, processor=processor)
    if found is None:
        raise SourceError(f"{model} has no chat template", HINT)
    return found


def find_chat_template(model: Path, *, processor: bool = False) -> ChatTemplate | None:
    """Read the chat templates of a model, None where there are none; ``processor`` as of `read_templates`.

    Raises:
        SourceError: as `read_templates`, or tokenizer_config.json is not a JSON object.
    """
    found = read_templates(model, processor=processor)
    if not found.named:
        return None
    config = read_tokenizer_config(model)
    tokens = {name: token_text(config, name) for name in TOKENS}
    given = {name: token for name, token in tokens.items() if token is not None}
    return ChatTemplate(found.named, given, found.notes)


def render(
    template: ChatTemplate,
    conversations: Sequence[Conversation],
    limits: ChatLimits = ChatLimits(),
    *,
    answer: bool = False,
    enough: int | None = None,
    unused: UnusedColumns | None = None,
) -> list[str]:
    """Render conversations, one text each, in a child process.

    Args:
        template: of the model.
        conversations: each is given to the template as transformers' ``apply_chat_template`` does.
        limits: of the child.
        answer: whether a text ends where the model's answer begins.
        enough: characters of texts that are not blank, behind which the texts end.
        unused: takes what the conversations hold and their template does not name.

    Raises:
        SourceError: the template fails, is refused by the sandbox, or exceeds a limit; or as `ChatTemplate.text_for`.
    """
    texts = [template.text_for(one) for one in conversations]
    templates = list(dict.fromkeys(texts))
    head = {
        "templates": templates,
        "tokens": dict(template.tokens),
        "limits": asdict(limits),
        "answer": answer,
        "enough": enough,
    }
    lines = [json.dumps(head)]
    for one, text in zip(conversations, texts, strict=True):
        lines.append(_line(one, templates.index(text)))
        if unused is not None:
            unused.add(one.file, (name for name in one.beside() if not _names(text, name)))
    # By path, so that the child imports none of us; -P keeps this folder out of its sys.path.
    worker = [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))]
    try:
        done = subprocess.run(
            worker,
            input="\n".join(lines).encode(),
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
    answered = json.loads(done.stdout[:end])
    if answered["error"]:
        where = conversations[answered["at"]].where if answered["at"] is not None else ""
        place = f"{where}: " if where else ""
        raise SourceError(f"{place}the chat template cannot be rendered: {answered['error']}", HINT)
    ends = list(accumulate(answered["bytes"], initial=end + 1))
    return [done.stdout[a:b].decode(errors="surrogatepass") for a, b in pairwise(ends)]


def _line(one: Conversation, template: int) -> str:
    try:
        return json.dumps([template, one.given()])
    except (TypeError, ValueError, RecursionError) as error:
        place = f"{one.where}: " if one.where else ""
        raise SourceError(f"{place}the chat messages are not plain data: {error}", HINT) from error


def _names(template: str, name: str) -> bool:
    """Return whether a template has the name of a variable anywhere in its text."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None


def _reason(done: subprocess.CompletedProcess[bytes], limits: ChatLimits) -> str:
    if done.returncode < 0:  # by a signal, which is how the system enforces limits
        return f"it used more than {limits.cpu_seconds} s of CPU time, or too much memory"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"
