"""Output of a unit: tensors written in strips are read back with one checksum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.errors import IntegrityError
from quantforge.execution import unit_output
from quantforge.execution.data_free import jointly_rounded
from quantforge.execution.rounding import MatrixRounder
from quantforge.execution.unit_output import UnitOutput
from quantforge.files.safetensors import read_tensor
from quantforge.files.writer import WeightsWriter
from quantforge.formats.storage import get_storage
from quantforge.notation import parse_layer
from quantforge.plans import Action, FilePlan, StoredTensor, TensorPlan

ROWS, SCALAR = StoredTensor("rows", "F32", (7, 4)), StoredTensor("scalar", "F32", ())
EVEN, ODD = StoredTensor("even", "F32", (2, 3)), StoredTensor("odd", "F32", (2, 3))
PLACES = ((ROWS, 0), (SCALAR, 112), (EVEN, 116), (ODD, 140))
VALUE = torch.arange(28.0).view(7, 4)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UnitOutput]:
    monkeypatch.setattr(unit_output, "COPY_STRIP_BYTES", 40)  # runs of two rows
    writer = WeightsWriter(tmp_path, [FilePlan("file", 164, (), PLACES)])
    yield UnitOutput(get_storage("plain"), writer)
    writer.sync()


def unquantized_plan(*stored: StoredTensor, shape: tuple[int, ...]) -> TensorPlan:
    return TensorPlan("t", "F32", shape, Action.KEEP, "", outputs=stored)


def value_of(output: UnitOutput, *names: str) -> list[Tensor]:
    return [read_tensor(output._writer.entry(name)) for name in names]


def test_strips_written_have_the_checksum_of_the_whole(output: UnitOutput) -> None:
    whole = unit_output.checksum(VALUE, 0)
    output.write_unquantized_rows(
        unquantized_plan(ROWS, shape=(7, 4)), lambda first, last: VALUE[first:last]
    )
    assert output.finish() == {"rows": whole}
    assert torch.equal(value_of(output, "rows")[0], VALUE)
    output.check("rows", whole, "again")
    with pytest.raises(IntegrityError, match="rows is not what") as refused:
        output.check("rows", whole ^ 1, "again")
    assert refused.value.hint == "again"


def test_tensors_of_another_process_are_copied(output: UnitOutput, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    writer = WeightsWriter(tmp_path / "other", [FilePlan("file", 164, (), PLACES)])
    there = UnitOutput(output.storage, writer)
    for name, value in (("rows", VALUE), ("scalar", torch.tensor(3.0))):
        there.write(name, value)
    there.finish()
    for name in there.sums:
        output.copy(name, writer.entry(name))
    assert output.finish() == there.sums
    rows, scalar = value_of(output, "rows", "scalar")
    assert torch.equal(rows, VALUE)
    assert scalar.item() == 3
    output.check("scalar", there.sums["scalar"], "")


def test_interleaved_tensor_is_written_as_two(output: UnitOutput) -> None:
    value = VALUE[:2].repeat(1, 2)[:, :6]
    output.write_unquantized(unquantized_plan(EVEN, ODD, shape=(2, 6)), value)
    even, odd = value_of(output, "even", "odd")
    assert torch.equal(even, value[:, ::2])
    assert torch.equal(odd, value[:, 1::2])
    assert output.sums.keys() == {"even", "odd"}


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (unquantized_plan(SCALAR, shape=()), torch.tensor(2.0)),
        (unquantized_plan(ROWS, shape=(7, 4)), VALUE),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_unquantized_tensor_is_copied_in_strips_where_possible(
    output: UnitOutput, tensor: TensorPlan, value: Tensor, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    requested: list[object] = []

    def rows(_: TensorPlan, first: int, last: int) -> Tensor:
        requested.append((first, last))
        return value[first:last]

    def read(_: TensorPlan) -> Tensor:
        requested.append("whole")
        return value

    monkeypatch.setattr(type(output.storage), "needs_whole_tensor", lambda *_: whole)
    source = SimpleNamespace(whole=read, rows=rows)
    rounding: Any = SimpleNamespace(source=source, output=output)
    MatrixRounder.copy(rounding, tensor)
    assert torch.equal(value_of(output, tensor.outputs[0].name)[0], value)
    in_runs = bool(value.shape) and not whole
    assert requested == ([(0, 2), (2, 4), (4, 6), (6, 7)] if in_runs else ["whole"])


def test_matrices_of_one_input_and_joint_scheme_are_grouped() -> None:
    """Of a scheme with a joint parameter, and only those that have the same scheme and input."""
    joint, other = parse_layer("NVFP4A16"), parse_layer("int4:g32:sym")
    query = TensorPlan("q", "F32", (4, 4), Action.QUANTIZE, "", joint, shared="attn")
    same = replace(query, name="k")
    away = replace(query, name="up", shared="mlp")
    mixed = replace(query, name="v", scheme=other)
    alone = replace(query, name="o", shared="")
    plan: Any = SimpleNamespace(quantized=lambda: (query, same, away, mixed, alone))
    assert jointly_rounded(query, plan) == [query, same]
    assert jointly_rounded(same, plan) == [query, same]
    assert jointly_rounded(away, plan) == [away]
    assert jointly_rounded(mixed, plan) == [mixed]
    assert jointly_rounded(alone, plan) == [alone]
    free = replace(query, scheme=None)
    assert jointly_rounded(free, plan) == [free]
