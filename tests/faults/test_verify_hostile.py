"""Whatever stands in the files beside the weights: findings or silence, never an error of Python, and nothing raw."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quantforge.verification.beside import tokenizer_tree as tokenizers
from quantforge.verification.beside.facts import Beside, Pair
from quantforge.verification.beside.generation import check_generation
from quantforge.verification.beside.model_configuration import check_configuration
from quantforge.verification.beside.processors import check_processors
from quantforge.verification.beside.quantization import contradictions, disagreements
from quantforge.verification.beside.templates import check_templates
from quantforge.verification.findings import Report, Severity
from tests import peers
from tests.faults.test_verify_configuration import changed, places

ODD: tuple[Any, ...] = (
    None, 5, -1, "x", [], {}, [1], {"a": 1}, True, "re:(a+)+$", [[["x"]]], 3.5, 10**400, "\x1b[2J\u202e",
    {"content": [1]}, [{"name": {}, "template": 5}], [{"id": [1], "content": {}}],
)  # fmt: skip
ADDED = {
    "special_tokens_map.json": b'{"eos_token": {"content": "</s>"}}',
    "added_tokens.json": b'{"<s>": 0}',
    "processor_config.json": b'{"a": {"b": 1}, "chat_template": "x"}',
}
CONFIG = "config.json"


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    folder = peers.FIXTURES / "gptqmodel-v1"
    found = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in {".json", ".jinja"}
    }
    return {**found, **ADDED}


def beside(files: dict[str, bytes]) -> Beside:
    rest = {name: data for name, data in files.items() if name != CONFIG}
    return Beside(json.loads(files[CONFIG]), rest)


def told(own: Beside, other: Beside, monkeypatch) -> Report:
    monkeypatch.setattr(tokenizers, "rebuilt", lambda source: {})
    report, pair = Report(peers.FIXTURES), Pair(own, other, "gptq")
    for check in (check_configuration, check_generation, check_templates, check_processors):
        check(report, pair)
    tokenizers.check_tokenizer(report, pair, peers.FIXTURES)
    texts = [
        text
        for name in tokenizers.REPEATED & own.files.keys()
        for text in tokenizers.contradicting(own, name)
    ]
    texts += [
        *contradictions(own.config, own.tensors),
        *disagreements(own.quantization, other.config),
    ]
    for text in texts:
        report.add("settings", CONFIG, text)
    return report


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "quantize_config.json",
        *ADDED,
    ],
)
def test_no_value_breaks_it(name, files, monkeypatch):
    chosen = random.Random(name)
    document = json.loads(files[name])
    found = [
        path
        for path in places(document)
        if not {"vocab", "merges"} & set(path) or chosen.random() < 0.02
    ]
    for path in chosen.sample(found, min(len(found), 25)):
        for value in chosen.sample(ODD, 2):
            own = {**files, name: json.dumps(changed(document, path, value)).encode()}
            report = told(beside(own), beside(files), monkeypatch)
            assert all(f"{item.where}{item.detail}".isprintable() for item in report.findings), path


def test_settings_of_a_processor_are_compared(files, monkeypatch):
    other = beside(files)
    for text, severity in (
        ('{"a": {"b": 2}, "chat_template": "x"}', Severity.ERROR),
        ('{"a": {"b": 1}, "chat_template": "x", "c": 1}', Severity.WARNING),
        ('{"a": {}, "chat_template": "x"}', Severity.ERROR),
        ('{"a": {"b": 1}, "chat_template": "y"}', Severity.ERROR),
    ):
        own = {**files, "processor_config.json": text.encode()}
        (item,) = told(beside(own), other, monkeypatch).findings
        assert (item.where, item.severity) == ("processor_config.json", severity)
