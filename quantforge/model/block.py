"""One decoder block with weights: its matrices by name, in one orientation, and the activations around them.

A method sees ``[out_features, in_features]`` matrices; that gpt2 stores the transpose, or that q, k and v of phi3 are
rows of one matrix, stays in here and in the declarations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture, SharedInput
from quantforge.architectures.dimensions import Dimensions
from quantforge.errors import InputError
from quantforge.model.observe import Accumulator
from quantforge.model.statistics import Statistic, Statistics
from quantforge.numerics.finite import finite
from quantforge.numerics.products import cutting
from quantforge.numerics.team import side_by_side
from quantforge.numerics.threads import one_thread
from quantforge.plans import StoredTensor

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


Result = TypeVar("Result")


class Call(NamedTuple):
    """The arguments of one forward of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Batch(NamedTuple):
    """One micro-batch on its way through a block: its first row, hidden states, and what else the block takes.

    ``each`` is what it takes beside a single row.
    """

    start: int
    states: Tensor
    call: Call
    each: Call

    def rows(self) -> list[Batch]:
        """Return one batch for every row; on a GPU, which fills itself, one batch of all rows."""
        if self.states.device.type != "cpu":
            return [self]
        return [
            Batch(self.start + i, self.states[i : i + 1], self.each, self.each)
            for i in range(len(self.states))
        ]


class Block:
    """The weights of one decoder block.

    Attributes:
        index, name: position, and canonical name (``model.layers.3``).
        module: the transformers module, materialised.
        architecture, dimensions: the declarations of the family and the sizes of this model.
        inputs: the shared inputs, in computing order.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        architecture: Architecture,
        dimensions: Dimensions,
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self.index = index
        self.name = f"{architecture.blocks}.{index}"
        self.module = module
        self.architecture = architecture
        self.dimensions = dimensions
        self.inputs: tuple[SharedInput, ...] = architecture.inputs
        self._stored = stored

    def has(self, name: str) -> bool:
        """Return whether the block has a parameter of this name (``self_attn.q_proj.bias``)."""
        return name in self._stored

    def parameters(self) -> tuple[str, ...]:
        """Return the names of all parameters, relative to the block."""
        return tuple(self._stored)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter as the module holds it, e.g. ``input_layernorm.weight``."""
        return self.module.get_parameter(name)

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Overwrite a parameter, in its own type and layout."""
        self.module.get_parameter(name).copy_(value)

    def weight(self, linear: str) -> Tensor:
        """Return the weight of a linear as ``[out_features, in_features]`` (a view, possibly transposed)."""
        weight = self.parameter(f"{linear}.weight")
        return weight.T if self.architecture.transposed else weight

    def set_weight(self, linear: str, value: Tensor) -> None:
        """Overwrite the weight of a linear with ``[out_features, in_features]``."""
        self.set_parameter(f"{linear}.weight", value.T if self.architecture.transposed else value)

    def rows(self, linear: str, label: str = "") -> slice:
        """Return the rows of a slice of a fused linear (``"v"`` of a qkv projection); all rows for an empty label."""
        if not label:
            return slice(None)
        sizes = [self.dimensions.size(text) for text in self.architecture.slices[linear]]
        position = self.architecture.slice_labels[linear].index(label)
        return slice(sum(sizes[:position]), sum(sizes[: position + 1]))

    def unclipped_rows(self, linear: str) -> tuple[slice, ...]:
        """Return the rows whose weights a search must not clip: queries and keys."""
        found = (entry.partition(":") for entry in self.architecture.unclipped)
        return tuple(self.rows(linear, label) for name, _, label in found if name == linear)

    def stored_name(self, name: str) -> str:
        """Return the name of a parameter in the checkpoint."""
        return self._stored[name].name

    def dtype_of(self, name: str) -> str:
        """Return the type of a parameter in the checkpoint, as safetensors spells it (``BF16``)."""
        return self._stored[name].dtype

    def as_stored(self, name: str, value: Tensor) -> Tensor:
        """Round a value to the type that a parameter is stored in, and return it in its own type."""
        return value.to(TORCH_DTYPES[self.dtype_of(name)]).to(value.dtype)


class _EnoughError(Exception):
    """Signal that everything that is wanted of a forward was seen."""


class _Seen:
    """Inputs that linears have read, ``[tokens, in_features]`` by key, for each thread that runs the block.

    ``enough``: a run ends when this linear has been reached.
    """

    def __init__(self, enough: str | None) -> None:
        self._enough = enough
        self._of_thread = threading.local()

    def during(self, run: Callable[[], Result]) -> tuple[Result, dict[str, Tensor]]:
        """Run the block on this thread; return its result and what was read."""
        found: dict[str, Tensor] = {}
        self._of_thread.found = found
        try:
            return run(), found
        finally:
            del self._of_thread.found

    @contextmanager
    def listening(self, module: nn.Module, key: str) -> Iterator[None]:
        """Note what a linear reads."""

        def see(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().flatten(0, -2)
            self._of_thread.found[key] = x.float() if x.dtype == torch.bfloat16 else x
            if key == self._enough:
                raise _EnoughError

        handle = module.get_submodule(key).register_forward_pre_hook(see)
        try:
            yield
        finally:
            handle.remove()


class BlockPart(Block):
    """A block with the activations that reach it; see `quantforge.model.stream.ModelStream`."""

    def __init__(
        self,
        block: tuple[int, nn.Module, Architecture, Dimensions, Mapping[str, StoredTensor]],
        batches: Callable[[], Iterator[Batch]],
        write: Callable[[int, Tensor], None],
        *,
        bfloat16: bool = False,
    ) -> None:
        """Hold a block and its batches.

        With ``bfloat16``, matrix products of observing and advancing take their operands in that type.
        """
        super().__init__(*block)
        self._bfloat16 = bfloat16
        self._batches = batches
        self._write = write
        self._kept: list[Batch] = []
        self.advanced = False

    def observe(
        self,
        needs: Mapping[str, frozenset[Statistic]],
        *,
        advance: bool = False,
        keep: int = 0,
        whole: bool = False,
    ) -> dict[str, Statistics]:
        """Run all rows through the block as it is and summarise its shared inputs.

        Args:
            needs: what is wanted, by `SharedInput.key`; inputs of which nothing is wanted are left out.
            advance: replace the hidden states by the block's outputs in the same pass; see `advance`.
            keep: then keep the states of so many rows as they were, for `capture`.
            whole: run the block to its end, because something else listens too.

        Raises:
            InputError: an activation is not finite; the module and the calibration row are named.
        """
        wanted = [shared.key for shared in self.inputs if needs.get(shared.key)]
        sums = {key: Accumulator(needs[key]) for key in wanted}
        if not wanted and not whole:
            return {}
        enough = None if advance or whole else wanted[-1]
        with one_thread(), ExitStack() as hooks:
            seen = _Seen(enough)
            for key in wanted:
                hooks.enter_context(seen.listening(self.module, key))
            for batch in self._batches():
                if advance and batch.start < keep:
                    self._kept.append(batch._replace(states=batch.states.clone()))
                self._observe_batch(batch, seen, sums, advance=advance)
        self.advanced = advance
        return {key: total.result() for key, total in sums.items()}

    def capture(self, submodule: str, rows: int) -> list[Call]:
        """Return the inputs of a sub-module for the micro-batches that hold the first ``rows`` rows.

        The search of a transform runs the sub-module again on them, with changed weights. Whole micro-batches are
        returned, so that they may cover a few rows more.
        """
        module = self.module.get_submodule(submodule)
        calls: list[Call] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(Call(args, dict(kwargs)))
            raise _EnoughError

        handle = module.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            for batch in self._kept or self._batches():
                if batch.start >= rows:
                    break
                self._run(batch)  # float32: small differences of outputs are to be compared
        finally:
            handle.remove()
        return calls

    def round_inputs(self, linear: str, rounded: Callable[[Tensor], Tensor]) -> None:
        """Round what a linear reads, from now on: its input is quantized at run time."""

        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0]
            return rounded(x.reshape(-1, x.shape[-1])).view_as(x).to(x.dtype), *args[1:]

        self.module.get_submodule(linear).register_forward_pre_hook(hook)

    def advance(self) -> None:
        """Replace the hidden states of all rows by the output of the block as it is now."""
        with one_thread():
            for batch in self._batches():
                passed = side_by_side(partial(self._pass, _Seen(None)), batch.rows())
                self._write(batch.start, torch.cat([outputs for outputs, _ in passed]))
        self.advanced = True

    def _observe_batch(
        self, batch: Batch, seen: _Seen, sums: Mapping[str, Accumulator], *, advance: bool
    ) -> None:
        passed = side_by_side(partial(self._pass, seen), batch.rows())
        jobs = [
            job
            for key, total in sums.items()
            for job in total.adding([inputs[key] for _, inputs in passed])
        ]
        side_by_side(lambda job: job(), jobs)
        if advance:
            self._write(batch.start, torch.cat([outputs for outputs, _ in passed]))

    def _pass(self, seen: _Seen, row: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one row; return its output, and what the linears that are listened to have read."""
        with self._products(row):
            outputs, found = seen.during(lambda: self._run(row))
        for key, x in found.items():
            self._check(key, x, row)
        return row.states if outputs is None else outputs, found

    def _products(self, batch: Batch) -> AbstractContextManager[Any]:
        return torch.autocast(batch.states.device.type, torch.bfloat16, enabled=self._bfloat16)

    def _run(self, batch: Batch) -> Tensor | None:
        """Run a micro-batch; None when a hook had seen enough."""
        try:
            with cutting():
                outputs: Tensor = self.module(batch.states, *batch.call.args, **batch.call.kwargs)
        except _EnoughError:
            return None
        return outputs

    def _check(self, key: str, x: Tensor, batch: Batch) -> None:
        if not finite(x):
            bad = (~x.isfinite()).view(len(batch.states), -1).any(1)
            row = batch.start + int(bad.nonzero()[0])
            raise InputError(
                f"{self.name}.{key}: its input is not finite in calibration row {row}",
                "the model overflows on this text, or a norm weight is damaged; `quantforge inspect` checks weights",
                tensor=f"{self.name}.{key}",
            )
