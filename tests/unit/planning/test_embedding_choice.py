"""Embedding and head: their share is told, and with few bits they are rounded where nothing is lost by that."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantforge import verbs
from quantforge.results import manifest
from quantforge.settings import Policy, Settings
from tests.conftest import Tiny
from tests.runs import command

DEMO = Path(__file__).parents[3] / "models" / "demo"


def told(plan) -> str:
    return next(note for note in plan.notes if "embedding and head: " in note)


def test_where_an_engine_loads_it_a_large_embedding_is_rounded(tiny: Tiny, tmp_path: Path) -> None:
    plan = verbs.plan(tiny("llama-wide"), bits=4, format="mlx", scales="absmax")
    assert told(plan).startswith("chosen: --embedding int8:row: ")
    embedding = next(item for item in plan.tensors if "embed_tokens" in item.name)
    assert str(embedding.scheme).startswith("int8:row")
    kept = verbs.plan(
        tiny("llama-wide"), bits=4, format="mlx", scales="absmax", ignore=["embed_tokens"]
    )
    assert plan.output_bytes < kept.output_bytes
    assert any(verdict.loads for verdict in plan.engines)
    assert plan.substitutions == ()
    wide = verbs.plan(tiny("llama-wide"), scheme="int4:g64:min", format="mlx", scales="absmax")
    assert "--embedding int8:row takes" in told(wide)
    assert wide.output_bytes == kept.output_bytes
    strict = Settings(policy=Policy(strict=True))
    options = {"bits": 4, "format": "mlx", "scales": "absmax", "out": tmp_path / "q"}
    made = verbs.quantize(tiny("llama-wide"), settings=strict, **options)
    assert made.plan.output_bytes == plan.output_bytes
    assert 'embedding = "int8:row"' in manifest.read(tmp_path / "q")["recipe"]
    assert verbs.verify(tmp_path / "q", source=tiny("llama-wide")).findings == []


def test_no_engine_is_lost_by_a_choice(tiny: Tiny) -> None:
    plan = verbs.plan(tiny("llama-wide"), bits=4, scales="absmax")
    assert "--embedding int8:row takes" in told(plan)
    assert "transformers, vllm would not load it" in told(plan)
    assert all(item.scheme is None for item in plan.tensors if "embed_tokens" in item.name)


def test_a_tied_head_would_be_stored_on_its_own() -> None:
    plan = verbs.plan(DEMO, bits=4, scales="absmax")
    assert "the head is tied to it" in told(plan)


def test_the_share_is_told_at_the_end(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = command(
        capsys,
        "quantize",
        tiny("llama-wide"),
        "--bits",
        4,
        "--scales",
        "absmax",
        "-o",
        tmp_path / "q",
    )
    assert "embedding and head: " in ended.err
    assert "% of the bytes" in ended.err
