"""Learned codes move one step at most, after many consistent gradients, within the grid."""

from __future__ import annotations

import torch

from quantforge.grids import E2M1_VALUES
from quantforge.quantizers.tuning.tuned_matrix import OFFSET_UNIT, LearnedCodes, LearnedTableCodes

RATE = 0.05  # half a step takes ten steps that agree


def make_codes(codes: list[list[int]], limits: tuple[int, int] = (-4, 3)) -> LearnedCodes:
    return LearnedCodes(torch.tensor(codes, dtype=torch.int8), limits, RATE)


def test_codes_move_one_step_against_consistent_gradients() -> None:
    codes = make_codes([[0, 0], [-4, 3]])
    gradient = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    for _ in range(8):
        codes.step(gradient, 1.0)
    assert not codes.snapshot().any()
    for _ in range(100):
        codes.step(gradient, 1.0)
    assert codes.stored().tolist() == [
        [-1, 1],
        [-4, 3],
    ]  # the second row is at the ends of its grid
    assert codes.stored().dtype == torch.int8


def test_random_gradients_change_almost_no_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = LearnedCodes(torch.zeros(64, 64, dtype=torch.uint8), (0, 7), 0.01)
    for step in range(100):
        codes.step(torch.randn(64, 64, generator=generator), 1 - step / 100)
    assert float(codes.snapshot().count_nonzero()) < 0.01 * 64 * 64


def test_code_steps_do_not_depend_on_gradient_size() -> None:
    """By row and by column: neither a loud output nor a loud input moves its codes faster."""
    codes = make_codes([[0] * 4] * 3)
    loud = torch.tensor([1.0, 100.0, 1e-6])[:, None] * torch.tensor([1.0, 1e3, 1e-3, 1.0])
    for _ in range(5):
        codes.step(loud, 1.0)
    steps = codes.offsets / OFFSET_UNIT
    assert float(steps.max()) - float(steps.min()) < 0.01
    assert float(steps.max()) < -0.2


def test_zero_gradients_move_no_codes() -> None:
    codes = make_codes([[1, -2]])
    codes.step(torch.zeros(1, 2), 1.0)
    assert codes.stored().tolist() == [[1, -2]]
    codes.step(torch.tensor([[1.0, 0.0]]), 1.0)  # a column that nothing reaches
    assert codes.offsets[0, 1] == 0
    assert codes.offsets[0, 0] < 0


def test_restore_returns_codes_to_the_snapshot() -> None:
    codes = make_codes([[0, 1, 2]])
    before = codes.snapshot()
    for _ in range(40):
        codes.step(torch.ones(1, 3), 1.0)
    assert codes.stored().tolist() == [[-1, 0, 1]]
    codes.restore(before)
    assert codes.stored().tolist() == [[0, 1, 2]]


def test_strips_of_rows_update_like_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, 4, (6, 8), dtype=torch.uint8, generator=generator)
    whole, parts = (LearnedCodes(start, (0, 3), 0.2) for _ in range(2))
    runs = [slice(0, 4), slice(4, 6)]
    for _ in range(12):
        gradient = torch.randn(6, 8, generator=generator)
        whole.step(gradient, 1.0)
        parts.combine_strips([parts.accumulate(gradient[run], run) for run in runs], 1.0)
        for run in reversed(runs):
            parts.update_strip(run)
    assert bool(whole.snapshot().any())
    assert int((whole.offsets - parts.offsets).abs().max()) < 0.02 * OFFSET_UNIT
    assert torch.equal(torch.cat([whole.stored(run) for run in runs]), whole.stored())
    assert whole.stored().dtype == torch.uint8
    assert int(whole.stored().max()) <= 3


def places(codes: list[list[int]], rate: float = RATE) -> LearnedTableCodes:
    return LearnedTableCodes.of(torch.tensor(codes, dtype=torch.uint8), E2M1_VALUES, rate)


def test_table_codes_move_to_neighbouring_values() -> None:
    codes = places([[0, 1, 3, 7, 9, 15]])
    assert codes.stored().tolist() == [[0, 1, 3, 7, 9, 15]]
    for gradient, result in ((-1.0, [1, 2, 4, 7, 0, 14]), (1.0, [9, 0, 2, 6, 10, 15])):
        codes = places([[0, 1, 3, 7, 9, 15]])
        for _ in range(200):
            codes.step(torch.full((1, 6), gradient), 1.0)
        assert codes.stored().tolist() == [result]
        assert codes.stored().dtype == torch.uint8


def test_offsets_move_equally_in_value_over_any_gap() -> None:
    """From 2 down over half a unit and up over one, from 4 over one and two, with the same gradients."""
    for gradient in (-1.0, 1.0):
        codes = places([[1, 4, 6, 12, 14]], 0.04)
        for _ in range(6):
            codes.step(torch.full((1, 5), gradient), 1.0)
        gaps = [1, 2, 4, 1, 2] if gradient < 0 else [1, 1, 2, 2, 4]
        gone = codes.offsets[0] / OFFSET_UNIT * torch.tensor(gaps)
        torch.testing.assert_close(gone, torch.full((5,), -0.24 * gradient), rtol=0, atol=1e-3)
