"""An interrupted run resumes to the same bytes with the same command, and with no other."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quantforge import api
from quantforge.errors import (
    DeniedError,
    IntegrityError,
    QuantForgeError,
)
from quantforge.execution.unit_output import UnitOutput
from quantforge.files.disk import write_errors
from quantforge.formats.gguf.importance_file import WeightImportance, read_imatrix, write_imatrix
from quantforge.recipe import CalibrationOptions
from quantforge.settings import Settings
from tests.runs import (
    CALIBRATION,
    StopError,
    copy_model,
    crash_after,
    fast_recipe,
    file_digests,
    fork_child,
    leftovers,
    quantize,
    run_command,
    wait_for_exit_code,
)
from tests.thorough import thorough_case

JOURNAL_FILE = ".out.qf/journal"


@pytest.mark.parametrize("join", [False, True])
def test_a_read_only_output_keeps_finished_work(model, out, monkeypatch, join):
    """A file system that turns read-only does not invalidate the work."""
    recipe = fast_recipe(scales="absmax", bits=4) if join else fast_recipe("gptq", bits=4)
    parts: list[str] = []
    with monkeypatch.context() as patch:
        written, calls = UnitOutput.write, itertools.count()

        def closed(*arguments):
            with write_errors(out, 0):
                if next(calls) == 30:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                written(*arguments)

        patch.setattr(UnitOutput, "write", closed)
        with pytest.raises(DeniedError, match="Read-only file system"):
            quantize(model, out, recipe, join=join)
    quantize(model, out, recipe, join=join, progress=lambda done: parts.append(done.part))
    assert [*filter(None, parts)] == ["block 1", "head"]


def test_a_run_killed_at_random_times_writes_the_same_bytes(model, tmp_path):
    recipe = fast_recipe("gptq", bits=3)

    def work(out: Path) -> None:
        quantize(model, out, recipe)

    reference, errors = tmp_path / "reference", tmp_path / "errors"
    start = time.monotonic()
    assert wait_for_exit_code(fork_child(lambda: work(reference), errors)) == 0, errors.read_text()
    seconds = time.monotonic() - start
    moments = random.Random(7)
    kills = results = 0
    while kills < 6:
        out = tmp_path / f"out{results}"
        while not out.exists():
            child = fork_child(lambda out=out: work(out), errors)
            if kills < 6:
                time.sleep(seconds * moments.random())
                os.kill(child, signal.SIGKILL)
            code = wait_for_exit_code(child)
            assert code in {0, -signal.SIGKILL}, errors.read_text()
            kills += code != 0
        assert file_digests(out) == file_digests(reference)
        results += 1
        # Where the first run was slow for once, the moments would go on to fall behind the end.
        seconds *= 0.8


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """The files of a run that no signal stops."""
    out = tmp_path_factory.mktemp("plain") / "out"
    api.quantize(tiny("llama-wide"), None, out, method="gptq", samples=6, length=24)
    return file_digests(out)


PARTS = ["outer", "block 0", "block 1", "head"]


@pytest.mark.parametrize(
    ("method", "crashes"), [("gptq", PARTS), thorough_case("awq+gptq", PARTS[1:2])]
)
def test_a_crash_after_any_part_resumes_to_the_same_bytes(model, out, method, crashes):
    reference = out.with_name("m")
    for part in crashes:
        recipe = fast_recipe(method, lm_head="int8:g128:sym")
        output = out.with_name(f"out-{part[-1]}")
        with pytest.raises(StopError):
            quantize(model, output, recipe, progress=crash_after(part))
        assert not output.exists()
        again: list[str] = []
        assert quantize(
            model, output, recipe, progress=lambda done, again=again: again.append(done.part)
        ).resumed
        assert [*filter(None, again)] == PARTS[PARTS.index(part) + 1 :]  # nothing twice
        if not reference.exists():
            quantize(model, reference, recipe)
        assert file_digests(output) == file_digests(reference), part


def test_a_journal_of_an_older_schema_is_refused(model, out):
    recipe = fast_recipe("gptq")
    with pytest.raises(StopError):
        quantize(model, out, recipe, progress=crash_after("block 0"))
    fingerprint = out.parent / f".{out.name}.qf" / "journal" / "fingerprint.json"
    recorded = json.loads(fingerprint.read_text())
    assert recorded.pop("schema") == "quantforge.journal/2"
    fingerprint.write_text(json.dumps(recorded))
    with pytest.raises(
        IntegrityError, match=r"a journal of schema quantforge\.journal/1"
    ) as refused_resume:
        quantize(model, out, recipe)
    assert "--overwrite" in refused_resume.value.hint
    assert not quantize(model, out, recipe, overwrite=True).resumed  # which begins anew


@pytest.mark.parametrize(
    ("method", "values"),
    [("awq+gptq", {"bits": 4, "kv_cache": "fp8"}), ("smooth+gptq", {"scheme": "W8A8_STATIC"})],
)
def test_resume_after_measured_ranges_writes_the_same_bytes(tiny, out, method, values):
    """The next block reads the states of the source: those of a transformed block differ in their last bits."""
    model, recipe = tiny("llama"), fast_recipe(method, **values)
    quantize(model, out.with_name("m"), recipe)
    with pytest.raises(StopError):
        quantize(model, out, recipe, progress=crash_after("block 0"))
    assert quantize(model, out, recipe).resumed
    assert file_digests(out) == file_digests(out.with_name("m"))


def begin_run(model: Path, out: Path) -> None:
    with pytest.raises(StopError):
        quantize(model, out, fast_recipe("gptq"), progress=crash_after("block 0"))


def refused_resume(model: Path, out: Path, **changes: object) -> QuantForgeError:
    with pytest.raises(IntegrityError) as bad:
        quantize(model, out, fast_recipe("gptq", **changes))
    assert bad.value.exit_code == 5
    assert not out.exists()
    return bad.value


def test_resume_with_another_recipe_is_refused(model, out):
    begin_run(model, out)
    error = refused_resume(model, out, bits=3)
    assert error.message.endswith("differs in: bits: unset there, 3 here")
    assert f"with --overwrite, or after rm -r {out.parent / JOURNAL_FILE}" in error.hint
    assert quantize(model, out, fast_recipe("gptq")).resumed  # with the first it goes on


@pytest.mark.parametrize("damaged", [False, True])
def test_overwrite_discards_an_unfinished_run_of_another_recipe(model, out, damaged):
    begin_run(model, out)
    if damaged:
        with (out.parent / JOURNAL_FILE / "journal.jsonl").open("ab") as file:
            file.write(b"?\n")
    notes: list[str] = []
    recipe = fast_recipe("gptq", bits=None if damaged else 3)
    assert not quantize(model, out, recipe, overwrite=True, note=notes.append).resumed
    reason = "the interrupted run is damaged" if damaged else "bits: unset there, 3 here"
    assert [
        note.endswith(f"{reason}; it is ended, because --overwrite is given") for note in notes
    ] == [True]
    afresh = out.with_name("afresh")
    quantize(model, afresh, recipe)
    assert file_digests(out) == file_digests(afresh)
    assert leftovers(out) == {"out", "afresh"}


def test_overwrite_reports_the_discarded_run(model, out, capsys):
    begin_run(model, out)
    arguments = ("--method", "rtn", "--scales", "absmax", "-o", out, "--overwrite")
    ended = run_command(capsys, "quantize", model, *arguments)
    assert ended.code == 0
    assert "it is ended, because --overwrite is given" in ended.err


def test_overwrite_resumes_its_own_run(model, out):
    begin_run(model, out)
    assert quantize(model, out, fast_recipe("gptq"), overwrite=True).resumed


def test_resume_with_other_calibration_options_is_refused(model, out):
    begin_run(model, out)
    changed = CalibrationOptions(samples=6, length=24, micro_batch=4, seed=1)
    assert "calibration" in refused_resume(model, out, calibration=changed).message


def test_resume_with_a_changed_source_is_refused(model, out):
    source = copy_model(model, out.parent / "m")
    begin_run(source, out)
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "source file model.safetensors" in refused_resume(source, out).message
    data[-1] ^= 1
    file.write_bytes(data)
    assert quantize(source, out, fast_recipe("gptq")).resumed


def test_resume_with_another_imatrix_is_refused(model, out):
    """The recipe has the name of the file, but its digest decides."""
    file = out.parent / "m"
    recipe = fast_recipe(
        format="gguf",
        type="Q4_0",
        calibration=CalibrationOptions("imatrix:m", samples=6, length=24),
    )
    output = out.with_suffix(".gguf")
    api.make_imatrix(str(model), fast_recipe(calibration=CALIBRATION), file, Settings())
    with pytest.raises(StopError):
        quantize(model, output, recipe, imatrix=file, progress=crash_after("block 0"))
    importance = read_imatrix(file)
    file.unlink()
    entries = {
        name: WeightImportance(entry.means * 2 + 1, entry.rows)
        for name, entry in importance.entries.items()
    }
    write_imatrix(file, replace(importance, entries=entries))
    with pytest.raises(IntegrityError, match=r"differs in: imatrix; calibration\.sha256$"):
        quantize(model, output, recipe, imatrix=file)
    file.unlink()
    write_imatrix(file, importance)
    assert quantize(model, output, recipe, imatrix=file).resumed


def test_resume_detects_a_changed_byte_of_finished_work(model, out):
    begin_run(model, out)
    staged = out.parent / ".out.qf/stage" / "model.safetensors"
    data = bytearray(staged.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start] ^= 1
    staged.write_bytes(data)
    error = refused_resume(model, out)
    assert error.tensor
    assert error.tensor in error.message


def test_a_damaged_line_of_the_journal_is_refused(model, out):
    begin_run(model, out)
    journal = out.parent / JOURNAL_FILE / "journal.jsonl"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    assert "damaged" in refused_resume(model, out).message


def test_a_truncated_journal_line_is_redone(model, out):
    begin_run(model, out)
    journal = out.parent / JOURNAL_FILE / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-30])
    assert quantize(model, out, fast_recipe("gptq")).resumed
    reference = out.with_name("m")
    quantize(model, reference, fast_recipe("gptq"))
    assert file_digests(out) == file_digests(reference)


def test_a_journal_without_its_stage_starts_afresh(model, out):
    begin_run(model, out)
    stage = out.parent / ".out.qf/stage"
    for path in stage.iterdir():
        path.unlink()
    stage.rmdir()
    assert not quantize(model, out, fast_recipe("gptq")).resumed
    assert leftovers(out) == {"out"}


def test_repeating_an_overwrite_killed_after_the_swap_works(model, out, monkeypatch):
    quantize(model, out, fast_recipe(bits=8))
    monkeypatch.setattr("quantforge.files.stage.Stage._remove_replaced", crash)
    with pytest.raises(StopError):
        quantize(model, out, fast_recipe("gptq"), overwrite=True)
    monkeypatch.undo()
    published = file_digests(out)
    assert json.loads((out / "quantforge.manifest.json").read_text())["method"] == "gptq"
    quantize(model, out, fast_recipe("gptq"), overwrite=True)
    assert file_digests(out) == published
    assert leftovers(out) == {"out"}


def crash(_stage: object) -> None:
    raise StopError
