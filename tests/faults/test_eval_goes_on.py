"""An interrupted evaluation resumes after the measured models, and never reuses rows of changed inputs."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import __version__
from quantforge.api import evaluate
from quantforge.cli.app import Stopped
from quantforge.errors import InputError, ResourceError
from quantforge.evaluation import compare_models as evaluation
from quantforge.evaluation import saved_rows
from quantforge.evaluation.measurement_options import EvaluationOptions
from quantforge.evaluation.saved_rows import resume_rows
from quantforge.evaluation.tasks import Tasks
from quantforge.formats.open_model import open_model
from quantforge.settings import Settings
from tests.runs import (
    StopError,
    copy_model,
    fork_child,
    quantize,
    recipe,
    run_command,
    wait_for_exit_code,
)
from tests.thorough import thorough_case

EVALUATION = {"windows": 2, "length": 16, "speed": False}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    return tmp_path / "cache/quantforge/evaluations"


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    """Return two results of one model. Do not write into them."""
    paths = [tmp_path_factory.mktemp("models") / f"bits{bits}" for bits in (4, 8)]
    for path in paths:
        quantize(tiny("llama-wide"), path, recipe(bits=int(path.name[4:]), scales="absmax"))
    return paths


def record_loads(monkeypatch, stop=lambda _: None):
    """Return a list that records the names of the models loaded from now on."""
    names, load = [], evaluation.load

    def counting(source, *arguments, **options):
        stop(source.path)
        names.append(source.path.name)
        return load(source, *arguments, **options)

    monkeypatch.setattr(evaluation, "load", counting)
    return names


def kill_at_last(path):
    if path.name == "bits8":
        os.kill(os.getpid(), signal.SIGKILL)


def crash_at_last(path, error=None):
    if path.name == "bits8":
        raise error or StopError


def interrupt_evaluation(model, models, **options):
    with pytest.MonkeyPatch.context() as patch:
        record_loads(patch, crash_at_last)
        with pytest.raises(StopError) as stopped:
            evaluate(model, models, **{**EVALUATION, **options})
    return getattr(stopped.value, "__notes__", [])


def test_after_a_kill_eval_measures_only_the_remaining_models(
    model, models, tmp_path, cache, monkeypatch
):
    whole = evaluate(model, models, **EVALUATION)
    assert not [*cache.glob("*")]

    def child():
        record_loads(pytest.MonkeyPatch(), kill_at_last)
        evaluate(model, models, **EVALUATION)

    assert wait_for_exit_code(fork_child(child, tmp_path / "errors")) == -signal.SIGKILL
    assert len([*cache.iterdir()]) == 1
    names, notes = record_loads(monkeypatch), []
    resumed = evaluate(model, models, Settings(note=notes.append), **EVALUATION)
    assert names == [model.name, "bits8"]
    assert "2 of 3 models were measured before" in notes[-1]
    assert resumed.to_json()["models"] == whole.to_json()["models"]
    assert not [*cache.glob("*")]


@pytest.mark.parametrize(
    "change",
    [
        "model",
        "source",
        "text",
        "version",
        "empty row",
        "cut",
        thorough_case("windows"),
        thorough_case("shape"),
    ],
)
def test_changed_inputs_invalidate_saved_rows(model, models, tmp_path, cache, monkeypatch, change):
    source = copy_model(model, tmp_path / "m")
    if change == "model":
        models = [copy_model(models[0], tmp_path / "bits4"), models[1]]
    text, options = tmp_path / "text.txt", {}
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    assert interrupt_evaluation(source, models, text=str(text)) == [
        "2 of 3 models are kept: the same command measures the others"
    ]
    saved_file = next(cache.iterdir())
    if change in {"model", "source"}:
        file = (models[0] if change == "model" else source) / "model.safetensors"
        weights = load_file(file)
        name = next(name for name in sorted(weights) if weights[name].dtype.is_floating_point)
        weights[name] = torch.zeros_like(weights[name]) + 0.5
        save_file(weights, file, {"format": "pt"})
    elif change == "windows":
        options = {"windows": 3}
    elif change == "text":
        text.write_text("Another text about nothing at all, said twice. " * 40)
    elif change == "version":
        monkeypatch.setattr(
            saved_rows.manifest, "versions", lambda: {"quantforge": f"{__version__}x"}
        )
    elif change == "shape":
        saved_file.write_text(json.dumps({"rows": [[0.5], None]}))
    elif change == "empty row":
        rows = json.loads(saved_file.read_text())["rows"]
        saved_file.write_text(json.dumps({"rows": [rows[0], {}]}))
    else:
        saved_file.write_bytes(saved_file.read_bytes()[:-9])
    names = record_loads(monkeypatch)
    evaluate(source, models, **{**EVALUATION, "text": str(text), **options})
    assert names == ["m", "bits4", "bits8"]


def test_a_finished_evaluation_keeps_rows_of_an_interrupted_one(model, models, cache, monkeypatch):
    interrupt_evaluation(model, models)
    (old,) = cache.iterdir()
    (cache / "old.json").write_text("{}")
    os.utime(cache / "old.json", (0, 0))
    evaluate(model, models[1:], **EVALUATION)
    assert [*cache.iterdir()] == [old]
    names = record_loads(monkeypatch)
    evaluate(model, models, **EVALUATION)
    assert names == [model.name, "bits8"]
    assert not [*cache.iterdir()]


def test_the_cache_key_covers_every_gguf_part(model, tmp_path):
    quantize(model, tmp_path / "x.gguf", recipe(type="Q8_0", max_shard_bytes=100_000))
    first, second, *_ = sorted(tmp_path.glob("x-*.gguf"))
    options, plain = EvaluationOptions("text", "name"), Settings()

    def key(options=options, settings=plain):
        return saved_rows._cache_key([open_model(first)], options, settings)

    for file in (second, tmp_path / "x.gguf.quantforge.json"):
        before = key()
        assert key() == before
        times = file.stat()
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        assert key() != before
    assert key(replace(options, length=8)) != key()
    assert key(settings=Settings(input_bits=8)) != key()


def test_an_unwritable_cache_does_not_stop_an_evaluation(model, models, tmp_path, cache):
    cache.parent.parent.write_text("no directory")
    assert interrupt_evaluation(model, models) == []
    evaluate(model, models, **EVALUATION)


@pytest.mark.parametrize(
    "others", [{}, {"engine": "llama.cpp"}, {"adapter": Path("a")}, {"tasks": Tasks(("t",))}]
)
def test_rows_with_engines_adapters_or_tasks_are_not_saved(model, models, cache, others):
    settings = Settings(adapter=others.get("adapter"))
    chosen = {name: value for name, value in others.items() if name != "adapter"}
    options = EvaluationOptions("text", "name", **chosen)
    with (
        suppress(StopError),
        resume_rows([open_model(path) for path in (model, *models)], options, settings) as kept,
    ):
        kept.add({"perplexity": 1.0})
        raise StopError
    assert bool([*cache.glob("*")]) == (not others)


def test_an_interrupted_eval_reports_the_saved_models(model, models, capsys):
    arguments = ("eval", model, *models, "--windows", 2, "--length", 16, "--no-speed")
    kept = "2 of 3 models are kept: the same command measures the others"
    for error in (InputError("x"), StopError(), Stopped(signal.SIGINT)):
        with pytest.MonkeyPatch.context() as patch:
            record_loads(patch, partial(crash_at_last, error=error))
            assert kept in run_command(capsys, *arguments).err
    assert run_command(capsys, *arguments).code == 0


def raise_full_disk(*_, **__):
    raise ResourceError("no space")


@pytest.mark.parametrize(
    ("module", "last", "options"),
    [
        ("cli.evaluate", "save_file", ("--report", "r.json")),
        ("cli.evaluate", "append_to_file", ("--summary", "s.md")),
        ("api.evaluate", "write_evaluation_card", ("--card", "bits4")),
    ],
)
def test_a_failed_report_write_shows_or_keeps_the_figures(
    model, models, cache, tmp_path, capsys, monkeypatch, module, last, options
):
    monkeypatch.chdir(tmp_path)
    models = [
        copy_model(path, tmp_path / path.name) for path in models
    ]  # a card is written into one
    arguments = ("eval", model, *models, "--windows", 2, "--length", 16, "--no-speed", *options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module(f"quantforge.{module}"), last, raise_full_disk)
        first = run_command(capsys, *arguments)
    assert first.code == ResourceError.exit_code
    if options[0] != "--card":
        assert "bits8" in first.out
        return
    assert "3 of 3 models are kept: the same command writes what is missing" in first.err
    names = record_loads(monkeypatch)
    again = run_command(capsys, *arguments)
    assert again.code == 0
    assert "bits8" in again.out
    assert not names
    assert not [*cache.iterdir()]
