"""Tuning lowers the divergence within its bounds, and runs resume with the same bytes."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import export, plan
from quantforge.errors import IntegrityError, RefusedError, UsageError
from quantforge.execution import run_tuning as tuning
from quantforge.files.reader import open_checkpoint
from quantforge.model.block import DecoderBlock
from quantforge.numerics import products
from quantforge.quantizers import tuning as tuning_bounds
from quantforge.quantizers.tuning import tuned_block, tuned_matrix
from quantforge.quantizers.tuning.tuning_stream import TuningStream
from quantforge.runtime.load import load
from quantforge.verification.verify import verify
from quantforge_files.opener import Opener
from quantforge_files.roles import NO_LIMIT, FileRole
from tests.conftest import Tiny, make_tiny
from tests.runs import (
    CALIBRATION,
    StopError,
    copy_model,
    crash_after,
    fast_recipe,
    file_digests,
    quantize,
)
from tests.thorough import thorough_case

FILE = "tune-block-0.bin"
ROWS = replace(CALIBRATION, samples=16, length=24)
SCHEME = "int2:g32:asym"


def tuned(method: str = "gptq", **choices: Any) -> Any:
    choices = {
        "scheme": SCHEME,
        "tune": 2,
        "calibration": ROWS,
        "format": "compressed-tensors",
    } | choices
    return fast_recipe(method, **choices)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Return a function from the name of a family to a tiny model of two blocks. Do not write into it."""

    @cache
    def make(family: str) -> Path:
        return make_tiny(family, tmp_path_factory.mktemp(family), num_hidden_layers=2)

    return make


@pytest.fixture(scope="module")
def result(short: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a run made that nothing interrupted. Do not write into it."""
    out = tmp_path_factory.mktemp("tuned") / "whole"
    quantize(short("llama"), out, tuned())
    return out


@pytest.fixture(scope="module")
def whole(result: Path) -> dict[str, str]:
    """Return the files of that run."""
    return file_digests(result)


@pytest.fixture(scope="module")
def behind_awq(short: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "opt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_bounds, "MAX_CODE_RATE", 1.0)
        every_epoch_is_better(patch)
        quantize(short("opt"), out, tuned("awq+gptq", scheme="int3:g16:sym", tune=1))
    return out


def every_epoch_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what was learned be kept, whatever it did."""
    better = itertools.count(1000, -1)
    monkeypatch.setattr(TuningStream, "_error", lambda *_: float(next(better)))
    monkeypatch.setattr(TuningStream, "_divergence", lambda *_: float(next(better)))


@pytest.mark.parametrize(
    ("family", "method", "format_key", "epochs"),
    [
        ("gemma2", "gptq", "gptq", 1),
        ("gpt2", "gptq", "compressed-tensors", 3),
        thorough_case("gemma2", "awq+gptq", "compressed-tensors", 1),
    ],
)
def test_tuning_changes_only_scales_codes_and_norms(
    short: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    family: str, method: str, format_key: str, epochs: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        tuning_bounds, "MAX_CODE_RATE", 1.0
    )  # a few steps are too few for codes else
    every_epoch_is_better(monkeypatch)
    for name, times in (("plain", 0), ("tuned", epochs)):
        quantize(short(family), tmp_path / name, tuned(method, tune=times, format=format_key))
    plain, other = (open_checkpoint(tmp_path / name) for name in ("plain", "tuned"))
    changed = {
        name for name in plain.entries if not torch.equal(plain.read(name), other.read(name))
    }
    assert any(name.endswith("scale") or name.endswith("scales") for name in changed)
    assert any("weight_packed" in name or "qweight" in name for name in changed)
    for name in changed:
        if "scale" in name:
            ratios = other.read(name).float() / plain.read(name).float()
            assert 0.49 < float(ratios.min()) <= float(ratios.max()) < 1.51
        elif "weight_packed" not in name and "qweight" not in name:
            assert "norm" in name or "ln_" in name, name
    report = verify(tmp_path / "tuned", short(family), forward=False)
    assert report.findings == []


@pytest.mark.parametrize(("family", "method"), [("llama", "gptq"), ("gpt2", "awq+gptq")])
def test_block_tuning_inputs_and_targets_are_correct(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, method: str
) -> None:
    reached, expected, rows = dict[int, torch.Tensor](), dict[int, torch.Tensor](), []
    tune = TuningStream.tune_block

    def noted(self: TuningStream, part: DecoderBlock, *arguments: Any) -> Any:
        reached[part.index] = self._result_input(part.index)(3).states.clone()
        expected[part.index] = self._states.read(3, 4).clone()
        rows.append(self._rows[3:4])
        return tune(self, part, *arguments)

    every_epoch_is_better(monkeypatch)
    monkeypatch.setattr(TuningStream, "tune_block", noted)
    quantize(tiny(family), tmp_path / "out", tuned(method, tune=1))
    states = []
    for path in (tmp_path / "out", tiny(family)):
        with torch.no_grad():
            states.append(load(path).model(rows[0], output_hidden_states=True).hidden_states)
    result, source = states
    assert float((result[2] - source[2]).norm()) > 0.1 * float(source[2].norm())
    for index in (1, 2):
        torch.testing.assert_close(reached[index], result[index], rtol=0, atol=1e-4)
        torch.testing.assert_close(expected[index - 1], source[index], rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["gptq", thorough_case("awq+gptq")])
def test_tuning_during_or_after_rounding_gives_the_same_bytes(
    short: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    passes: list[int] = []
    passing = TuningStream.pass_source
    monkeypatch.setattr(
        TuningStream, "pass_source", lambda *given: (passes.append(1), passing(*given))[1]
    )
    quantize(short("llama"), tmp_path / "each", tuned(method, tune=1))
    assert not passes  # through the source once more
    monkeypatch.setattr(tuning.TuningStep, "tunes_while_rounding", lambda *_: False)
    quantize(short("llama"), tmp_path / "later", tuned(method, tune=1))
    assert len(passes) == 2
    assert file_digests(tmp_path / "each") == file_digests(tmp_path / "later")


def test_threads_and_activation_storage_give_the_same_bytes(
    short: Tiny, tmp_path: Path, whole: dict[str, str]
) -> None:
    quantize(short("llama"), tmp_path / "out", tuned(), threads=3, activations="disk")
    assert file_digests(tmp_path / "out") == whole


@pytest.mark.thorough
def test_multithreaded_backward_gives_the_same_bytes(
    short: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "LEAST", 1 << 12)
    monkeypatch.setattr(products, "SIDE", 16)
    used: list[int] = []

    def tiled_linears(threads: int) -> Any:
        used.append(threads)
        return products.tiled_linears(threads)

    monkeypatch.setattr(tuned_block, "tiled_linears", tiled_linears)
    for name, threads in (("one", 1), ("three", 3)):
        quantize(short("llama"), tmp_path / name, tuned(tune=1), threads=threads)
    assert {*used[: len(used) // 2]} == {1}
    assert {*used[len(used) // 2 :]} == {3}
    assert file_digests(tmp_path / "one") == file_digests(tmp_path / "three")


@pytest.mark.parametrize("part", ["block 1", "tune block 1", thorough_case("tune")])
def test_resume_after_interruption_writes_the_same_bytes(
    short: Tiny, tmp_path: Path, part: str, whole: dict[str, str]
) -> None:
    with pytest.raises(StopError):
        quantize(short("llama"), tmp_path / "out", tuned(), progress=crash_after(part))
    assert quantize(short("llama"), tmp_path / "out", tuned()).resumed
    assert file_digests(tmp_path / "out") == whole


@pytest.mark.thorough
def test_tuning_after_transforms_resumes_and_verifies(short: Tiny, tmp_path: Path) -> None:
    recipe = tuned("awq+gptq")
    quantize(short("gpt2"), tmp_path / "whole", recipe)
    with pytest.raises(StopError):
        quantize(short("gpt2"), tmp_path / "out", recipe, progress=crash_after("tune block 0"))
    assert quantize(short("gpt2"), tmp_path / "out", recipe).resumed
    assert file_digests(tmp_path / "out") == file_digests(tmp_path / "whole")
    report = verify(tmp_path / "out", short("gpt2"), forward=False)
    assert (report.findings, report.unrecorded_factors) == ([], [])
    path, name = tmp_path / "out" / "model.safetensors", "transformer.h.1.ln_1.bias"
    values = load_file(path)
    values[name][3] *= -1  # biases follow their gains, by more than half of themselves never
    save_file(values, path, metadata={"format": "pt"})
    damaged = verify(tmp_path / "out", short("gpt2"), forward=False).findings
    assert name in {item.where for item in damaged if item.check == "unquantized-changed"}


@pytest.mark.parametrize(
    ("tensor", "part", "check"),
    [
        ("", 1.0, ""),
        ("self_attn_layer_norm.weight", 3.0, "scale-fold"),  # more than it is learned by
        ("final_layer_norm.weight", 0.3, "unquantized-changed"),
        ("fc1.bias", -1.0, "unquantized-changed"),
    ],
)
def test_verify_tells_damage_from_tuning_after_transforms(
    short: Tiny, tmp_path: Path, behind_awq: Path, tensor: str, part: float, check: str
) -> None:
    out = shutil.copytree(behind_awq, tmp_path / "out")
    path = out / "model.safetensors"
    values = load_file(path)
    if tensor:
        values[f"model.decoder.layers.1.{tensor}"][3:9] *= part
    save_file(values, path, metadata={"format": "pt"})
    output = verify(out, short("opt"), forward=False).findings
    errors = {item.check for item in output if item.where != "model.safetensors"}  # its digest
    assert check in errors if check else not errors


@pytest.mark.thorough
def test_kill_before_writing_results_loses_no_tuning(
    short: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, str]
) -> None:
    learned: list[str] = []
    kept = tuning.TuningStep._save_learned

    def noted(self: Any, unit: str, *arguments: Any) -> Any:
        learned.append(unit)
        return kept(self, unit, *arguments)

    monkeypatch.setattr(tuning.TuningStep, "_save_learned", noted)
    with monkeypatch.context() as patched:
        patched.setattr(
            tuning.TuningStep, "_write_learned", lambda *_: (_ for _ in ()).throw(StopError)
        )
        with pytest.raises(StopError):
            quantize(short("llama"), tmp_path / "out", tuned())
    quantize(short("llama"), tmp_path / "out", tuned())
    assert learned == ["tune block 0", "tune block 1", "tune"]
    assert file_digests(tmp_path / "out") == whole


def test_resume_refuses_damaged_tuning_results(short: Tiny, tmp_path: Path) -> None:
    with pytest.raises(StopError):
        quantize(short("llama"), tmp_path / "out", tuned(), progress=crash_after("tune block 0"))
    file = tmp_path / ".out.qf" / "journal" / FILE
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"tune-block-0\.bin.*is not what the interrupted run"):
        quantize(short("llama"), tmp_path / "out", tuned())


def test_tuning_results_may_exceed_the_journal_size_limit(
    short: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, str]
) -> None:
    opened, roles = Opener.open_checked, []

    def limited(self: Opener, path: Path, role: FileRole, inside: Path | None) -> Any:
        if path.name == FILE:
            roles.append(role.name)
            role = replace(role, max_bytes=9) if role.max_bytes < NO_LIMIT else role
        return opened(self, path, role, inside)

    monkeypatch.setattr(Opener, "open_checked", limited)
    quantize(short("llama"), tmp_path / "out", tuned())
    assert roles
    assert file_digests(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("family", "method", "choices", "error", "words"),
    [
        ("llama", "rtn", {}, UsageError, "results of --method rtn are not tuned"),
        ("llama", "smooth+gptq", {}, UsageError, "smooth.gptq are not tuned"),
        (
            "llama",
            "gptq",
            {"scheme": "int4:g32:min", "format": "mlx"},
            UsageError,
            "mlx files are not tuned",
        ),
        ("llama", "gptq", {"scheme": "mxfp8"}, RefusedError, "are powers of two"),
        ("llama", "gptq", {"scheme": "fp8:row"}, RefusedError, "no scale for each group"),
        ("llama", "gptq", {"scheme": "W8A8"}, RefusedError, "reads rounded inputs"),
    ],
)
def test_tuning_refuses_unsupported_runs(
    short: Tiny, tmp_path: Path, family: str, method: str, choices: dict[str, Any],
    error: type[Exception], words: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=words) as raised:
        plan(short(family), fast_recipe(method, **({"tune": 1} | (choices or {"bits": 4}))))
    assert "--tune" in str(raised.value.hint)  # type: ignore[attr-defined]


def test_tuning_with_one_calibration_row_is_refused(short: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one calibration row"):
        quantize(short("llama"), tmp_path / "out", tuned(calibration=replace(ROWS, samples=1)))
    assert not any(tmp_path.iterdir())


def test_verify_reports_gains_beyond_the_bounds(short: Tiny, tmp_path: Path, result: Path) -> None:
    copy_model(result, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    values = load_file(path)
    name = "model.layers.1.input_layernorm.weight"
    values[name][3] *= 1.7  # the bound is a half
    values["model.norm.weight"][3] *= 1.1  # it is not tuned
    save_file(values, path, metadata={"format": "pt"})
    report = verify(tmp_path / "out", short("llama"), forward=False)
    results = {
        item.where
        for item in report.findings
        if item.check in {"unquantized-changed", "scale-fold"}
    }
    assert results == {name, "model.norm.weight"}


def test_large_steps_keep_gains_within_bounds(
    short: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the steps are, and even where what they lead to passes for better."""
    every_epoch_is_better(monkeypatch)
    monkeypatch.setattr(tuned_matrix, "FACTOR_RATE", 8.0)
    quantize(short("llama"), tmp_path / "out", tuned())
    name = "model.layers.0.input_layernorm.weight"
    before, after = (open_checkpoint(at).read(name) for at in (short("llama"), tmp_path / "out"))
    ratios = after.float() / before.float()
    assert 0.49 < float(ratios.min()) < 0.51
    assert 1.49 < float(ratios.max()) < 1.51
    report = verify(tmp_path / "out", short("llama"), forward=False)
    assert "unquantized-changed" not in {item.check for item in report.findings}


def test_export_of_tuned_result_verifies_against_the_source(short: Tiny, tmp_path: Path) -> None:
    quantize(short("llama"), tmp_path / "out", tuned(scheme="int4:g32:sym"))
    export(tmp_path / "out", None, tmp_path / "other", format="gptq")
    report = verify(tmp_path / "other", short("llama"), forward=False)
    assert (report.findings, report.unrecorded_factors) == ([], [])


def test_verify_accepts_changed_gains_only_with_a_tuning_recipe(
    short: Tiny, tmp_path: Path, result: Path
) -> None:
    copy_model(result, tmp_path / "out")
    path = tmp_path / "out" / "quantforge.manifest.json"
    document = json.loads(path.read_text())
    assert "\ntune = 2\n" in document["recipe"]
    document["recipe"] = document["recipe"].replace("\ntune = 2\n", "\ntune = 0\n")
    path.write_text(json.dumps(document))
    report = verify(tmp_path / "out", short("llama"), forward=False)
    assert (
        "unquantized-changed" in {item.check for item in report.findings}
        or report.unrecorded_factors
    )


def test_plan_includes_the_option(short: Tiny) -> None:
    planned = plan(short("llama"), tuned(tune=3))
    assert planned.tune == 3
    assert any("tune: 3 epochs" in note for note in planned.notes)
    assert planned.peak_memory_bytes > plan(short("llama"), tuned(tune=0)).peak_memory_bytes
