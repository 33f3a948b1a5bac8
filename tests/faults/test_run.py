"""A run under faults: whatever happens, the output is what it was, or whole; and the same command goes on."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantforge.checkpoint.publish import Stage
from quantforge.cli.app import main
from quantforge.errors import (
    BusyError,
    InputError,
    IntegrityError,
    QuantForgeError,
    RefusedError,
    ResourceError,
    UsageError,
)
from quantforge.events import Policy
from quantforge.recipe import CalibrationOptions, Rule
from quantforge.settings import Progress
from tests.conftest import Tiny
from tests.runs import ROWS, command, copied, ended, forked, quantize, recipe, tree

JOURNAL = ".out.qf-journal"


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny("llama-wide")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def leftovers(out: Path) -> set[str]:
    """What lies beside the output, but for the lock and the log, which stay by design."""
    return {path.name for path in out.parent.iterdir()} - {".out.qf.lock", "out.log.jsonl", "m"}


class StopError(Exception):
    """Stands for a crash."""


def crash_after(part: str) -> object:
    def progress(done: Progress) -> None:
        if done.part == part:
            raise StopError

    return progress


# ---- outputs


def test_an_existing_output_is_refused_and_untouched(model, out):
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    for overwrite in (False, True):  # not a result of ours: not even --overwrite
        with pytest.raises(RefusedError) as refused:
            quantize(model, out, recipe(), overwrite=overwrite)
        assert refused.value.hint
    assert tree(out).keys() == {"precious.txt"}
    assert leftovers(out) == {"out"}


def test_overwrite_leaves_nothing_of_the_old_release(model, out):
    quantize(model, out, recipe(max_shard_bytes=60_000))
    assert len(list(out.glob("*.safetensors"))) > 2
    (out / "notes.md").write_text("added later")
    quantize(model, out, recipe(bits=8), overwrite=True)
    fresh = out.with_name("m")
    quantize(model, fresh, recipe(bits=8))
    assert tree(out) == tree(fresh)
    assert leftovers(out) == {"out", ".m.qf.lock"}


def test_stale_files_in_a_stage_never_get_published(model, out):
    with pytest.raises(StopError):
        quantize(
            model, out, recipe("gptq", max_shard_bytes=60_000), progress=crash_after("block 0")
        )
    for path in (out.parent / JOURNAL).iterdir():
        path.unlink()
    (out.parent / JOURNAL).rmdir()
    quantize(model, out, recipe(bits=8))
    assert len(list(out.glob("*.safetensors"))) == 1
    assert not list(out.glob("*.index.json"))


def test_an_output_inside_of_the_source_is_refused(model, tmp_path):
    source = copied(model, tmp_path / "m")
    before = tree(source)
    for place in (source, source / "sub", tmp_path):
        with pytest.raises((UsageError, RefusedError)):
            quantize(source, place, recipe(), overwrite=True)
    assert tree(source) == before


def test_a_busy_output_is_refused_and_the_first_run_is_not_disturbed(model, out):
    with Stage(out, overwrite=False, source=model) as held:
        held.write_file("part", b"of the other run")
        with pytest.raises(BusyError) as busy:
            quantize(model, out, recipe())
        assert str(os.getpid()) in busy.value.message
        assert (held.path / "part").read_bytes() == b"of the other run"
    quantize(model, out, recipe())
    assert not (out / "part").exists()


# ---- space


def test_too_little_space_is_refused_before_the_work(model, out, monkeypatch):
    for module in ("publish", "disk"):
        monkeypatch.setattr(f"quantforge.checkpoint.{module}.free_bytes", lambda _: 1000)
    with pytest.raises(ResourceError) as full:
        quantize(model, out, recipe("gptq"))
    assert "1000 free" in full.value.message
    assert full.value.exit_code == 7
    assert leftovers(out) == set()


def test_a_limit_on_file_sizes_leaves_the_old_release(model, out, tmp_path):
    quantize(model, out, recipe(bits=8))
    before = tree(out)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        sys.argv = ["quantforge", "quantize", str(model), "--bits", "4", *ROWS, "-o", str(out),
                    "--overwrite"]  # fmt: skip
        main()

    errors = tmp_path / "m"
    assert ended(forked(limited, errors)) == 7, errors.read_text()
    assert "bytes needed" in errors.read_text()
    assert tree(out) == before
    quantize(model, out, recipe(bits=4), overwrite=True)  # with the limit gone it goes on
    assert tree(out) != before


def test_space_that_a_stage_holds_already_counts_as_there(model, out, monkeypatch):
    with pytest.raises(StopError):
        quantize(model, out, recipe("gptq"), progress=crash_after("block 0"))
    stage = out.parent / ".out.qf-stage"
    held = sum(path.stat().st_blocks * 512 for path in stage.rglob("*") if path.is_file())
    assert held > 100_000
    monkeypatch.setattr("quantforge.checkpoint.publish.free_bytes", lambda _: (1 << 21) - held)
    assert quantize(model, out, recipe("gptq")).resumed


# ---- bad input


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_value_that_is_not_finite_is_named_and_nothing_is_left(model, out, value, method, name):
    source = copied(model, out.parent / "m")
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[37] = value
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError) as bad:
        quantize(source, out, recipe(method))
    assert name in bad.value.message
    assert "37]" in bad.value.message
    assert bad.value.hint
    assert leftovers(out) == set()


def test_a_configuration_that_disagrees_is_refused(model, out):
    source = copied(model, out.parent / "m")
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


def test_a_truncated_file_is_refused(model, out):
    source = copied(model, out.parent / "m")
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
def test_calibration_text_that_is_too_short_says_how_much_is_needed(model, out, text):
    file = out.parent / "m"
    file.write_text(text)
    calibration = CalibrationOptions(str(file), samples=6, length=24)
    with pytest.raises(InputError) as bad:
        quantize(model, out, recipe("gptq", calibration=calibration))
    assert bad.value.hint
    assert text == "" or "24" in bad.value.message + bad.value.hint
    assert leftovers(out) == set()


def test_a_substitution_is_planned_counted_and_can_be_refused(tiny, out):
    model = tiny("llama")  # 64 columns: no groups of 128
    layers = 3 * 6
    with pytest.raises(RefusedError, match="substitution") as refused:
        quantize(model, out, recipe(), policy=Policy(strict=True))
    assert f"--allow substitution={layers}" in refused.value.hint
    with pytest.raises(RefusedError):
        quantize(model, out, recipe(), policy=Policy(allow={"substitution": layers - 1}))
    assert leftovers(out) == set()
    allowed = {"substitution": layers, "calibration-short": 1}
    done = quantize(model, out, recipe(), policy=Policy(True, allowed))
    counts = json.loads((out / "quantforge.manifest.json").read_text())["event_counts"]
    assert counts["substitution"] == layers == len(done.plan.substitutions)


def test_an_event_refused_in_the_middle_can_be_accepted_later(model, out):
    wanted = recipe("gptq", rules=(Rule("o_proj", "int2:row:sym"),))
    with pytest.raises(RefusedError, match="calibration-short"):
        quantize(model, out, wanted, policy=Policy(strict=True))
    assert not out.exists()
    quantize(model, out, wanted, policy=Policy(True, {"calibration-short": 1}))
    assert out.exists()


# ---- interruption


def test_killed_at_random_points_it_ends_as_if_nothing_had_happened(tiny, tmp_path):
    model, wanted = tiny("llama"), recipe("gptq", bits=3)

    def work(out: Path) -> None:
        quantize(model, out, wanted)

    reference, errors = tmp_path / "reference", tmp_path / "errors"
    start = time.monotonic()
    assert ended(forked(lambda: work(reference), errors)) == 0, errors.read_text()
    seconds = time.monotonic() - start
    moments = random.Random(7)
    kills = 0
    while kills < 8:
        out = tmp_path / f"out{kills}"
        while not out.exists():
            child = forked(lambda out=out: work(out), errors)
            if kills < 8:
                time.sleep(seconds * moments.random())
                os.kill(child, signal.SIGKILL)
            code = ended(child)
            assert code in {0, -signal.SIGKILL}, errors.read_text()
            kills += code != 0
        assert tree(out) == tree(reference)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_and_the_same_command_goes_on(model, out, number, code, capsys):
    arguments = ("quantize", model, "--method", "gptq", *ROWS, "-o", out)

    def run() -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.argv = ["quantforge", *map(str, arguments)]
        main()

    errors = out.parent / "m"
    child = forked(run, errors)
    log = out.parent / "out.log.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and "block 0" in log.read_text()):
        time.sleep(0.005)
    os.kill(child, number)
    assert ended(child) == code, errors.read_text()
    assert "Traceback" not in errors.read_text()
    assert "same command" in errors.read_text()
    assert not out.exists()
    result = command(capsys, *arguments, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["resumed"] is True
    plain = out.with_name("m2")
    command(capsys, *arguments[:-1], plain)
    assert tree(out) == tree(plain)
    assert leftovers(out) == {"out", "m2", "m2.log.jsonl", ".m2.qf.lock"}


@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
def test_a_crash_after_any_part_resumes_to_the_same_bytes(model, out, method):
    reference = out.with_name("m")
    for part in ("outer", "block 0", "block 1", "head"):
        wanted = recipe(method, head="int8:g128:sym")
        place = out.with_name(f"out-{part[-1]}")
        with pytest.raises(StopError):
            quantize(model, place, wanted, progress=crash_after(part))
        assert not place.exists()
        again: list[str] = []
        assert quantize(
            model, place, wanted, progress=lambda done, again=again: again.append(done.part)
        ).resumed
        parts = ["outer", "block 0", "block 1", "head"]
        assert again == parts[parts.index(part) + 1 :]  # nothing twice
        if not reference.exists():
            quantize(model, reference, wanted)
        assert tree(place) == tree(reference), part


def begun(model: Path, out: Path) -> None:
    with pytest.raises(StopError):
        quantize(model, out, recipe("gptq"), progress=crash_after("block 0"))


def refused(model: Path, out: Path, **changes: object) -> QuantForgeError:
    with pytest.raises(IntegrityError) as bad:
        quantize(model, out, recipe("gptq", **changes))
    assert bad.value.exit_code == 5
    assert not out.exists()
    return bad.value


def test_resume_with_another_recipe_is_refused(model, out):
    begun(model, out)
    error = refused(model, out, bits=3)
    assert "differs in: recipe" in error.message
    assert f"rm -r {out.parent / JOURNAL}" in error.hint
    assert quantize(model, out, recipe("gptq")).resumed  # with the first it goes on


def test_resume_with_another_text_is_refused(model, out):
    begun(model, out)
    changed = CalibrationOptions(samples=6, length=24, micro_batch=4, seed=1)
    assert "calibration" in refused(model, out, calibration=changed).message


def test_resume_with_a_changed_source_is_refused(model, out):
    source = copied(model, out.parent / "m")
    begun(source, out)
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "source file model.safetensors" in refused(source, out).message
    data[-1] ^= 1
    file.write_bytes(data)
    assert quantize(source, out, recipe("gptq")).resumed


def test_a_changed_byte_of_finished_work_is_found(model, out):
    begun(model, out)
    staged = out.parent / ".out.qf-stage" / "model.safetensors"
    data = bytearray(staged.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start] ^= 1
    staged.write_bytes(data)
    error = refused(model, out)
    assert error.tensor
    assert error.tensor in error.message


def test_a_damaged_line_of_the_journal_is_refused(model, out):
    begun(model, out)
    journal = out.parent / JOURNAL / "journal.jsonl"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    assert "damaged" in refused(model, out).message


def test_a_line_that_was_cut_short_is_done_again(model, out):
    begun(model, out)
    journal = out.parent / JOURNAL / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-30])
    assert quantize(model, out, recipe("gptq")).resumed
    reference = out.with_name("m")
    quantize(model, reference, recipe("gptq"))
    assert tree(out) == tree(reference)


def test_a_journal_whose_stage_is_gone_does_not_stand_in_the_way(model, out):
    begun(model, out)
    stage = out.parent / ".out.qf-stage"
    for path in stage.iterdir():
        path.unlink()
    stage.rmdir()
    assert not quantize(model, out, recipe("gptq")).resumed
    assert leftovers(out) == {"out"}


def test_killed_after_the_swap_of_an_overwrite(model, out, monkeypatch):
    quantize(model, out, recipe(bits=8))
    monkeypatch.setattr("quantforge.checkpoint.publish._remove", crash_after_swap)
    with pytest.raises(StopError):
        quantize(model, out, recipe("gptq"), overwrite=True)
    monkeypatch.undo()
    published = tree(out)
    assert json.loads((out / "quantforge.manifest.json").read_text())["method"] == "gptq"
    quantize(model, out, recipe("gptq"), overwrite=True)
    assert tree(out) == published
    assert leftovers(out) == {"out"}


def crash_after_swap(path: Path) -> None:
    """Stand in for the removal of a directory: ends the run where it would remove the old release."""
    if (path / "quantforge.manifest.json").exists():
        raise StopError
    for inner in path.iterdir() if path.exists() else ():
        inner.unlink()
    if path.exists():
        path.rmdir()
