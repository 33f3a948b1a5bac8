"""Variants of one model in one pass: the bytes of separate commands, also after a kill; refusals before any work."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest

from quantforge.checkpoint.disk import place_of_run
from quantforge.checkpoint.lock import StaleLockMonitor
from quantforge.cli.meter import Clock
from quantforge.errors import QuantForgeError, UsageError
from quantforge.execution import execute, lockstep
from quantforge.settings import Settings
from quantforge.verbs import quantize_variants as quantize_variants_module
from quantforge.verbs.asked_result import Variant
from quantforge.verbs.join_variants import _Vacancies, join_variants
from quantforge.verbs.quantize_variants import asked_variants, quantize_variants
from tests.runs import CALIBRATION, StopError, quantize, swift, tree


def _recipes():
    found = {
        "int4": swift("gptq", bits=4),
        "int3": swift("gptq", bits=3),
        "both": swift("awq+gptq", bits=3),
        "plain": swift("rtn", bits=4),
        "ranges": swift("smooth", scheme="int8:row:sym+int8:tensor:static"),
    }
    text = replace(CALIBRATION, random=0.0)  # rows of gptq are others by default
    return {name: replace(one, calibration=text) for name, one in found.items()}


def _variants(folder):
    folder.mkdir(exist_ok=True)
    return [Variant(wanted, folder / name) for name, wanted in _recipes().items()]


@pytest.mark.thorough
def test_each_has_the_bytes_of_its_separate_command_also_after_a_stop(model, tmp_path):
    alone, together, stopped = (tmp_path / name for name in ("alone", "together", "stopped"))
    alone.mkdir()
    for name, wanted in _recipes().items():
        quantize(model, alone / name, wanted)
    with patch.object(lockstep, "observe_together", wraps=lockstep.observe_together) as shared:
        quantize_variants(model, _variants(together))
    assert {len(call.args[0]) for call in shared.call_args_list} == {4}  # all but the ranges
    assert tree(together) == tree(alone)

    advance = execute.Run.pass_block
    calls = []

    def stopping(self, *args, **options):
        advance(self, *args, **options)
        calls.append(self)
        if len(calls) == 3:
            raise StopError

    with patch.object(execute.Run, "pass_block", stopping), pytest.raises(StopError):
        quantize_variants(model, _variants(stopped))
    outcomes = quantize_variants(model, _variants(stopped))
    assert outcomes[0].resumed
    assert tree(stopped) == tree(alone)


def test_a_stage_is_left_when_its_group_has_ended(model, tmp_path):
    carried_out, left = quantize_variants_module.carry_out, []

    def noting(group):
        outcomes = carried_out(group)
        left.append([place_of_run(one.out).exists() for one in outcomes.values()])
        return outcomes

    with patch.object(quantize_variants_module, "carry_out", noting):
        quantize_variants(model, _variants(tmp_path / "out"))
    assert left == [[False] * 4, [False]]


def test_two_variants_of_one_output_are_an_error(model, tmp_path):
    twice = [Variant(wanted, tmp_path / "out") for wanted in _recipes().values()]
    with pytest.raises(UsageError, match="two variants"):
        quantize_variants(model, twice)


def test_what_exists_is_refused_before_work_on_any(model, tmp_path):
    variants = _variants(tmp_path / "folder")
    variants[1].out.mkdir()
    (variants[1].out / "mine").write_text("kept")
    with pytest.raises(QuantForgeError, match="int3"):
        quantize_variants(model, variants)
    assert [path.name for path in (tmp_path / "folder").iterdir() if path.name[0] != "."] == [
        "int3"
    ]


def test_who_looks_for_work_leaves_half_of_it_for_others(model, tmp_path):
    wanted = [Variant(swift("gptq", bits=bits), tmp_path / str(bits)) for bits in (2, 3, 4, 8)]
    asked = dict(enumerate(asked_variants(model, wanted, Settings())))
    first, second = (
        _Vacancies(dict(asked), lambda number: False, StaleLockMonitor(print)) for _ in range(2)
    )
    with ExitStack() as one, ExitStack() as two:
        assert [ready.number for ready in first.taken(one)] == [0, 1]
        assert [ready.number for ready in second.taken(two)] == [2]


def test_the_share_goes_with_the_work_of_all_variants(model, tmp_path):
    told = []
    wanted = [Variant(swift("gptq", bits=bits), tmp_path / str(bits)) for bits in (2, 3, 4, 8)]
    wanted += [Variant(swift("rtn", bits=8), tmp_path / "plain")]
    quantize_variants(model, wanted, Settings(progress=told.append))
    assert max(one.share for one in told if one.phase == "reading") <= 0.07
    blocks = [one for one in told if one.part.startswith("block") and one.share < 0.8]
    shares = [one.share for one in told if one.phase == "rounding"]
    widest = max(after - before for before, after in pairwise(shares))
    assert blocks
    assert widest < 0.2  # it neither stands nor jumps


def test_who_waits_for_others_moves_with_what_they_have_made_and_estimates_nothing(model, tmp_path):
    wanted = [Variant(swift("rtn", bits=bits), tmp_path / str(bits)) for bits in (2, 3, 4)]
    asked = asked_variants(model, wanted, Settings())
    told, there, held = [], set(), ExitStack()

    def listen(report):
        told.append(report)
        if report.waits and len(there) < 2:
            there.add(1 + len(there))

    with held:
        for one in asked[1:]:  # as another process does
            held.enter_context(one.wanted.stage)
        settings = Settings(join=True, progress=listen)
        assert join_variants(model, wanted, there.__contains__, tmp_path / "x", settings) == [0]
    waiting = [one for one in told if one.waits]
    assert [round(one.share, 1) for one in waiting] == [0.3, 0.7]
    assert told[-1].share == 1.0
    clock = Clock(0.0, works=(0.0, 0.0))
    assert clock.remaining(waiting[0]) is None
    assert clock.remaining(replace(waiting[0], waits=False)) is not None
