"""Variants of one model in one pass have the bytes of separate commands, even after a stop."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest

from quantforge.api import variants
from quantforge.api.variants import plan_variants
from quantforge.cli.progress_bar import Clock
from quantforge.errors import QuantForgeError
from quantforge.execution import execute
from quantforge.execution.unit_recorder import UnitRecorder
from quantforge.files.disk import run_folder
from quantforge.progress import report_to
from quantforge.settings import Settings
from tests.runs import CALIBRATION, StopError, fast_recipe, file_digests, make_variants, quantize


def _recipes():
    recipes = {
        "int4": fast_recipe("gptq", bits=4),
        "int3": fast_recipe("gptq", bits=3),
        "both": fast_recipe("awq+gptq", bits=3),
        "plain": fast_recipe("rtn", bits=4),
        "ranges": fast_recipe("smooth", scheme="int8:row:sym+int8:tensor:static"),
    }
    text = replace(CALIBRATION, random_share=0.0)  # rows of gptq are others by default
    return {name: replace(recipe, calibration=text) for name, recipe in recipes.items()}


def _made(model, folder, settings=None):
    folder.mkdir(exist_ok=True)
    return make_variants(model, _recipes(), lambda name, _: folder / name, settings or Settings())


def _planned(model, folder, *bits, method="gptq"):
    recipes = {str(width): fast_recipe(method, bits=width) for width in bits}
    return plan_variants(model, recipes, lambda name, _: folder / name, Settings())[0]


@pytest.mark.thorough
def test_variants_match_separate_commands_even_after_a_stop(model, tmp_path):
    alone, together, stopped = (tmp_path / name for name in ("alone", "together", "stopped"))
    alone.mkdir()
    for name, recipe in _recipes().items():
        quantize(model, alone / name, recipe)
    with patch.object(execute, "observe", wraps=execute.observe) as shared:
        assert _made(model, together) == tuple(_recipes())
    assert {len(call.args[1]) for call in shared.call_args_list} == {4, 1}  # all but the ranges
    assert file_digests(together) == file_digests(alone)
    assert _made(model, together) == ()

    report = UnitRecorder.report
    calls = []

    def stopping(self, name, *args):
        report(self, name, *args)
        calls.extend([name] if name.startswith("block") else [])
        if len(calls) == 3:
            raise StopError

    with patch.object(UnitRecorder, "report", stopping), pytest.raises(StopError):
        _made(model, stopped)
    reports = []
    with report_to(reports.append):
        _made(model, stopped, Settings(progress=reports.append))
    finished = [progress.part for progress in reports if progress.part == "block 0"]
    assert len(finished) == len(_recipes()) - 3  # those of the others are kept
    assert file_digests(stopped) == file_digests(alone)


def test_a_group_closes_its_stages_when_it_ends(model, tmp_path):
    carried_out, groups = variants.run_group, []

    def noting(group):
        assert not any(run_folder(out).exists() for outs in groups for out in outs)
        carried_out(group)
        groups.append([stage.out for stage, _ in group])

    with patch.object(variants, "run_group", noting):
        _made(model, tmp_path / "out")
    assert [len(outs) for outs in groups] == [4, 1]


def test_an_existing_variant_output_is_refused_before_work(model, tmp_path):
    directory = tmp_path / "folder/int3"
    directory.mkdir(parents=True)
    (directory / "mine").write_text("kept")
    with pytest.raises(QuantForgeError, match="int3"):
        _made(model, tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["int3"]


def test_a_process_takes_half_of_the_open_variants(model, tmp_path):
    first, second = (
        variants._Queue(planned.jobs, planned.files, Settings(join=True))
        for planned in (_planned(model, tmp_path, 2, 3, 4, 8) for _ in range(2))
    )
    with ExitStack() as first_stack, ExitStack() as second_stack:
        assert [*first.take(first_stack)] == ["2", "3"]
        assert [*second.take(second_stack)] == ["4"]


def test_the_progress_share_covers_all_variants(model, tmp_path):
    reports = []
    recipes = {str(bits): fast_recipe("gptq", bits=bits) for bits in (2, 3, 4, 8)}
    recipes["plain"] = fast_recipe("rtn", bits=8)
    with report_to(reports.append):
        make_variants(
            model, recipes, lambda name, _: tmp_path / name, Settings(progress=reports.append)
        )
    assert max(report.share for report in reports if report.phase == "reading") <= 0.07
    blocks = [
        report for report in reports if report.part.startswith("block") and report.share < 0.8
    ]
    shares = [report.share for report in reports if report.phase == "rounding"]
    widest = max(after - before for before, after in pairwise(shares))
    assert blocks
    assert widest < 0.2  # it neither stands nor jumps


def test_waiting_progress_follows_other_processes_without_an_estimate(model, tmp_path):
    reports, there = [], set()

    def listen(report):
        reports.append(report)
        if report.waits and len(there) < 2:
            there.add(str(3 + len(there)))

    others_plan = _planned(model, tmp_path, 3, 4, method="rtn")  # as another process does
    planned = _planned(model, tmp_path, 2, 3, 4, method="rtn")
    planned = replace(planned, settings=Settings(join=True))
    with ExitStack() as others, report_to(listen):
        for job in others_plan.jobs.values():
            others.enter_context(job.stage)
        with patch.object(variants, "is_up_to_date", lambda job, _: job.out.name in there):
            assert planned.make(tmp_path / "x", 0) == ("2",)
    waiting = [progress for progress in reports if progress.waits]
    assert [round(progress.share / 0.95, 1) for progress in waiting] == [0.3, 0.7]
    clock = Clock(0.0, work_span=(0.0, 0.0))
    assert clock.remaining(waiting[0]) is None
    assert clock.remaining(replace(waiting[0], waits=False)) is not None
