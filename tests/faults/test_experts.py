"""Whole runs on mixtures of experts: events, refusals, resuming between experts, and GPTQ against RTN."""

from __future__ import annotations

import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.errors import InputError, RefusedError
from quantforge.events import Policy
from quantforge.execution import calibrated_experts, claims
from quantforge.execution.calibrated_experts import few_token_events
from quantforge.execution.unit_output import UnitOutput
from quantforge.files.reader import open_checkpoint
from quantforge.formats.decoded import decode_checkpoint
from quantforge.model.expert_statistics import ExpertStatistics
from quantforge.model.experts import RoutedTokens
from quantforge.runtime.load import load
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.equivalence.test_expert_statistics import arguments, intermediate, mean
from tests.runs import (
    CALIBRATION,
    StopError,
    copy_model,
    crash_after,
    fast_recipe,
    file_digests,
    fork_child,
    quantize,
    wait_for_exit_code,
)
from tests.thorough import thorough_case

SCHEME = "int4:g32:sym"
MORE = replace(CALIBRATION, samples=40, length=64)


def manifest(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "quantforge.manifest.json").read_text())
    return document


@pytest.mark.thorough
def test_shared_expert_run_survives_a_killed_worker(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LEASE_SECONDS", 1.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    recipe = replace(fast_recipe("awq+gptq", scheme=SCHEME), ignore=("*experts.[02].up_proj",))
    quantize(tiny("qwen3-moe"), tmp_path / "m", recipe)
    out, written = tmp_path / "out", UnitOutput.write
    calls = itertools.count()

    def killed() -> None:
        def counted(*arguments: Any) -> None:
            if next(calls) == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            written(*arguments)

        monkeypatch.setattr(UnitOutput, "write", counted)
        quantize(tiny("qwen3-moe"), out, recipe, join=True)

    assert wait_for_exit_code(fork_child(killed, tmp_path / "m-errors")) == -signal.SIGKILL
    assert [path.name for path in (tmp_path / ".out.qf/units").glob("*/*.held")] == ["0001.1.held"]
    parts: list[str] = []
    quantize(
        tiny("qwen3-moe"), out, recipe, join=True, progress=lambda done: parts.append(done.part)
    )
    # The rows had passed the experts of block 0 before these were rounded, so that block 1 need not wait.
    assert next(filter(None, parts)) == "block 1"
    assert sorted(filter(None, parts)) == ["block 0", "block 1", "block 2"]
    assert file_digests(out) == file_digests(tmp_path / "m")


BETWEEN = ("block 0 expert 1", "block 2 expert 3")


@pytest.mark.parametrize(
    ("method", "parts"), [thorough_case("awq+gptq", BETWEEN), ("gptq", BETWEEN[:1])]
)
def test_a_crash_between_two_experts_resumes_to_the_same_bytes(
    tiny: Tiny, tmp_path: Path, method: str, parts: tuple[str, ...]
) -> None:
    recipe = fast_recipe(method, scheme=SCHEME, rules=())
    recipe = replace(recipe, ignore=("*experts.[02].up_proj",))  # take factors, and stay
    quantize(tiny("qwen3-moe"), tmp_path / "m", recipe)
    for part in parts:
        out = tmp_path / part[-1]
        with pytest.raises(StopError):
            quantize(tiny("qwen3-moe"), out, recipe, progress=crash_after(part))
        again: list[str] = []
        quantize(tiny("qwen3-moe"), out, recipe, progress=lambda done, a=again: a.append(done.part))
        assert part not in again
        assert "block 0 expert 0" not in again
        assert next(filter(None, again)) == (
            "block 0 expert 2" if part == "block 0 expert 1" else "block 2"
        )
        assert file_digests(out) == file_digests(tmp_path / "m"), part


def test_threads_and_disk_do_not_change_expert_output(tiny: Tiny, tmp_path: Path) -> None:
    recipe = fast_recipe("gptq", scheme=SCHEME)
    for name, settings in {
        "one": Settings(threads=1),
        "other": Settings(threads=3, activations="disk"),
    }.items():
        api.quantize(str(tiny("mixtral")), recipe, tmp_path / name, settings)
    assert file_digests(tmp_path / "one") == file_digests(tmp_path / "other")


def test_experts_with_few_tokens_are_reported_and_counted(tiny: Tiny, tmp_path: Path) -> None:
    done = quantize(tiny("mixtral"), tmp_path / "q", fast_recipe("gptq", scheme=SCHEME))
    few = [event for event in done.events if event.kind == "expert-few-tokens"]
    assert [event.where for event in few] == [f"model.layers.{i}.mlp.experts" for i in range(3)]
    assert "4 of 4 experts saw fewer than 128 tokens: " in few[0].detail
    tensors = {tensor["name"]: tensor for tensor in manifest(tmp_path / "q")["tensors"]}
    name = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
    for layer in range(3):
        counts = [
            tensors[name.format(layer, expert, "w1")]["calibration_tokens"] for expert in range(4)
        ]
        assert sum(counts) == 2 * 6 * 24
        assert counts == [
            tensors[name.format(layer, e, "w2")]["calibration_tokens"] for e in range(4)
        ]
    quiet = fast_recipe(
        "gptq", scheme=SCHEME, calibration=replace(CALIBRATION, min_expert_tokens=0)
    )
    again = quantize(tiny("mixtral"), tmp_path / "quiet", quiet)
    assert not [event for event in again.events if event.kind == "expert-few-tokens"]
    with pytest.raises(RefusedError, match="expert-few-tokens"):
        quantize(
            tiny("mixtral"), tmp_path / "strict", fast_recipe("gptq", scheme=SCHEME),
            policy=Policy(strict=True, allow={"few-calibration-tokens": 9, "substitution": 99}),
        )  # fmt: skip


def test_an_event_lists_the_experts_with_the_fewest_tokens() -> None:
    for few, more in ((8, ""), (9, ", ...")):
        counts = {number: number % 3 for number in range(few)}
        (event,) = few_token_events("mlp", {**counts, 98: 5}, 5)  # which is enough
        least = sorted((count, number) for number, count in counts.items())[:8]
        listed = ", ".join(f"{number} ({count})" for count, number in least)
        assert event.where == "mlp"
        assert event.detail.endswith(f"fewer than 5 tokens: {listed}{more}")
    assert few_token_events("mlp", {0: 5, 1: 6}, 5) == []


@pytest.mark.parametrize("experts", [thorough_case("routed"), "all"])
def test_expert_tokens_option_selects_the_calibration_tokens(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    all_tokens: list[bool] = []

    class Noted(ExpertStatistics):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            all_tokens.append(named["all_tokens"])
            super().__init__(*arguments, **named)

    monkeypatch.setattr(calibrated_experts, "ExpertStatistics", Noted)
    recipe = fast_recipe(
        "gptq", scheme=SCHEME, calibration=replace(CALIBRATION, expert_tokens=experts)
    )
    quantize(tiny("mixtral"), tmp_path / "q", recipe)
    assert set(all_tokens) == {experts == "all"}


LEAVES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize(
    ("family", "experts"), [thorough_case("mixtral", "all"), ("qwen3-moe", "routed")]
)
def test_gptq_has_less_expert_error_than_rtn(
    tiny: Tiny, tmp_path: Path, family: str, experts: str
) -> None:
    """The errors are summed over the experts, on tokens outside the calibration set."""
    states, index, weights, module = arguments(tiny(family))
    before = open_checkpoint(tiny(family))
    mixture, *leaves = LEAVES[family]
    errors = {}
    for method in ("rtn", "gptq"):
        calibration = replace(MORE, expert_tokens=experts)
        recipe = fast_recipe(method, scheme="int3:g32:asym", calibration=calibration)
        quantize(tiny(family), tmp_path / method, recipe)
        after = decode_checkpoint(open_checkpoint(tmp_path / method))
        errors[method] = 0.0
        for number in range(4):
            tokens, slot = (index == number).nonzero(as_tuple=True)
            x, router = states[tokens], weights[tokens, slot]
            inner = intermediate(module, x, number, family)
            for leaf, read in zip(leaves, (x, x, inner), strict=True):
                name = f"model.layers.2.{mixture}.experts.{number}.{leaf}.weight"
                wrong = after.read(name).double() - before.read(name).double()
                errors[method] += float((wrong @ mean(read, router) * wrong).sum())
    assert 0 < errors["gptq"] < 0.9 * errors["rtn"]


def test_an_expert_without_tokens_is_still_quantized(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = RoutedTokens.record

    def never_three(self: Any, row: int, states: Any, index: Any, weights: Any) -> None:
        keep(self, row, states, torch.where(index == 3, 0, index), weights)

    monkeypatch.setattr(RoutedTokens, "record", never_three)
    done = quantize(tiny("mixtral"), tmp_path / "q", fast_recipe("awq+gptq", scheme=SCHEME))
    assert "3 (0)" in next(e.detail for e in done.events if e.kind == "expert-few-tokens")
    assert "rtn-fallback" not in {event.kind for event in done.events}
    model = load(tmp_path / "q").model
    assert all(bool(value.isfinite().all()) for value in model.parameters())


@pytest.mark.parametrize("method", [thorough_case("rtn"), "smooth+gptq"])
def test_static_input_scales_of_experts_are_measured(
    tiny: Tiny, tmp_path: Path, method: str
) -> None:
    quantize(tiny("mixtral"), tmp_path / "q", fast_recipe(method, scheme="W8A8_STATIC"))
    stored = load_file(tmp_path / "q" / "model.safetensors")
    scales = {
        name: value
        for name, value in stored.items()
        if ".experts." in name and "input_scale" in name
    }
    assert len(scales) == 3 * 4 * 3
    for name, value in scales.items():
        assert float(value) > 0
        if ".w1." in name:
            assert torch.equal(value, scales[name.replace(".w1.", ".w3.")])


def test_a_nan_in_an_expert_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    source = copy_model(tiny("mixtral"), tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    weights[name][3, 5] = torch.nan
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=name):
        quantize(source, tmp_path / "q", fast_recipe("gptq", scheme=SCHEME))
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda stack: torch.cat((stack, stack[:1])),
            r"shape \[5, 256, 64\].*asks for \[4, 256, 64\]",
        ),
        (lambda stack: stack[:3].clone(), r"shape \[3, 256, 64\].*asks for \[4, 256, 64\]"),
        (lambda stack: torch.cat((stack, stack[:, :1]), 1), r"shape \[4, 257, 64\]"),
    ],
    ids=["more", "fewer", "odd"],
)
def test_a_misshapen_expert_stack_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, change: Any, words: str
) -> None:
    model = copy_model(tiny("granitemoe"), tmp_path / "m")
    file = model / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.block_sparse_moe.input_linear.weight"
    save_file({**tensors, name: change(tensors[name])}, file, metadata={"format": "pt"})
    for method in ("rtn", "gptq"):
        with pytest.raises(InputError, match=words):
            quantize(model, tmp_path / "q", fast_recipe(method, scheme=SCHEME))
    assert not (tmp_path / "q").exists()
