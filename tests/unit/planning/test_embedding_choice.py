"""Embedding and head: their share is reported, and they are quantized where no engine is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.settings import Policy, Settings
from tests import headers
from tests.conftest import Tiny
from tests.runs import run_command

DEMO = Path(__file__).parents[3] / "models" / "demo"


def embedding_note(plan) -> str:
    return next(note for note in plan.notes if "embedding and head: " in note)


def test_a_large_embedding_is_quantized_if_an_engine_loads_it(tiny: Tiny, tmp_path: Path) -> None:
    plan = api.plan(tiny("llama-wide"), bits=4, format="mlx", scales="absmax")
    assert embedding_note(plan).startswith("chosen: --embedding int8:row: ")
    embedding = next(item for item in plan.tensors if "embed_tokens" in item.name)
    assert str(embedding.scheme).startswith("int8:row")
    unquantized_plan = api.plan(
        tiny("llama-wide"), bits=4, format="mlx", scales="absmax", ignore=["embed_tokens"]
    )
    assert plan.output_bytes < unquantized_plan.output_bytes
    assert any(verdict.loads for verdict in plan.engines)
    assert plan.substitutions == ()
    wide = api.plan(tiny("llama-wide"), scheme="int4:g64:min", format="mlx", scales="absmax")
    assert "--embedding int8:row takes" in embedding_note(wide)
    assert wide.output_bytes == unquantized_plan.output_bytes
    strict = Settings(policy=Policy(strict=True))
    options = {"bits": 4, "format": "mlx", "scales": "absmax", "out": tmp_path / "q"}
    outcome = api.quantize(tiny("llama-wide"), settings=strict, **options)
    assert outcome.plan.output_bytes == plan.output_bytes
    assert 'embedding = "int8:row"' in manifest.read_manifest(tmp_path / "q")["recipe"]
    assert api.verify(tmp_path / "q", source=tiny("llama-wide")).findings == []


def test_the_embedding_is_kept_if_engines_would_be_lost(tiny: Tiny) -> None:
    plan = api.plan(tiny("llama-wide"), bits=4, scales="absmax")
    assert "--embedding int8:row takes" in embedding_note(plan)
    assert "transformers, vllm would not load it" in embedding_note(plan)
    assert all(item.scheme is None for item in plan.tensors if "embed_tokens" in item.name)


def test_the_embedding_note_names_a_tied_head() -> None:
    plan = api.plan(DEMO, bits=4, scales="absmax")
    assert "the head is tied to it" in embedding_note(plan)


def test_mlx_quantizes_a_tied_embedding_once(tmp_path: Path) -> None:
    options = {"bits": 4, "format": "mlx", "scales": "absmax", "method": "rtn"}

    def plan(**choices: str) -> tuple[dict[str, str], list[str]]:
        planned = api.plan(DEMO, **options, **choices)
        outer = {item.name: item for item in planned.tensors if item.block < 0}
        return {name: str(item.scheme) for name, item in outer.items() if "norm" not in name}, [
            note for note in planned.notes if "--embedding keep" in note
        ]

    name = "model.embed_tokens.weight"
    rounded, (note,) = plan()
    assert rounded == {name: "int4:g64:min:bf16"}
    assert f"{name}: BF16, 2.10 MB -> int4:g64:min:bf16, 590 kB" in note
    assert plan(embedding="keep") == ({name: "None"}, [])
    assert plan(embedding="int8:g64:min") == ({name: "int8:g64:min:bf16"}, [])
    assert plan(lm_head="int8:g64:min")[0] == {
        name: "int4:g64:min:bf16",
        "lm_head.weight": "int8:g64:min:bf16",
    }
    strict = Settings(policy=Policy(strict=True))
    api.quantize(DEMO, settings=strict, out=tmp_path / "q", **options)
    assert json.loads((tmp_path / "q" / "config.json").read_text())["tie_word_embeddings"] is True
    stored = load_file(tmp_path / "q" / "model.safetensors")
    outer = {key for key in stored if "layers" not in key and "norm" not in key}
    assert outer == {f"model.embed_tokens.{part}" for part in ("weight", "scales", "biases")}
    assert api.verify(tmp_path / "q", source=DEMO).findings == []


def test_a_tied_embedding_without_a_fitting_group_is_kept(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    narrow = headers.llama(tmp_path / "m", tie_word_embeddings=True, **sizes)
    planned = api.plan(narrow, scheme="int4:g32:min", format="mlx", scales="absmax", method="rtn")
    (embedding,) = [item for item in planned.tensors if "embed" in item.name]
    assert embedding.scheme is None
    assert embedding.name in {event.where for event in planned.substitutions}


def test_float16_scales_are_kept_in_mlx_exports(tmp_path: Path) -> None:
    options = {"scheme": "int4:g64:sym:f16", "method": "rtn", "scales": "absmax"}
    api.quantize(DEMO, out=tmp_path / "q", **options)
    moved = api.export(tmp_path / "q", format="mlx", out=tmp_path / "x")
    assert moved.verdict == "exact but for the embedding"
    assert [event.kind for event in moved.events] == ["embedding-quantized"]
    stored = load_file(tmp_path / "x" / "model.safetensors")
    for part in ("scales", "biases"):
        types = {str(value.dtype) for name, value in stored.items() if name.endswith(part)}
        assert types == {"torch.float16"}
    assert stored["model.embed_tokens.weight"].dtype == torch.uint32
    assert "but for the embedding" in (tmp_path / "x" / "README.md").read_text()
    assert api.verify(tmp_path / "x", source=DEMO).findings == []


def test_embedding_keep_applies_to_gguf() -> None:
    def embedding_type(**choices: str) -> str:
        planned = api.plan(DEMO, type="Q4_0", method="rtn", **choices)
        (embedding,) = [item for item in planned.tensors if "embed" in item.name]
        return str(embedding.scheme)

    assert (
        embedding_type(),
        embedding_type(embedding="keep"),
        embedding_type(embedding="q4_1"),
    ) == ("q6_k", "None", "q4_1")


def test_quantize_reports_the_share_of_embedding_and_head(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(
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
    assert "embedding and head: " in result.err
    assert "% of the bytes" in result.err
