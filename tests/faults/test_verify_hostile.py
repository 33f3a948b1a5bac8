"""Odd values in side files give findings or none, but no Python error and no unescaped text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quantforge.verification.consistency import find_contradictions
from quantforge.verification.findings import Report
from quantforge.verification.side_files import SideFiles, compare_files
from tests import peers
from tests.faults.test_verify_configuration import json_paths, with_value

ODD_VALUES: tuple[Any, ...] = (
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
    contents = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in {".json", ".jinja"}
    }
    return {**contents, **ADDED}


def side_files(files: dict[str, bytes]) -> SideFiles:
    rest = {name: data for name, data in files.items() if name != CONFIG}
    return SideFiles(json.loads(files[CONFIG]), rest)


def check_files(edited_files: SideFiles, other: SideFiles) -> Report:
    report = Report(peers.FIXTURES)
    compare_files(report, edited_files, other)
    find_contradictions(report, edited_files, 100)
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
def test_odd_values_in_side_files_raise_no_error(name, files):
    chosen = random.Random(name)
    document = json.loads(files[name])
    paths = [
        path
        for path in json_paths(document)
        if not {"vocab", "merges"} & set(path) or chosen.random() < 0.02
    ]
    for path in chosen.sample(paths, min(len(paths), 25)):
        for value in chosen.sample(ODD_VALUES, 2):
            edited = {**files, name: json.dumps(with_value(document, path, value)).encode()}
            report = check_files(side_files(edited), side_files(files))
            assert all(f"{item.where}{item.detail}".isprintable() for item in report.findings), path
