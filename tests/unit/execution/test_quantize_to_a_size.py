"""`quantize --target` gives the bytes of `allocate` and `quantize`, and resumes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quantforge import api
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.execution import candidate_errors
from quantforge.settings import Settings
from tests.conftest import make_tiny
from tests.runs import interrupt_measurement
from tests.thorough import thorough_case

DEMO = Path(__file__).parents[3] / "models/demo"
ROWS = {"samples": 4, "length": 64, "calibration": "builtin"}
FEW = {**ROWS, "samples": 2, "length": 32}  # of a small model, where something is measured
SIZE = {"target": "3.4bpw", "candidates": ("int3:g128:sym", "int4:g128:sym")}


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a random model of four blocks."""
    return make_tiny("llama-wide", tmp_path_factory.mktemp("small") / "demo", num_hidden_layers=4)


@pytest.fixture(scope="module")
def two_commands(small, tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    api.allocate(small, out=directory / "mixed.toml", **SIZE, **FEW)
    api.quantize(small, directory / "mixed.toml", directory / "out")
    return files(directory / "out")


def test_target_gives_the_bytes_of_allocate_then_quantize(small, two_commands, tmp_path):
    messages = []
    outcome = api.quantize(
        small, out=tmp_path / "out", settings=Settings(note=messages.append), **SIZE, **FEW
    )
    assert files(tmp_path / "out") == two_commands
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert 3.25 < outcome.plan.bits_per_weight <= 3.4  # of few matrices
    assert any("expected KL" in message for message in messages)


def test_resume_after_interruption_writes_the_same_bytes(
    small, two_commands, tmp_path, monkeypatch
):
    """Stopped once between two blocks that are measured, and once when it begins to round."""

    def run():
        return api.quantize(small, out=tmp_path / "out", **SIZE, **FEW)

    seen = interrupt_measurement(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["quantforge.api.quantize"], "quantize_opened", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run()
    run()
    assert seen == [0, 1, 2, 2, 3]
    assert files(tmp_path / "out") == two_commands
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_plan_notes_the_measurement_before_rounding():
    plan = api.plan(DEMO, target="3.4bpw", **ROWS)
    assert "measured first: what each of 7 schemes" in plan.notes[0]
    steps = plan.work.operations
    assert steps["pass"] < steps["measure"] > steps["round"]
    assert "4 rows of 64 tokens" in plan.notes[0]
    assert 3.35 < plan.bits_per_weight <= 3.4
    plan, use = api.capacity(DEMO, api.Load(512), target="16MB@512")
    assert 0.99 * 0.9 * 16e6 < use.needed_bytes() <= 0.9 * 16e6


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"target": "1bpw"}, RefusedError, "below the smallest"),
        ({"target": "3.5"}, UsageError, "no size"),
        ({"target": "3.5bpw", "bits": 4}, UsageError, "the size decides"),
        ({"target": "3.5bpw", "method": "awq"}, UsageError, "gptq alone"),
        ({"target": "3.5bpw", "imatrix": "i.gguf"}, UsageError, "--imatrix i.gguf: not while"),
        ({"target": "3.5bpw", "settings": Settings(join=True)}, UsageError, "--join"),
        ({"target": "3.5bpw", "like": "x.gguf"}, UsageError, "two sizes"),
        ({"like": "x.gguf"}, InputError, "no such file"),
        ({"candidates": ("int4:g64:sym",)}, UsageError, "for which size"),
    ],
)
def test_refusals(options, kind, message, tmp_path):
    with pytest.raises(kind) as raised:
        api.quantize(DEMO, out=tmp_path / "out", **options)
    assert message in f"{raised.value} {raised.value.hint}"
    assert not [*tmp_path.iterdir()]


def test_existing_output_is_refused_before_measuring(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    monkeypatch.setattr(candidate_errors, "candidate_errors", None)
    with pytest.raises(RefusedError, match="exists"):
        api.quantize(DEMO, out=tmp_path / "out", **SIZE, **ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        thorough_case({"target": "3.4bpw"}, "demo-gptq-3.4bpw"),
        thorough_case({"target": "14MB@512", "format": "mlx"}, "demo-gptq-14MB_512-mlx"),
        ({"target": "3.6bpw", "format": "gguf"}, "demo-gptq-3.6bpw.gguf"),
    ],
)
def test_default_name_contains_the_size_and_existing_is_refused(size, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert api.plan(DEMO, **size, **ROWS).name == name
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("")
    monkeypatch.setattr(candidate_errors, "candidate_errors", None)
    with pytest.raises(RefusedError, match=r"exists|is no file"):
        api.quantize(DEMO, **size, **ROWS)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_interruption_note_names_the_measurement_directory(small, tmp_path, monkeypatch):
    interrupt_measurement(monkeypatch)
    announced = []
    settings = Settings(announce=lambda plan, out: announced.append(out.name))
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(KeyboardInterrupt) as stopped:
            api.quantize(small, settings=settings, **SIZE, **FEW)
    (kept,) = tmp_path.iterdir()
    assert announced == ["demo-gptq-3.4bpw"]
    assert "the same command again goes on" in stopped.value.__notes__[0]
    assert f"rm -r {kept}" in stopped.value.__notes__[0]
