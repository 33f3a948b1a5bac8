"""Defects that a generator plants, over three formats of a tiny model: those that count are found by `verify`.

A sample of `scripts/verify_defects.py`, whose judge says which count without asking `verify`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from quantforge.runtime import linear
from quantforge_kernels import reference
from scripts.defects import artifacts, session
from scripts.defects.artifacts import Healthy
from scripts.defects.files import Copy
from scripts.defects.judge import judge
from tests.conftest import Tiny
from tests.runs import quantize, recipe

SEED, COUNT = 3, 14  # one of every kind
BASES = {
    artifacts.CT: ("m", {"method": "awq", "scheme": "int4:g32:sym"}),
    artifacts.GPTQ: ("q", {"scheme": "int4:g32:asym", "format": "gptq"}),
    artifacts.GGUF: ("m.gguf", {"type": "Q8_0", "format": "gguf"}),
}


@pytest.fixture(scope="module")
def bases(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Healthy]:
    source, place = tiny("llama-wide"), tmp_path_factory.mktemp("bases")
    made = []
    for family, (name, values) in BASES.items():
        quantize(source, place / name, recipe(**values))
        made.append(Healthy(name, family, lambda name=name: (place / name, source)))
    return made


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "select", lambda _problem: reference.KERNEL)


@pytest.mark.thorough
def test_defects_that_count_are_found(bases, tmp_path):
    tried = (session.tried(bases, SEED, number, tmp_path) for number in range(COUNT))
    records = [record for record in tried if record]
    counted = [record for record in records if record.counts]
    assert len(counted) >= 6
    assert len({record.family for record in counted}) == len(BASES)
    assert [record for record in counted if not record.found] == []
    assert not any(text.startswith("CRASH") for record in records for text in record.said)
    assert (
        Counter(record.alone for record in counted)[True] >= 2
    )  # some can be known without the source


def test_nothing_is_said_of_what_is_healthy_and_copies_leave_it_alone(bases, tmp_path):
    for healthy in bases:
        before = {path: path.read_bytes() for path in _files(healthy.path)}
        copy = Copy(healthy.path, tmp_path / healthy.name)
        assert judge(copy, healthy).reason == ""
        for source in (healthy.source, None):
            assert session.look(copy.path, source) == (False, [])
        for name in copy.names():
            copy.write(name, b"")
        assert {path: path.read_bytes() for path in _files(healthy.path)} == before


@pytest.mark.parametrize(
    ("factor", "counts"), [(1.0001, False), (1.5, True)], ids=["harmless", "harmful"]
)
def test_the_judge_has_two_sides(factor, counts, bases, tmp_path):
    from scripts.defects.files import parts_of

    copy = Copy(bases[0].path, tmp_path / "copy")
    weights = parts_of(copy)
    for part in weights.parts:
        if part.role == "scales" and "down_proj" in part.name:
            part.put(part.values() * factor)
    weights.save()
    with torch.inference_mode():
        assert judge(copy, bases[0]).counts is counts


def _files(path: Path) -> list[Path]:
    return [item for item in path.rglob("*") if item.is_file()] if path.is_dir() else [path]
