"""Sizes of a run on which its peak memory depends, beside the model."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.model.statistics import Statistic
from quantforge.recipe import CalibrationOptions


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Facts on which the peak depends beside the model.

    Attributes:
        calibration: how many rows there are, of what length.
        words: the transforms and the rounder.
        searched: rows that a transform compares outputs on.
        needs: the statistics that are observed; none means that nothing is streamed.
        in_memory: hidden states are held in memory and not on disk.
        workers: strips of rows that are rounded side by side, `settings.workers_of`.
        guide: strips of rows of a matrix with a guided Hessian of their own, 0 without a backward pass.
        tune: epochs in which scales are learned on the whole model, 0 for none.
        whole: the transforms of the whole source.
    """

    calibration: CalibrationOptions
    words: tuple[str, ...]
    searched: int
    needs: frozenset[Statistic]
    in_memory: bool
    workers: int
    guide: int = 0
    tune: int = 0
    whole: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Return the number of calibration rows."""
        return self.calibration.samples

    @property
    def length(self) -> int:
        """Return the number of tokens of a row."""
        return self.calibration.length

    @property
    def micro_batch(self) -> int:
        """Return the number of rows of one forward."""
        return self.calibration.micro_batch

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one micro-batch."""
        return min(self.rows, self.micro_batch) * self.length

    @property
    def held_rows(self) -> int:
        """Return of how many rows states are in memory: from disk a micro-batch is read while the last is held."""
        return self.rows if self.in_memory else min(self.rows, 2 * self.micro_batch)
