"""Token weights: how much an error at the output of a linear raises the loss, per calibration token and strip of rows.

The weight of a token is the mean square of the loss's gradient (`guidance.backward`) over a strip of output rows. With
weights ``s`` the Hessian ``sum_t s_t x_t x_t^T`` of a strip gives, up to a factor, the cost of an error of its rows at
the output of the model; the plain Hessian gives its cost at the output of the linear (GuidedQuant, arXiv 2505.07004,
with labels sampled from the model instead of the text).

A backward pass goes from the last block to the first and rounding from the first to the last, so all weights are
written to one file: float32 ``[rows, length, strips]`` for each linear. Linears of experts read only the tokens that
are routed to them, so their weights follow in runs: the int32 numbers of the tokens and then their weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from quantforge.errors import InputError, RefusedError, off_option
from quantforge.files.disk import no_space_error, open_existing, recreate_file, write_errors
from quantforge.quantizers.guidance.gradients import OutputGradients, strip_weights
from quantforge_files import system

# By linear: offset and number of tokens of each run
TokenRuns = Mapping[str, Sequence[Sequence[int]]]

CLIPPED_SHARE = 1e-3  # share of tokens whose weights are clipped


class TokenWeights:
    """File with the weights of all tokens for some linears; can be passed as ``visit`` to `backward`, which fills it.

    Attributes:
        rows_seen: number of calibration rows written for each linear.
        runs: for each linear of an expert, the offset and number of tokens of each of its runs.

    Raises:
        ResourceError: the file cannot be created or written.
    """

    def __init__(
        self,
        path: Path,
        linears: Sequence[str],
        shape: tuple[int, int, int],
        experts: Iterable[str] = (),
        runs: TokenRuns | None = None,
    ) -> None:
        """Create the file, or open an existing one.

        Args:
            path: path in a run's own directory.
            linears: canonical names of linears that read every token.
            shape: rows, length and strips.
            experts: canonical names of linears of experts.
            runs: runs of an existing file; None creates the file.
        """
        self._path, self._shape = path, shape
        self._row_bytes = 4 * shape[1] * shape[2]
        self._bytes = self._row_bytes * shape[0]
        self._offsets = {name: index * self._bytes for index, name in enumerate(linears)}
        self.runs: dict[str, list[tuple[int, int]]] = {name: [] for name in experts}
        self._end = size = len(linears) * self._bytes
        with write_errors(path, size):
            self._file = recreate_file(path) if runs is None else open_existing(path, os.O_RDWR)
            if runs is None and size:
                system.allocate(self._file, size)
        for name, row_runs in (runs or {}).items():
            self.runs[name] = [(offset, count) for offset, count in row_runs]
        self.rows_seen = dict.fromkeys((*linears, *self.runs), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    @property
    def linears(self) -> Iterable[str]:
        """Return the names of the linears."""
        return self.rows_seen.keys()

    @property
    def count(self) -> int:
        """Return the number of written rows, summed over all linears."""
        return sum(self.rows_seen.values())

    def __call__(self, output: OutputGradients) -> None:
        """Write the weights of a micro-batch.

        Raises:
            InputError: the square of a gradient overflows float32.
            RefusedError: the linear does not read each token exactly once.
        """
        if output.name not in self.rows_seen:
            return
        if output.tokens is None and output.gradients.shape[1:-1] != (self._shape[1],):
            raise RefusedError(
                f"{output.name}: it reads other rows than the calibration's tokens, so that they cannot be weighed",
                off_option("--guided-hessians"),
                tensor=output.name,
            )
        weights = strip_weights(output.gradients, self._shape[2]).float().cpu().contiguous()
        if not bool(weights.isfinite().all()):
            nonfinite_index = int((~weights.isfinite()).flatten(1).any(1).nonzero()[0])
            row = (
                output.start + nonfinite_index
                if output.tokens is None
                else output.tokens[nonfinite_index] // self._shape[1]
            )
            raise InputError(
                f"{output.name}: the squares of the gradients of its output are not finite in calibration row {row}",
                f"the model is damaged, or {off_option('--guided-hessians')}",
                tensor=output.name,
            )
        if output.tokens is not None:
            self._write_tokens(output.name, output.tokens, weights)
            self.rows_seen[output.name] = self._shape[0]
            return
        self._write(self._offsets[output.name] + output.start * self._row_bytes, weights)
        self.rows_seen[output.name] += len(weights)

    def of(self, linear: str) -> Tensor:
        """Return the weights of all tokens for a linear, float32 ``[rows, length, strips]``; 0 for unread tokens."""
        if linear in self._offsets:
            return self._read(self._offsets[linear], torch.empty(self._shape))
        weights = torch.zeros(self._shape)
        flat = weights.view(-1, self._shape[2])
        for offset, count in self.runs[linear]:
            tokens = self._read(offset, torch.empty(count, dtype=torch.int32)).long()
            tokens.clamp_(0, len(flat) - 1)  # a damaged file, which the checksum detects
            flat[tokens] = self._read(offset + 4 * count, torch.empty(count, self._shape[2]))
        return weights

    def finish(self) -> None:
        """Flush the file to disk."""
        with write_errors(self._path, 0):
            system.sync_file(self._file)

    def _write_tokens(self, name: str, tokens: Tensor, weights: Tensor) -> None:
        """Append the weights ``[tokens, strips]`` of tokens routed to an expert."""
        if not len(tokens):
            return
        self.runs[name].append((self._end, len(tokens)))
        for values in (tokens.int(), weights):
            self._write(self._end, values)
            self._end += values.nbytes

    def _read(self, offset: int, out: Tensor) -> Tensor:
        """Fill a contiguous tensor with bytes from an offset, and return it."""
        view = memoryview(out.view(-1).view(torch.uint8).numpy().data)
        if not system.read_into(self._file, view, offset):
            raise no_space_error(self._path, self._bytes, "the file ends early")
        return out

    def _write(self, offset: int, values: Tensor) -> None:
        view = memoryview(values.view(-1).view(torch.uint8).numpy().data)
        with write_errors(self._path, len(view)):
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count


def clip_largest(weights: Tensor) -> Tensor:
    """Return weights ``[rows, length]`` with the largest `CLIPPED_SHARE` of positive ones clipped to the next one."""
    positive = weights[weights > 0]
    return weights.clamp(
        max=positive.kthvalue(len(positive) - int(CLIPPED_SHARE * len(positive))).values
    )
