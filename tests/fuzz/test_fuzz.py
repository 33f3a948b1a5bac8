"""Every parser parses or refuses its corpus and 400 damaged copies; for longer runs see `scripts/fuzz.py`."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.engine import fuzz
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.targets import CORPUS, TARGETS, seeds


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs_are_parsed_or_refused(name: str) -> None:
    outcome = fuzz(name, executions=400)
    assert not outcome.findings
    assert outcome.executions == 400
    assert outcome.accepted, "the corpus is read"


def test_every_corpus_has_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


def test_mutation_is_deterministic_and_reaches_past_headers() -> None:
    """A generator that only made noise would leave every parser at its first check."""
    corpus = seeds("safetensors")
    first, second = (
        [mutate_bytes(corpus[0], corpus, random.Random(n)) for n in range(300)] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) > 250
    framed = [
        data
        for data in first
        if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data)
    ]
    assert len(framed) > 150
