"""A model directory with a tokenizer of single bytes, and how sources are read and refused here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from quantforge_calibration import SourceError, documents, parse_sources
from quantforge_calibration.chat import ChatTemplate
from quantforge_calibration.conversations import Conversation

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
BIG = 1 << 20


def write_model(path: Path, post_processor: object = None, **config: object) -> Path:
    path.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.enable_truncation(4)  # stored in the file by some exporters; must not cut documents
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def bos_template() -> object:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])


def chat_template(text: str, tokens: dict[str, str]) -> ChatTemplate:
    return ChatTemplate({"default": text}, tokens)


def talks(*conversations: list[dict[str, str]]) -> list[Conversation]:
    return [Conversation(messages) for messages in conversations]


def read(spec: str, max_bytes: int = BIG, **options: object) -> list[str]:
    (source,) = parse_sources(spec)
    return list(documents(source, max_bytes, **options))


def refused(call: object, *parts: str) -> SourceError:
    with pytest.raises(SourceError) as caught:
        call()
    for part in parts:
        assert part in f"{caught.value.message}\n{caught.value.hint}"
    assert caught.value.message
    assert caught.value.hint
    return caught.value
