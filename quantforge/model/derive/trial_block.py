"""Run a block with random weights, and prove by trial which tensor can take a scale of an activation.

transformers' norms and softmax request float32. Here they compute in float64 too, so that equivalent computations agree
to twelve digits and others do not.

A candidate is divided by a random scale per channel, and the linears that read the activation are multiplied by it, as
`fold_scale` does. The block has to return the same output to eleven digits in float64, with weights of the usual size
and with weights 16 times as large, because a clamp is linear for small numbers. If only the candidate is divided, the
output has to change; otherwise the trial proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quantforge.architectures import FoldKind, ScaleFold
from quantforge.architectures.dimensions import Dimensions
from quantforge.model.block_calls import Call, hidden_states_of
from quantforge.model.scale_folding import expand_heads
from quantforge.model.skeleton import errors_as_refusals
from quantforge.model.weight_loading import free_weights, parameter
from quantforge.numerics.function_mode import Function, FunctionMode

MAX_FLOAT64_PARAMETERS = 1 << 26  # parameters of a block that is held in float32
VECTOR_RANGE = (0.5, 1.5)  # of vectors: norms, decays, biases
LARGE_FACTOR = 16.0


class Tolerances(NamedTuple):
    """Differences relative to the largest output: at most ``equal`` is equal, more than ``different`` is different."""

    equal: float
    different: float


TOLERANCES = {torch.float64: Tolerances(1e-11, 1e-8), torch.float32: Tolerances(2e-5, 1e-3)}

MAX_SLICES = 8  # slices of a linear
SLICE_LABELS = {2: ("gate", "up"), 3: ("b", "c", "x")}
QKV_LABELS = ("q", "k", "v")


class _WideTypes(FunctionMode):
    """Function mode in which requests for narrower types give float64 (or float32)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    _NARROWER_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function in {Tensor.float, Tensor.half, Tensor.bfloat16}:
            return args[0].to(self._dtype)
        if function in {torch.tensor, torch.full} and isinstance(args[-1], float):
            kwargs = {"dtype": self._dtype, **kwargs}  # the least of float64 is no float32
        args = [self._widened(value) for value in args]
        return function(*args, **{key: self._widened(value) for key, value in kwargs.items()})

    def _widened(self, value: Any) -> Any:
        is_less = isinstance(value, torch.dtype) and value in self._NARROWER_TYPES
        return self._dtype if is_less else value


class TrialBlock:
    """A block with random weights and the arguments that it gets.

    Attributes:
        states: ``[rows, length, hidden]``, its input.
        dtype: the type it computes in; float32 if the block is large.

    Args:
        module: a block of a skeleton.
        states: ``[rows, length, hidden]``, its input.
        call: its other arguments.
    """

    def __init__(self, module: nn.Module, states: Tensor, call: Call) -> None:
        self.module = module
        size = sum(value.numel() for value in module.parameters())
        self.dtype = torch.float64 if size <= MAX_FLOAT64_PARAMETERS else torch.float32
        self.states = states.to(self.dtype)
        self._call = Call(*tree_map(self._widen, tuple(call)))
        self._generator = torch.Generator().manual_seed(0)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Fill the block with random weights while the context is active."""
        for child in self.module.modules():
            for name, value in child.named_parameters(recurse=False):
                setattr(child, name, parameter(self._random(value)))
            for name, buffer in child.named_buffers(recurse=False):
                real = torch.zeros(buffer.shape) if buffer.is_meta else buffer
                setattr(child, name, self._widen(real))
        try:
            yield
        finally:
            free_weights(self.module)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter by its name relative to the block."""
        return self.module.get_parameter(name)

    def run(self, replaced: Mapping[str, Tensor] | None = None) -> Any:
        """Return the output of the block, with some parameters replaced."""
        with torch.no_grad(), _WideTypes(self.dtype), errors_as_refusals("a block alone"):
            return torch.func.functional_call(
                self.module,
                dict(replaced or {}),
                (self.states, *self._call.args),
                self._call.kwargs,
            )

    @contextmanager
    def with_scaled_weights(self, factor: float) -> Iterator[None]:
        """Multiply all matrices by ``factor`` while the context is active, so that clamps take effect."""
        matrices = [value for value in self.module.parameters() if value.dim() > 1]
        for value in matrices:
            value.data.mul_(factor)
        try:
            yield
        finally:
            for value in matrices:
                value.data.div_(factor)

    def _random(self, value: Tensor) -> Tensor:
        shape = value.shape
        if len(shape) < 2:
            low, high = VECTOR_RANGE
            values = torch.rand(shape, generator=self._generator, dtype=self.dtype)
            return values * (high - low) + low
        values = torch.randn(shape, generator=self._generator, dtype=self.dtype)
        return values.div_(max(shape[-1], 1) ** 0.5)

    def _widen(self, value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_number else value


@dataclass(frozen=True, slots=True)
class FoldCandidate:
    """A tensor, or a slice of a fused linear, that may take the inverse of a scale.

    Attributes:
        scale_fold: the tensor or slice.
        sizes, labels: sizes and names of the slices of its linear, in order; empty for the whole linear.
        heads: see `SharedInput`.
        repeats: how often the sequence of slices repeats along the rows.
    """

    scale_fold: ScaleFold
    sizes: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    heads: bool = False
    repeats: int = 1

    @property
    def rows(self) -> slice | list[int]:
        """Return the rows of the linear that are the channels of the activation."""
        if not self.sizes:
            return slice(None)
        index = self.labels.index(self.scale_fold.rows)
        first, last = sum(self.sizes[:index]), sum(self.sizes[: index + 1])
        if self.repeats == 1:
            return slice(first, last)
        starts = range(0, self.repeats * sum(self.sizes), sum(self.sizes))
        return [row for start in starts for row in range(start + first, start + last)]


def find_scale_fold(
    block: TrialBlock,
    linears: tuple[str, ...],
    makers: tuple[str, ...],
    earlier: tuple[str, ...],
    dimensions: Dimensions,
    *,
    transposed: bool = False,
) -> FoldCandidate | None:
    """Return the first candidate into which a scale of an activation can be folded; None if there is none.

    Args:
        block: the block, filled with random weights.
        linears: the linears that read the activation.
        makers: modules that returned it.
        earlier: linears that were computed before.
        dimensions: sizes of the model, for its attention heads.
        transposed: linears hold ``[in_features, out_features]``.
    """
    trial = _FoldTrial(block, linears, dimensions, transposed=transposed)
    candidates = [*_norm_candidates(block, makers, trial.width), *_row_candidates(trial, earlier)]
    return next((item for item in candidates if trial.is_exact(item)), None)


def _norm_candidates(
    block: TrialBlock, makers: tuple[str, ...], width: int
) -> Iterator[FoldCandidate]:
    for name in makers:
        if block.parameter(f"{name}.weight").shape == (width,):
            for kind in (FoldKind.NORM, FoldKind.NORM_PLUS_ONE):
                yield FoldCandidate(ScaleFold(kind, name))


def _row_candidates(trial: _FoldTrial, earlier: tuple[str, ...]) -> Iterator[FoldCandidate]:
    """Yield linears, and slices of linears, whose rows may be the channels of the activation."""
    width, sizes = trial.width, trial.dimensions
    heads = width == sizes.q
    for name in reversed(earlier):
        rows, count = trial.rows(name), trial.rows(name) // width
        if heads and rows == sizes.kv:
            yield FoldCandidate(ScaleFold(FoldKind.ROWS, name), heads=True)
        if rows == width:
            yield FoldCandidate(ScaleFold(FoldKind.ROWS, name))
        if heads and rows == sizes.qkv:
            yield _slice_candidate(name, (sizes.q, sizes.kv, sizes.kv), 2, QKV_LABELS, heads=True)
        if rows % width == 0 and 1 < count <= MAX_SLICES:
            labels = SLICE_LABELS.get(count, tuple(f"part{index}" for index in range(count)))
            for index in reversed(range(count)):
                yield _slice_candidate(name, (width,) * count, index, labels)
        yield from _repeated_candidates(name, rows, width, sizes)


def _repeated_candidates(
    name: str, rows: int, width: int, sizes: Dimensions
) -> Iterator[FoldCandidate]:
    """Yield the last rows of every head, or of every group of query heads that share a key/value head."""
    of_heads = width == sizes.q
    choices = {(sizes.heads, width // sizes.heads)} if width % sizes.heads == 0 else set()
    if of_heads:
        choices.add((sizes.kv_heads, sizes.head))
    for count, last in sorted(choices):
        heads = of_heads and count == sizes.kv_heads
        other_rows = rows // count - last
        if count == 1 or rows % count or other_rows <= 0:
            continue
        fused = other_rows % last == 0 and other_rows > last
        slice_sizes = (other_rows - last, last, last) if fused else (other_rows, last)
        labels = QKV_LABELS if fused else ("k", "v")
        candidate = _slice_candidate(name, slice_sizes, len(slice_sizes) - 1, labels, heads=heads)
        yield replace(candidate, repeats=count)


def _slice_candidate(
    name: str, sizes: tuple[int, ...], index: int, labels: tuple[str, ...], *, heads: bool = False
) -> FoldCandidate:
    return FoldCandidate(ScaleFold(FoldKind.ROWS, name, labels[index]), sizes, labels, heads)


class _FoldTrial:
    """Tries fold candidates for one activation."""

    def __init__(
        self,
        block: TrialBlock,
        linears: tuple[str, ...],
        dimensions: Dimensions,
        *,
        transposed: bool,
    ) -> None:
        self._block, self._linears, self.dimensions = block, linears, dimensions
        self._transposed = transposed
        self.width = self._weight(linears[0]).shape[1]

    def _weight(self, linear: str) -> Tensor:
        weight = self._block.parameter(f"{linear}.weight")
        return weight.T if self._transposed else weight

    def rows(self, linear: str) -> int:
        """Return the number of output features of a linear."""
        return self._weight(linear).shape[0]

    def is_exact(self, candidate: FoldCandidate) -> bool:
        """Return whether the output of the block is unchanged by folding a scale into the candidate."""
        return holds_for_large_weights(self._block, partial(self._output_is_unchanged, candidate))

    def _output_is_unchanged(self, candidate: FoldCandidate) -> bool:
        count = self.dimensions.kv if candidate.heads else self.width
        channels = random_scale(self._block, count)
        scale = expand_heads(self.dimensions, channels) if candidate.heads else channels
        divided = self._fold_scale(candidate, channels)
        multiplied = {}
        for linear in self._linears:
            weight = self._weight(linear) * scale
            multiplied[f"{linear}.weight"] = weight.T if self._transposed else weight
        return is_fold_exact(self._block, divided, multiplied)

    def _fold_scale(self, candidate: FoldCandidate, channels: Tensor) -> Mapping[str, Tensor]:
        module, kind = candidate.scale_fold.module, candidate.scale_fold.kind
        parameters = dict(self._block.module.named_parameters())
        weight = parameters[f"{module}.weight"]
        changed_weights = {}
        if kind is FoldKind.NORM_PLUS_ONE:
            changed_weights[f"{module}.weight"] = (weight + 1) / channels - 1
        elif kind is FoldKind.NORM:
            changed_weights[f"{module}.weight"] = weight / channels
        else:
            stored_weight = self._weight(module).clone()
            stored_weight[candidate.rows] /= channels[:, None]
            changed_weights[f"{module}.weight"] = (
                stored_weight.T if self._transposed else stored_weight
            )
        bias = parameters.get(f"{module}.bias")
        if bias is not None:
            changed_weights[f"{module}.bias"] = bias.clone()
            changed_weights[f"{module}.bias"][candidate.rows] /= channels
        return changed_weights


def random_scale(block: TrialBlock, count: int) -> Tensor:
    """Return a random scale from 0.5 to 2 for each of ``count`` channels."""
    generator = torch.Generator().manual_seed(7)
    return torch.exp2(2 * torch.rand(count, generator=generator, dtype=block.dtype) - 1)


def holds_for_large_weights(block: TrialBlock, is_same: Callable[[], bool]) -> bool:
    """Return whether ``is_same`` holds for weights of the usual size and for weights `LARGE_FACTOR` times as large."""
    if not is_same():
        return False
    with block.with_scaled_weights(LARGE_FACTOR):
        return is_same()


def is_fold_exact(
    block: TrialBlock, divided: Mapping[str, Tensor], multiplied: Mapping[str, Tensor]
) -> bool:
    """Return whether the output is unchanged with both changes, but changes with ``divided`` alone."""
    states_before = hidden_states_of(block.run())
    max_magnitude, limits = states_before.abs().max(), TOLERANCES[block.dtype]
    folded_change = (
        (hidden_states_of(block.run({**divided, **multiplied})) - states_before).abs().max()
    )
    if not folded_change <= limits.equal * max_magnitude:
        return False
    half = (hidden_states_of(block.run(divided)) - states_before).abs().max()
    return bool(half > limits.different * max_magnitude)
