"""After a fault of a run the output is the old one or complete, and the same command continues."""

from __future__ import annotations

import json
import os
import resource
import sys

import pytest
from safetensors.torch import load_file, save_file

from quantforge.cli.app import main
from quantforge.errors import BusyError, InputError, RefusedError, ResourceError, UsageError
from quantforge.events import Policy
from quantforge.files.stage import Stage
from quantforge.recipe import CalibrationOptions, Rule
from tests.runs import (
    CALIBRATION_ARGUMENTS,
    StopError,
    copy_model,
    crash_after,
    fast_recipe,
    file_digests,
    fork_child,
    leftovers,
    quantize,
    recipe,
    wait_for_exit_code,
)
from tests.thorough import parametrize_each_value

JOURNAL_FILE = ".out.qf/journal"


# ---- outputs


def test_an_existing_output_is_refused_and_untouched(model, out):
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    for overwrite in (False, True):  # not a result of ours: not even --overwrite
        with pytest.raises(RefusedError) as refused:
            quantize(model, out, recipe(), overwrite=overwrite)
        assert refused.value.hint
    assert file_digests(out).keys() == {"precious.txt"}
    assert leftovers(out) == {"out"}


def test_overwrite_leaves_no_file_of_the_old_result(model, out):
    quantize(model, out, recipe(max_shard_bytes=60_000))
    assert len(list(out.glob("*.safetensors"))) > 2
    quantize(model, out, recipe(bits=8), overwrite=True)
    fresh = out.with_name("m")
    quantize(model, fresh, recipe(bits=8))
    assert file_digests(out) == file_digests(fresh)
    assert leftovers(out) == {"out"}


def test_stale_stage_files_are_not_published(model, out):
    with pytest.raises(StopError):
        quantize(
            model, out, fast_recipe("gptq", max_shard_bytes=60_000), progress=crash_after("block 0")
        )
    for path in (out.parent / JOURNAL_FILE).iterdir():
        path.unlink()
    (out.parent / JOURNAL_FILE).rmdir()
    quantize(model, out, recipe(bits=8))
    assert len(list(out.glob("*.safetensors"))) == 1
    assert not list(out.glob("*.index.json"))


def test_an_output_inside_of_the_source_is_refused(model, tmp_path):
    source = copy_model(model, tmp_path / "m")
    before = file_digests(source)
    for output in (source, source / "sub", tmp_path):
        with pytest.raises((UsageError, RefusedError)):
            quantize(source, output, recipe(), overwrite=True)
    assert file_digests(source) == before


def test_a_busy_output_is_refused_without_disturbing_its_run(model, out):
    with Stage(out, overwrite=False, source=model) as stage:
        stage.write_file("part", b"of the other run")
        with pytest.raises(BusyError) as busy:
            quantize(model, out, recipe())
        assert str(os.getpid()) in busy.value.message
        assert (stage.path / "part").read_bytes() == b"of the other run"
    quantize(model, out, recipe())
    assert not (out / "part").exists()


# ---- space


def test_too_little_space_is_refused_before_quantizing(model, out, monkeypatch):
    for module in ("stage", "disk"):
        monkeypatch.setattr(f"quantforge.files.{module}.free_bytes", lambda _: 1000)
    with pytest.raises(ResourceError) as full:
        quantize(model, out, fast_recipe("gptq"))
    assert "1000 free" in full.value.message
    assert full.value.exit_code == 7
    assert leftovers(out) == set()


def test_a_file_size_limit_keeps_the_old_result(model, out, tmp_path):
    quantize(model, out, recipe(bits=8))
    before = file_digests(out)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        sys.argv = ["quantforge", "quantize", str(model), "--bits", "4", *CALIBRATION_ARGUMENTS, "-o", str(out),
                    "--overwrite"]  # fmt: skip
        main()

    errors = tmp_path / "m"
    assert wait_for_exit_code(fork_child(limited, errors)) == 7, errors.read_text()
    assert "bytes needed" in errors.read_text()
    assert file_digests(out) == before
    quantize(model, out, recipe(bits=4), overwrite=True)  # with the limit gone it goes on
    assert file_digests(out) != before


def test_space_used_by_the_stage_counts_as_available(model, out, monkeypatch):
    with pytest.raises(StopError):
        quantize(model, out, fast_recipe("gptq"), progress=crash_after("block 0"))
    stage = out.parent / ".out.qf/stage"
    used_bytes = sum(path.stat().st_blocks * 512 for path in stage.rglob("*") if path.is_file())
    assert used_bytes > 100_000
    monkeypatch.setattr("quantforge.files.stage.free_bytes", lambda _: (1 << 21) - used_bytes)
    assert quantize(model, out, fast_recipe("gptq")).resumed


# ---- bad input


@parametrize_each_value(
    ("value", [float("nan"), float("inf"), float("-inf")]),
    ("method", ["rtn", "gptq"]),
    (
        "name",
        ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"],
    ),
)
def test_a_non_finite_weight_is_named_without_leftovers(model, out, value, method, name):
    source = copy_model(model, out.parent / "m")
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[37] = value
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError) as bad:
        quantize(source, out, recipe(method))
    assert name in bad.value.message
    assert "37]" in bad.value.message
    assert bad.value.hint
    assert leftovers(out) == set()


def test_a_configuration_that_contradicts_the_tensors_is_refused(model, out):
    source = copy_model(model, out.parent / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(InputError) as bad:
        quantize(source, out, recipe())
    assert "model.layers.2" in bad.value.message
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(InputError) as bad:
        quantize(source, out, recipe())
    assert "256" in bad.value.message
    assert leftovers(out) == set()


def test_truncated_weights_are_refused(model, out):
    source = copy_model(model, out.parent / "m")
    with (source / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(InputError, match=r"truncated|header"):
        quantize(source, out, recipe())


def test_a_quantized_model_is_not_quantized_again(model, out, tmp_path):
    quantize(model, out, recipe())
    with pytest.raises(InputError, match="already quantized") as bad:
        quantize(out, tmp_path / "m", recipe())
    assert "export" in bad.value.hint


@pytest.mark.parametrize("text", ["", "a"])
def test_too_short_calibration_text_is_refused_with_a_hint(model, out, text):
    file = out.parent / "m"
    file.write_text(text)
    calibration = CalibrationOptions(str(file), samples=6, length=24)
    with pytest.raises(InputError) as bad:
        quantize(model, out, fast_recipe("gptq", calibration=calibration))
    assert bad.value.hint
    assert text == "" or "24" in bad.value.message + bad.value.hint
    assert leftovers(out) == set()


def test_substitutions_are_counted_and_limited_by_the_policy(tiny, out):
    model = tiny("llama")  # 64 columns: no groups of 128
    layers = 3 * 6
    with pytest.raises(RefusedError, match="substitution") as refused:
        quantize(model, out, recipe(), policy=Policy(strict=True))
    assert f"--allow substitution={layers}" in refused.value.hint
    with pytest.raises(RefusedError):
        quantize(model, out, recipe(), policy=Policy(allow={"substitution": layers - 1}))
    assert leftovers(out) == set()
    allowed = {"substitution": layers, "few-calibration-tokens": 1}
    done = quantize(model, out, recipe(), policy=Policy(True, allowed))
    counts = json.loads((out / "quantforge.manifest.json").read_text())["event_counts"]
    assert counts["substitution"] == layers == len(done.plan.substitutions)


def test_a_run_refused_for_an_event_can_be_allowed_later(model, out):
    recipe = fast_recipe("gptq", rules=(Rule("o_proj", "int2:row:sym"),))
    with pytest.raises(RefusedError, match="few-calibration-tokens"):
        quantize(model, out, recipe, policy=Policy(strict=True))
    assert not out.exists()
    quantize(model, out, recipe, policy=Policy(True, {"few-calibration-tokens": 1}))
    assert out.exists()


@pytest.mark.parametrize(("method", "read"), [("rtn", False), ("gptq", True)])
def test_progress_mentions_calibration_text_only_when_read(method, read, model, out):
    steps = []
    recipe = fast_recipe(method, scales="absmax")
    quantize(model, out, recipe, progress=lambda report: steps.append(report.step))
    assert ("calibration text" in steps) is read
    assert "libraries" in steps
