"""Whole runs: unquantized tensors are exact, rounded ones near, scales measured, progress reported."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantforge.api.job import Job
from quantforge.artifacts import manifest
from quantforge.execution import execute as execution
from quantforge.execution import unit_output
from quantforge.execution.run_inputs import RunInputs
from quantforge.files.reader import open_checkpoint
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.open_model import open_model
from quantforge.progress import Progress
from tests.conftest import Tiny
from tests.runs import StopError, crash_after, fast_recipe, file_digests, quantize, recipe
from tests.thorough import parametrize_each_value, thorough_case


def errors(source: Path, out: Path) -> dict[str, float]:
    """Return the relative errors of all decoded tensors of a result."""
    before, after = open_checkpoint(source), decode_checkpoint(open_model(out))
    relative_errors = {}
    for name in after.entries:
        source_name = name if name in before.entries else "model.embed_tokens.weight"
        value, expected = after.read(name).double(), before.read(source_name).double()
        relative_errors[name] = float((value - expected).norm() / expected.norm())
    assert before.entries.keys() <= relative_errors.keys()
    return relative_errors


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("gpt2", {"method": "gptq", "scheme": "int8:row:sym"}),
        ("llama-tied", {"method": "rtn", "scheme": "int8:row:sym", "lm_head": "int8:row:sym", "scales": "absmax"}),
        thorough_case("llama-wide", {"method": "gptq", "bits": 8}),
        thorough_case("llama-wide", {"method": "rtn", "bits": 8, "scales": "absmax"}),
        thorough_case("gpt2", {"method": "rtn", "scheme": "int8:row:sym", "scales": "absmax"}),
        thorough_case("llama-tied", {"method": "gptq", "scheme": "int8:row:sym", "lm_head": "int8:row:sym"}),
    ],
)  # fmt: skip
def test_every_tensor_is_exact_or_within_rounding_error(
    tiny: Tiny, out: Path, monkeypatch: pytest.MonkeyPatch, family: str, values: dict[str, Any]
) -> None:
    monkeypatch.setattr(
        unit_output, "COPY_STRIP_BYTES", 1000
    )  # what is copied is copied in many runs of rows
    done = quantize(tiny(family), out, recipe(**values))
    relative_errors = errors(tiny(family), out)
    rounded = {tensor.name for tensor in done.plan.quantized()}
    assert len(rounded) >= 8
    assert ("lm_head.weight" in rounded) == ("lm_head" in values)
    assert {name: error for name, error in relative_errors.items() if not error < 0.02} == {}
    assert {name for name, error in relative_errors.items() if error} == rounded


def test_progress_reports_each_part_in_order(model: Path, out: Path) -> None:
    reports: list[Progress] = []
    quantize(model, out, fast_recipe("gptq"), progress=reports.append)
    reports = [report for report in reports if report.part]
    assert [report.part for report in reports] == ["outer", "block 0", "block 1", "head"]
    assert [(report.done, report.total) for report in reports] == [(n, 4) for n in (1, 2, 3, 4)]
    tensors = (manifest.read_manifest(out) or {})["tensors"]
    for number, report in enumerate(reports[1:3]):
        recorded = [
            tensor["error"]
            for tensor in tensors
            if f".{number}." in tensor["name"] and "error" in tensor
        ]
        assert len(recorded) == 7
        assert report.error == pytest.approx(sum(recorded) / 7, rel=1e-2)
    assert reports[0].error is None
    assert all(0 <= report.seconds < 600 for report in reports)
    assert 2**27 < reports[0].peak_bytes == reports[0].peak_bytes // 1024 * 1024 < 2**37


@parametrize_each_value(("method", ["rtn", "smooth"]), ("scheme", ["int8:row:sym", "W8A8_STATIC"]))
def test_kv_cache_scales_match_the_peaks_of_the_model(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, method: str, scheme: str
) -> None:
    rows: list[Tensor] = []
    read = Job.read_inputs

    def noted(job: Job) -> RunInputs:
        inputs = read(job)
        assert inputs.sample is not None
        rows.append(inputs.sample.ids)
        return inputs

    monkeypatch.setattr(Job, "read_inputs", noted)
    quantize(model, out, recipe(method, scheme=scheme, kv_cache="fp8"))
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    after = decode_checkpoint(open_model(out))
    whole.load_state_dict({name: after.read(name).float() for name in whole.state_dict()})
    with torch.inference_mode():
        cache = whole(rows[0], use_cache=True).past_key_values
    written = open_checkpoint(out)
    names = [name for name in written.entries if name.endswith(("k_scale", "v_scale"))]
    assert len(names) == 4
    for block, layer in enumerate(cache.layers):
        for kind, states in (("k", layer.keys), ("v", layer.values)):
            scale = written.read(f"model.layers.{block}.self_attn.{kind}_scale").float()
            assert float(scale) == pytest.approx(float(states.abs().max()) / 448, rel=0.03)


def test_a_model_of_one_block_resumes(model: Path, out: Path, tmp_path: Path) -> None:
    """The parts before and after the only block, and the block itself."""
    config = AutoModelForCausalLM.from_pretrained(model).config
    config.num_hidden_layers = 1
    config.layer_types = None
    torch.manual_seed(0)
    small = tmp_path / "m"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(small)
    (small / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    recipe = fast_recipe("gptq", scheme="int8:g128:sym")
    with pytest.raises(StopError):
        quantize(small, out, recipe, progress=crash_after("outer"))
    assert quantize(small, out, recipe).resumed
    assert {round(error, 1) for error in errors(small, out).values()} == {0}
    assert any(error > 0 for error in errors(small, out).values())


def test_the_progress_share_grows_with_every_step(tiny: Tiny, tmp_path: Path) -> None:
    reports: list[Progress] = []
    quantize(
        tiny("qwen3-moe"),
        tmp_path / "q",
        fast_recipe("awq+gptq", scheme="int4:g32:sym"),
        progress=reports.append,
    )
    blocks: dict[str, dict[str, float]] = {}
    for report in reports:
        if report.step.startswith("block"):
            blocks.setdefault(report.step.partition(":")[0].split(" of ")[0], {}).setdefault(
                report.step, report.share
            )
    for number in (0, 2):
        steps = blocks[f"block {number}"]
        kinds = [step.partition(": ")[2].split(" ")[0] for step in steps if ":" in step]
        assert kinds[:2] == ["observing", "awq"]
        assert set(kinds[2:]) == {"rounding"}
        assert len(kinds) >= 4
        shares = [share for step, share in steps.items() if ":" in step]
        assert all(first < second for first, second in pairwise(shares)), steps
        experts = [blocks[f"block {number} expert {report}"].popitem()[1] for report in range(4)]
        assert shares[-1] <= experts[-1]
        assert all(first < second for first, second in pairwise(experts[1:]))
        after = next(report.share for report in reports if report.part == f"block {number}")
        assert experts[0] < after - (experts[3] - experts[2]) / 2
    assert reports[-1].share == 1


def test_part_seconds_sum_to_at_most_the_run(tiny: Tiny, tmp_path: Path) -> None:
    """The seconds of an expert are not counted again in those of its block."""
    reports: list[Progress] = []
    times: list[float] = []

    def listen(report: Progress) -> None:
        if report.part:
            reports.append(report)
            times.append(time.monotonic())

    quantize(
        tiny("mixtral"), tmp_path / "q", fast_recipe("gptq", scheme="int4:g32:sym"), progress=listen
    )
    assert len(reports) == 2 + 3 * 5
    assert all(part_report.seconds >= 0 for part_report in reports)
    assert all(part_report.seconds > 0 for part_report in reports if "expert" in part_report.part)
    assert sum(part_report.seconds for part_report in reports[1:]) <= times[-1] - times[0]


@pytest.mark.parametrize(
    ("family", "values"),
    [thorough_case("llama", {}), ("mixtral", {}), ("gpt-oss", {"ignore": ("*experts*",)})],
)
def test_the_head_hessian_matches_the_final_hidden_states(
    tiny: Tiny, out: Path, monkeypatch: pytest.MonkeyPatch, family: str, values: dict[str, Any]
) -> None:
    """The states pass every block and expert once, whether it is quantized or not."""
    model = tiny(family)
    seen: list[Any] = []
    observe, read = execution.observe_head, Job.read_inputs

    def noted(planned: Any, stream: Any) -> Any:
        seen.append(observe(planned, stream))
        return seen[-1]

    def sampled(job: Job) -> RunInputs:
        inputs = read(job)
        assert inputs.sample is not None
        seen.append(inputs.sample.ids)
        return inputs

    monkeypatch.setattr(execution, "observe_head", noted)
    monkeypatch.setattr(Job, "read_inputs", sampled)
    recipe = fast_recipe("gptq", scheme="int8:row:sym", lm_head="int8:row:sym")
    quantize(model, out, replace(recipe, **values))
    rows, statistics = seen
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        states = whole.model(rows).last_hidden_state
    states = states.reshape(-1, states.shape[-1])
    expected = states.T @ states
    hessian = statistics.hessian / statistics.hessian.trace()
    torch.testing.assert_close(hessian, expected / expected.trace(), rtol=1e-3, atol=1e-5)
    assert statistics.tokens == rows.numel()


def test_hidden_states_go_to_disk_only_on_request(model: Path, tmp_path: Path) -> None:
    """They are in an unnamed file, which disappears with the process."""
    for where in ("memory", "disk"):
        open_links: list[str] = []

        def listen(report: Progress, links: list[str] = open_links) -> None:
            if report.part == "block 0":
                for descriptor in Path("/proc/self/fd").iterdir():
                    with suppress(OSError):
                        links.append(str(descriptor.readlink()))

        quantize(model, tmp_path / where, fast_recipe("gptq"), progress=listen, activations=where)
        beside = str(tmp_path / f".{where}.qf")
        unnamed = [
            link for link in open_links if link.startswith(beside) and link.endswith("(deleted)")
        ]
        assert bool(unnamed) == (where == "disk")
    assert file_digests(tmp_path / "memory") == file_digests(tmp_path / "disk")
