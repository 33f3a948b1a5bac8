"""A backward pass, one block at a time: the gradient of the loss at the output of every linear.

The loss is the cross-entropy of one label for each position, drawn from what the model itself predicts there. Its
gradients square to the Fisher information: ``sum over tokens of (e x)^T diag(g^2) (e x) / 2`` is, to second order, the
divergence in nats that an error ``e`` of a weight causes at the output of the model (``x`` the input of the linear,
``g`` the gradient of its output). Labels of a text instead would measure what the text surprises the model with.

Backpropagation wants the input of every block, last block first, and a stream has them first block first. The forward
pass keeps the hidden states in front of every n-th of n^2 blocks. The backward pass takes these runs of blocks from the
last to the first: it computes the states inside of a run again, and then goes back through its blocks, each of them
computed once more with gradients. That holds about 2n copies of the hidden states instead of n^2, and takes three
forward passes in place of one.

Memory: those copies and one of the gradients (in memory, or on disk), one block, the activations of one row for each
thread, and for one micro-batch what the linears of the block read and the gradients of what they return. Through the
head go only as many rows at a time as `LOGITS` allows.

On a CPU each row passes by itself on one thread, and nothing is summed over rows, so that gradients and labels depend
neither on the number of threads nor on the micro-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from quantforge.architectures.match import Matched
from quantforge.errors import InputError, RefusedError
from quantforge.model.block import Batch, BlockPart
from quantforge.model.hidden_states import HiddenStates
from quantforge.model.loading import TensorSource, empty
from quantforge.model.stream import ModelStream
from quantforge.numerics.finite import finite
from quantforge.numerics.products import side_by_side
from quantforge.numerics.threads import one_thread

LOGITS = 1 << 27  # logits of the rows that pass the head at the same time
DRAWN = 1 << 22  # logits of which labels are drawn at a time, in float64


@dataclass(frozen=True, slots=True, eq=False)
class OutputGradients:
    """Inputs and output gradients of one linear in one micro-batch.

    Attributes:
        name: canonical name of the linear, e.g. ``model.layers.3.mlp.up_proj``, or that of the head.
        start: first calibration row of the micro-batch.
        inputs: float32 ``[rows, length, in_features]``.
        gradients: float32 ``[rows, length, out_features]``, of the loss summed over all positions, in nats.
    """

    name: str
    start: int
    inputs: Tensor
    gradients: Tensor


Visit = Callable[[OutputGradients], None]


class StreamOptions(TypedDict, total=False):
    """Keyword arguments of `ModelStream` that a backward pass takes as well."""

    micro_batch: int
    device: str | torch.device
    activations: Path | None


def backward(
    checkpoint: TensorSource,
    matched: Matched,
    rows: Tensor,
    visit: Visit,
    *,
    seed: int = 0,
    **options: Unpack[StreamOptions],
) -> Tensor:
    """Hand the output gradients of all linears to ``visit``, the head first and the first block last.

    Args:
        checkpoint: as of `ModelStream`.
        matched: of the same checkpoint.
        rows: token ids ``[rows, length]``.
        visit: called for each linear and micro-batch, on the calling thread, with torch on one thread.
        seed: decides the labels, with the number of the row and the position in it.
        options: as of `ModelStream`.

    Returns:
        The labels that were drawn, int64 ``[rows, length]``.

    Raises:
        InputError: as `ModelStream`; logits or gradients are not finite.
        RefusedError: a block holds experts.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        stream = _BackwardStream(checkpoint, matched, rows, **options)
        with stream, one_thread():
            return stream.run(visit, seed)


def draw_labels(logits: Tensor, seed: int, first: int) -> Tensor:
    """Draw a label for each position from ``logits`` ``[rows, length, vocab]``: int64 ``[rows, length]``.

    What decides a draw is the seed, the number of the row (``first`` for that of ``logits[0]``), the position and the
    logits there.
    """
    step = max(1, DRAWN // logits.shape[2])
    labels = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for index, row in enumerate(logits):
        key = np.array([seed, first + index], dtype=np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).random(len(row))
        uniform = torch.from_numpy(drawn).to(logits.device)
        for start in range(0, len(row), step):
            run = slice(start, start + step)
            chances = row[run].double().softmax(-1).cumsum(-1)
            wanted = uniform[run, None] * chances[:, -1:]
            found = torch.searchsorted(chances, wanted, right=True)[:, 0]
            labels[index, run] = found.clamp(max=logits.shape[2] - 1)
    return labels


def strip_weights(gradients: Tensor, strips: int) -> Tensor:
    """Return the mean of the squares over each strip of output rows: ``[..., out_features]`` to ``[..., strips]``.

    Strips are runs of consecutive rows whose lengths differ by one at most.

    Raises:
        ValueError: more strips than rows.
    """
    if not 0 < strips <= gradients.shape[-1]:
        raise ValueError(f"{strips} strips of {gradients.shape[-1]} rows")
    parts = gradients.square().tensor_split(strips, -1)
    return torch.stack([part.mean(-1) for part in parts], -1)


class SquaredGradients:
    """Sums of `strip_weights` over all tokens, by linear: a ``visit`` of `backward`.

    Rows are added in their order, so that the sums do not depend on the micro-batch.
    """

    def __init__(self, strips: int = 1) -> None:
        self._strips = strips
        self.sums: dict[str, Tensor] = {}  # float64 [strips], by the name of the linear

    def __call__(self, seen: OutputGradients) -> None:
        """Add a micro-batch."""
        for row in strip_weights(seen.gradients, self._strips).sum(1, dtype=torch.float64):
            before = self.sums.get(seen.name)
            self.sums[seen.name] = row if before is None else before + row


class _Passed(NamedTuple):
    """What one pass through a module left: gradients of its input, and of each linear the input and gradients."""

    gradients: Tensor
    linears: Mapping[str, tuple[Tensor, Tensor]]


class _Listener:
    """Listener to linears: their inputs and outputs by name, for each thread that runs the module."""

    def __init__(self, module: nn.Module, names: Iterable[str], hooks: ExitStack) -> None:
        """Listen to sub-modules of a module until ``hooks`` is closed."""
        self._of_thread = threading.local()
        for name in names:
            handle = module.get_submodule(name).register_forward_hook(partial(self._see, name))
            hooks.callback(handle.remove)

    def _see(self, name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._of_thread.found[name] = (args[0].detach(), output)

    def back(
        self,
        run: Callable[[Tensor], Tensor],
        states: Tensor,
        gradients_of: Callable[[Tensor], Tensor],
    ) -> _Passed:
        """Run the module on states, and go back from the gradients of what comes out of it."""
        self._of_thread.found = {}
        with one_thread(), torch.enable_grad():
            states = states.detach().requires_grad_()
            outputs = run(states)
            found: dict[str, tuple[Tensor, Tensor]] = self._of_thread.__dict__.pop("found")
            wanted = [states, *(output for _, output in found.values())]
            first, *others = torch.autograd.grad(outputs, wanted, gradients_of(outputs.detach()))
        linears = {
            name: (x, gradients)
            for (name, (x, _)), gradients in zip(found.items(), others, strict=True)
        }
        return _Passed(first, linears)


class _BackwardStream(ModelStream):
    """A stream that goes back again."""

    def run(self, visit: Visit, seed: int) -> Tensor:
        """Go through all blocks and back; return the labels."""
        count = len(self._blocks)
        step = 1 + isqrt(count - 1)
        kept: list[HiddenStates] = []
        linears: list[tuple[str, ...]] = []
        for part in self:
            if part.index % step == 0:
                kept.append(self._copy())
            linears.append(_linears(part))
            part.advance()
        gradients, labels = self._back_through_head(visit, seed)
        self._states.close()
        for start in reversed(range(0, count, step)):
            run = range(start, min(start + step, count))
            inputs = self._inputs(run, kept.pop())
            for index in reversed(run):
                self._states = inputs.pop()
                self._back_through(index, linears[index], gradients, visit)
                self._states.close()
        return labels

    def _copy(self) -> HiddenStates:
        """Return another store with the present states."""
        copy = self._store()
        for start, stop in self._spans():
            copy.write(start, self._states.read(start, stop))
        return copy

    def _inputs(self, run: range, first: HiddenStates) -> list[HiddenStates]:
        """Compute the states in front of every block of a run; ``first`` has those of the first one."""
        inputs = [first]
        for index in run[:-1]:
            self._states = inputs[-1]
            self._states = self._copy()
            inputs.append(self._states)
            part = self._filled(index)
            part.advance()
            empty(part.module)
        return inputs

    def _back_through_head(self, visit: Visit, seed: int) -> tuple[HiddenStates, Tensor]:
        """Draw labels; return the gradients of the states behind the last block, and the labels."""
        name = self._architecture.head
        gradients, labels = self._store(), torch.empty_like(self._rows)

        def gradients_of(row: Batch, logits: Tensor) -> Tensor:
            if not finite(logits):
                raise InputError(
                    f"the logits of calibration row {row.start} are not finite",
                    "the model overflows on this text, or its head is damaged",
                )
            drawn = draw_labels(logits, seed, row.start)
            labels[row.start : row.start + len(drawn)] = drawn.to(labels.device)
            ones = torch.ones_like(logits[..., :1])
            return logits.float().softmax(-1).scatter_add_(-1, drawn[..., None], -ones)

        with self._filled_head(), ExitStack() as hooks:
            listener = _Listener(self._model, [name], hooks)

            def run(states: Tensor) -> Tensor:
                logits: Tensor = self._finish(self._model, states).logits
                return logits

            def back(row: Batch) -> _Passed:
                return listener.back(run, row.states, partial(gradients_of, row))

            for batch in self._batches(len(self._blocks) - 1):
                rows = batch.rows()
                together = max(1, LOGITS // (self._rows.shape[1] * self._dimensions.vocab))
                for first in range(0, len(rows), together):
                    passed = side_by_side(back, rows[first : first + together])
                    self._hand_over("", rows[first].start, passed, gradients, visit)
        return gradients, labels

    def _back_through(
        self, index: int, linears: Iterable[str], gradients: HiddenStates, visit: Visit
    ) -> None:
        """Replace the gradients of what a block returns by those of what it reads."""
        part = self._filled(index)
        with ExitStack() as hooks:
            listener = _Listener(part.module, linears, hooks)

            def back(row: Batch) -> _Passed:
                def run(states: Tensor) -> Tensor:
                    outputs: Tensor = part.module(states, *row.call.args, **row.call.kwargs)
                    return outputs

                behind = gradients.read(row.start, row.start + len(row.states)).to(self._device)
                return listener.back(run, row.states, lambda _: behind)

            for batch in self._batches(index):
                passed = side_by_side(back, batch.rows())
                self._hand_over(f"{part.name}.", batch.start, passed, gradients, visit)
        empty(part.module)

    @staticmethod
    def _hand_over(
        prefix: str, start: int, passed: list[_Passed], store: HiddenStates, visit: Visit
    ) -> None:
        """Give every linear to a visitor, the rows joined, and keep the gradients of what the module read.

        Raises:
            InputError: a gradient is not finite.
        """
        for key in passed[0].linears:
            inputs, gradients = (
                torch.cat([each.linears[key][which] for each in passed]) for which in (0, 1)
            )
            name = f"{prefix}{key}"
            if not finite(gradients):
                bad = int((~gradients.isfinite()).flatten(1).any(1).nonzero()[0])
                raise InputError(
                    f"{name}: the gradient of its output is not finite in calibration row {start + bad}",
                    "the model overflows on this text, or a weight is damaged; `quantforge inspect` checks weights",
                    tensor=name,
                )
            visit(OutputGradients(name, start, inputs, gradients))
        # Only now: those of the last linears are what the store has had.
        store.write(start, torch.cat([each.gradients for each in passed]))


def _linears(part: BlockPart) -> tuple[str, ...]:
    """Return the linears of a block, each a module of its own."""
    if any(shared.expert >= 0 for shared in part.inputs):
        raise RefusedError(
            f"{part.name}: no gradients of single experts are observed",
            "methods that are guided by gradients take dense models",
            tensor=part.name,
        )
    return part.linears
