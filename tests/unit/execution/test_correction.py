"""Corrections of low rank: nearer to the source, the same bytes after any interruption, refused by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import verbs
from quantforge.errors import InputError, IntegrityError, QuantForgeError, RefusedError, UsageError
from quantforge.execution.progress import Progress
from quantforge.results import manifest
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.runs import ROWS, StopError, command, ended, forked, leftovers, quantize, swift, tree

RANK = 4
FEW = {"samples": 6, "length": 24}


def corrected(model: Path, base: Path, out: Path, **settings: Any) -> verbs.Corrected:
    return verbs.correct(model, base, out, rank=RANK, settings=Settings(**settings), **FEW)


def at(step: str, act: Callable[[], object]) -> Callable[[Progress], None]:
    """Return a listener that acts when a step begins."""

    def listen(told: Progress) -> None:
        if told.step == step:
            act()

    return listen


def stop() -> None:
    raise StopError


@pytest.fixture
def base(tiny: Tiny, tmp_path: Path) -> tuple[Path, Path]:
    """A source and a quantized form of it."""
    model, out = tiny("llama-wide"), tmp_path / "q"
    quantize(model, out, swift("gptq", scheme="int3:g32:sym"))
    return model, out


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("llama-wide", "gptq", {"scheme": "int3:g32:sym"}),
        ("llama-wide", "awq+gptq", {"scheme": "int4:g32:sym", "format": "awq"}),
        ("llama-wide", "gptq", {"scheme": "int4:g32:sym", "format": "gptq"}),
        ("llama-wide", "rtn", {"scheme": "nf4", "format": "bnb"}),
        ("gpt2", "rtn", {"scheme": "int3:g32:sym"}),
        ("phi3", "rtn", {"scheme": "int3:g32:sym"}),
    ],
)
def test_it_is_nearer_to_its_source(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    method: str,
    options: dict[str, Any],
) -> None:
    model, out, place = tiny(family), tmp_path / "q", tmp_path / "q-lora16"
    quantize(model, out, swift(method, **options))
    before = tree(out)
    made = command(capsys, "correct", model, out, "--rank", 16, *ROWS)
    assert (made.code, made.out.strip().endswith("q-lora16")) == (0, True), made.err
    assert tree(out) == before
    measured = ("eval", model, out, "--windows", 2, "--length", 32, "--json")
    without = json.loads(command(capsys, *measured, "--no-speed").out)["models"][1]
    document = json.loads(command(capsys, *measured, "--correction", place).out)
    row = document["models"][1]
    assert document["protocol"]["correction"].startswith("q-lora16 (SHA-256 ")
    assert row["kl_mean"] < 0.9 * without["kl_mean"]
    halves = load_file(place / "adapter_model.safetensors")
    size = sum(value.nbytes for value in halves.values())
    assert row["weight_bytes"] == without["weight_bytes"] + size
    assert row["scheme"] == f"{without['scheme']} + rank 16"
    assert row["decode_tokens_per_second"] is None  # no engine was asked
    assert str(tmp_path) not in (place / manifest.NAME).read_text()


def test_what_is_killed_goes_on_to_the_same_bytes(base: tuple[Path, Path], tmp_path: Path) -> None:
    model, quantized = base
    corrected(model, quantized, tmp_path / "whole", threads=1)
    whole = tree(tmp_path / "whole")
    for number, step in enumerate(("model.layers.0: observing", "model.layers.1: mlp.up_proj")):
        out = tmp_path / f"killed-{number}"

        def work(out: Path = out, step: str = step) -> None:
            kill = at(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
            corrected(model, quantized, out, progress=kill)

        assert ended(forked(work, tmp_path / "errors")) == -signal.SIGKILL
        assert not out.exists()
        made = corrected(model, quantized, out, threads=2, activations="disk")
        assert (made.resumed, tree(out)) == (number > 0, whole)
    assert not any(name.endswith(".qf") for name in leftovers(tmp_path / "whole"))


def test_what_was_written_is_compared_and_another_run_is_refused(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    model, quantized = base
    out = tmp_path / "a"
    with pytest.raises(StopError):
        corrected(model, quantized, out, progress=at("model.layers.1: observing", stop))
    with pytest.raises(IntegrityError, match="differs in: rank"):
        verbs.correct(model, quantized, out, rank=2, **FEW)  # type: ignore[arg-type]
    (file,) = (tmp_path / ".a.qf").rglob("adapter_model.safetensors")
    data = bytearray(file.read_bytes())
    data[int.from_bytes(data[:8], "little") + 9] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="not as the interrupted run has written it"):
        corrected(model, quantized, out)


def test_nothing_is_replaced_unasked(base: tuple[Path, Path], tmp_path: Path) -> None:
    model, quantized = base
    corrected(model, quantized, tmp_path / "a")
    with pytest.raises(RefusedError, match="exists"):
        corrected(model, quantized, tmp_path / "a")
    verbs.correct(
        model, quantized, tmp_path / "a", rank=2, settings=Settings(overwrite=True), **FEW
    )
    (config,) = (tmp_path / "a").glob("adapter_config.json")
    assert json.loads(config.read_text())["r"] == 2


def test_what_cannot_be_corrected_is_refused(
    tiny: Tiny, base: tuple[Path, Path], tmp_path: Path
) -> None:
    model, quantized = base
    file, experts, plain = (tmp_path / name for name in ("q.gguf", "experts", "plain"))
    quantize(model, file, swift(format="gguf", type="Q8_0", scales="absmax"))
    quantize(tiny("mixtral"), experts, swift(scheme="int4:g32:sym"))
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][0, 0] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    shutil.copytree(model, plain)
    cases: list[tuple[type[QuantForgeError], str, Path, Path, int]] = [
        (UsageError, "--rank 0", model, quantized, 0),
        (UsageError, r"--rank 65: model\.layers\.0\.self_attn\.k_proj is \[64, 128\]", model, quantized, 65),
        (RefusedError, "PEFT puts no adapter on a GGUF file", model, file, RANK),
        (RefusedError, "PEFT names no parts", tiny("mixtral"), experts, RANK),
        (RefusedError, "no linear of its blocks is quantized", model, plain, RANK),
        (IntegrityError, "by its manifest, it was made from", other, quantized, RANK),
        (IntegrityError, "swapped", quantized, model, RANK),
    ]  # fmt: skip
    for kind, words, source, result, rank in cases:
        with pytest.raises(kind, match=words):
            verbs.correct(source, result, tmp_path / "a", rank=rank, **FEW)  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


def test_figures_that_are_not_finite_leave_nothing(
    tiny: Tiny, base: tuple[Path, Path], tmp_path: Path
) -> None:
    model, quantized = base
    place = quantized / "model.safetensors"
    tensors = load_file(place)
    norm = next(name for name in tensors if "layers.1.input_layernorm" in name)
    tensors[norm].fill_(torch.nan)
    save_file(tensors, place, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"not finite|nan"):
        corrected(model, quantized, tmp_path / "a")
    assert not any(name.endswith(".qf") for name in leftovers(tmp_path / "a"))


def test_a_correction_is_measured_on_its_own_model_alone(
    tiny: Tiny, base: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, quantized = base
    out, other = tmp_path / "a", tmp_path / "other"
    corrected(model, quantized, out)
    quantize(model, other, swift(scheme="int3:g32:sym"))
    few = ("--windows", 2, "--length", 32, "--no-speed", "--correction", out)
    for words, code, said in (
        ((model, quantized, other), 2, "of one model, and for no card"),
        ((model,), 2, "of one model"),
        ((model, quantized, "--card", quantized), 2, "for no card"),
        ((model, other), 5, "made for another model than"),
    ):
        refused = command(capsys, "eval", *words, *few)
        assert (refused.code, said in refused.err) == (code, True), refused.err
    (out / manifest.NAME).unlink()  # somebody's, of another family
    quantize(tiny("llama"), tmp_path / "l", swift(scheme="int3:g32:sym"))
    refused = command(capsys, "eval", tiny("llama"), tmp_path / "l", *few)
    assert (refused.code, "the adapter changes model.layers.0" in refused.err) == (3, True)
