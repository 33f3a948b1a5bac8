"""Missing calibration rows are noted by the plan and are an event of the run."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import pytest

from quantforge import api
from quantforge.api.plan import plan_quantization
from quantforge.errors import InputError, RefusedError
from quantforge.events import Policy
from quantforge.execution.calibration import calibrate
from quantforge.files.reader import open_checkpoint
from quantforge.planning.calibration_rows import expected_rows
from quantforge.planning.planner import make_plan
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings
from quantforge_calibration import SourceError
from quantforge_calibration.draw import RowRequest, draw
from quantforge_calibration.row_count import builtin_rows, check_rows
from quantforge_calibration.tokenizer import TextTokenizer, load_tokenizer

DEMO = Path(__file__).parents[3] / "models/demo"
LENGTH = 512
THERE = 81  # rows of that length of the builtin text


@pytest.mark.parametrize(
    ("samples", "comes"), [(THERE, True), (THERE + 1, False), (128, True), (500, False)]
)
def test_too_few_builtin_rows_are_a_note_and_an_event(samples, comes):
    plan = api.plan(DEMO, method="gptq", bits=4, samples=samples)
    notes = [note for note in plan.notes if "asked for" in note]
    options = CalibrationOptions(samples=samples)
    calibrated = calibrate(DEMO, options, plan, vocabulary=1 << 20)
    events = [event for event in calibrated.events if event.kind == "few-calibration-rows"]
    assert (
        calibrated.sample.report.rows == min(samples, THERE) == builtin_rows(DEMO, LENGTH, samples)
    )
    assert (len(notes), len(events)) == ((0, 0) if comes else (1, 1))
    if not comes:
        assert notes == [f"calibration: {events[0].detail}"]
        assert f"--samples {THERE}" in events[0].detail
        with pytest.raises(RefusedError, match=f"{THERE} rows") as refused:
            Policy(strict=True).check(events)
        assert "--allow few-calibration-rows=1" in refused.value.hint
        Policy(strict=True, allow={"few-calibration-rows": 1}).check(events)


def test_calibration_mixture_reports_missing_and_duplicate_rows(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("word and word\n" * 60_000)
    options = CalibrationOptions(source=f"builtin=9,{text}=1")
    calibrated = calibrate(DEMO, options, api.plan(DEMO, method="gptq", bits=4), vocabulary=1 << 20)
    assert calibrated.sample.report.rows < calibrated.sample.report.rows_requested == 128
    assert "few-calibration-rows" in {event.kind for event in calibrated.events}
    assert "duplicate-calibration-rows" in {event.kind for event in calibrated.events}


def test_plan_without_calibration_has_no_row_note():
    plan = api.plan(DEMO, method="rtn", scales="absmax", bits=8, samples=500)
    assert not [note for note in plan.notes if "asked for" in note]


@pytest.mark.parametrize(
    ("options", "coming"),
    [
        ({}, THERE), ({"samples": 500}, THERE), ({"samples": 3}, 3), ({"source": "text.txt"}, 128),
        ({"source": "builtin=9,a.txt=1"}, 0), ({"source": "imatrix:m"}, 0),
    ],
)  # fmt: skip
def test_expected_row_count_is_known_before_the_run(options, coming):
    assert expected_rows(CalibrationOptions(**options), DEMO) == coming


def test_gguf_header_records_the_actual_row_count():
    planned = plan_quantization(DEMO, Recipe(type="Q4_K_M", method="rtn"), Settings(), None, {})
    recorded = [read(planned, name) for name in ("chunks_count", "dataset")]
    assert recorded == [THERE, "builtin"]


@pytest.mark.parametrize("source", ["{short}", "{short}=3,builtin=1", "{short}:no"])
def test_plan_and_run_refuse_short_text_with_the_same_message(source, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "a few words"}\n' * 9)
    source = source.format(short=short)
    options = {"method": "gptq", "bits": 4, "calibration": source}
    plan = api.plan(DEMO, method="gptq", bits=4)
    with pytest.raises(InputError) as refused_by_run:
        calibrate(DEMO, CalibrationOptions(source=source), plan, vocabulary=1 << 20)
    for again in range(2):  # what is remembered is that a text is long enough
        with pytest.raises(InputError) as refused:
            api.plan(DEMO, **options)
        error_text = (refused.value.message, refused.value.hint)
        assert error_text == (refused_by_run.value.message, refused_by_run.value.hint), again


@pytest.mark.parametrize("source", ["a.txt", "b.txt", "c.jsonl", "a.txt=2,c.jsonl=1"])
def test_row_count_check_agrees_with_drawing(source, tmp_path):
    """Of one document and of many, around the last row; a text of long words needs more bytes for a token."""
    tokenizer = load_tokenizer(DEMO)
    for name, text in (("a.txt", "word and word\n" * 100), ("b.txt", "x" * 4000 + " " * 4000)):
        (tmp_path / name).write_text(text)
    (tmp_path / "c.jsonl").write_text('{"text": "one document"}\n' * 60)
    specification = source.replace("a.", f"{tmp_path}/a.").replace("b.", f"{tmp_path}/b.")
    specification = specification.replace("c.jsonl", f"{tmp_path}/c.jsonl")

    def drawn(rows):
        return refusal(lambda: draw(RowRequest(specification, rows=rows, length=16), tokenizer))

    counts = range(3, 2048)
    beyond = counts[bisect_left(counts, True, key=lambda rows: bool(drawn(rows)))]
    for rows in (3, beyond - 1, beyond, beyond + 1):
        assert drawn(rows) == refusal(
            lambda rows=rows: check_rows(specification, DEMO, rows, 16)
        ), rows
    assert not drawn(beyond - 1)


def refusal(ask):
    try:
        ask()
    except SourceError as error:
        return error.message
    return ""


def test_row_counting_stops_early_on_a_huge_text(tmp_path, monkeypatch):
    (tmp_path / "huge.txt").write_text("some words of a long text\n" * 100_000)
    encoded = []
    monkeypatch.setattr(
        TextTokenizer,
        "encode",
        lambda _, text, place: encoded.append(len(text)) or [0] * len(text),
    )
    check_rows(str(tmp_path / "huge.txt"), DEMO, 4, 64)
    assert sum(encoded) <= 4 * 64 * 8
    encoded.clear()
    assert builtin_rows(DEMO, 64, 4) == 4
    assert len(encoded) == 1  # of its documents


def read(planned, name):
    """Read a value from the header that a GGUF file will have."""
    header = planned.files[0].fixed[0][1]
    at = header.index(f"quantize.imatrix.{name}".encode()) + len(f"quantize.imatrix.{name}") + 4
    if name == "chunks_count":
        return int.from_bytes(header[at : at + 4], "little")
    size = int.from_bytes(header[at : at + 8], "little")
    return header[at + 8 : at + 8 + size].decode()


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"method": "gptq", "bits": 4}, 1 / 16),
        ({"bits": 3}, 1 / 16),  # awq+gptq
        ({"method": "gptq", "type": "Q2_K"}, 1 / 16),
        ({"method": "rtn", "bits": 4}, 0),
        ({"method": "awq", "bits": 4}, 0),
        ({"method": "gptq", "scheme": "int8:row+int8:token"}, 1 / 16),
        ({"method": "gptq", "scheme": "int8:row+int8:tensor:static"}, 0),  # scales of inputs
        ({"method": "gptq", "bits": 4, "kv_cache": "fp8"}, 0),
        ({"method": "gptq", "bits": 4, "calibration": CalibrationOptions(random_share=0.0)}, 0),
        (
            {"method": "rtn", "type": "Q2_K", "calibration": CalibrationOptions(random_share=0.5)},
            0.5,
        ),
    ],
)
def test_error_feedback_methods_default_to_some_random_rows(options, share):
    plan = make_plan(Recipe(**options), open_checkpoint(DEMO))
    assert plan.recipe.calibration.random_share == share
    assert make_plan(plan.recipe, open_checkpoint(DEMO)).recipe == plan.recipe


def test_random_tokens_lie_within_the_model_vocabulary(tmp_path):
    text = tmp_path / "letters.txt"
    text.write_text("qzxkvjw" * 2000)  # no two are one token: all ids are below 300
    plan = api.plan(DEMO, method="gptq", bits=4)
    options = CalibrationOptions(source=str(text), random_share=0.0, length=64)
    plain, results = (
        calibrate(DEMO, replace(options, random_share=share), plan, vocabulary=300).sample
        for share in (0.0, 0.5)
    )
    random_rows = results.ids[results.ids.ne(plain.ids).any(1)]
    assert len(random_rows) == results.report.random_rows == options.samples // 2
    assert random_rows.amax() < 300


def test_plan_notes_random_rows():
    for method, noted in (("gptq", True), ("rtn", False)):
        plan = api.plan(DEMO, method=method, bits=4)
        messages = [note for note in plan.notes if "0.0625 of the rows hold random tokens" in note]
        assert bool(messages) is noted


def test_vocabulary_without_random_tokens_is_an_event(monkeypatch):
    options = CalibrationOptions(random_share=0.5)
    plan = api.plan(DEMO, method="gptq", bits=4)
    words = load_tokenizer(DEMO)
    words.tokenizer.add_special_tokens([*words.tokenizer.get_vocab(with_added_tokens=False)])
    monkeypatch.setattr("quantforge.execution.calibration.load_tokenizer", lambda *_: words)
    calibrated = calibrate(DEMO, options, plan, vocabulary=1 << 20)
    monkeypatch.undo()
    (event,) = [event for event in calibrated.events if event.kind == "no-random-rows"]
    assert f"{calibrated.sample.report.rows // 2} asked for" in event.detail
    with pytest.raises(RefusedError):
        Policy(strict=True).check(calibrated.events)
    events = calibrate(DEMO, options, plan, vocabulary=1 << 20).events
    assert "no-random-rows" not in {event.kind for event in events}


def test_unused_text_columns_are_noted_and_recorded(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "word and word and word", "id": 1, "url": "x"}\n' * 40)
    options = CalibrationOptions(source=str(rows), samples=2, length=32)
    plan = api.plan(DEMO, method="gptq", bits=4, samples=2, length=32)
    calibrated = calibrate(DEMO, options, plan, vocabulary=1 << 20)
    assert calibrated.notes == ("calibration: columns that are not used: id, url in rows.jsonl",)
    assert calibrated.describe()["unused_columns"] == {"rows.jsonl": ["id", "url"]}
    without = calibrate(DEMO, CalibrationOptions(samples=2, length=32), plan, vocabulary=1 << 20)
    assert (without.notes, "unused_columns" in without.describe()) == ((), False)
