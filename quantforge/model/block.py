"""One decoder block with weights, and the calibration rows that pass it: observed, captured, advanced.

A method sees ``[out_features, in_features]`` matrices by name; that gpt2 stores the transpose, that q, k and v of phi3
are rows of one matrix, or that the running model holds all experts in one parameter, stays in here and in the
declarations. Rows pass in micro-batches, and of a micro-batch row by row, on the threads of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantforge.architectures import SharedInput
from quantforge.architectures.architecture import Rows
from quantforge.architectures.match import ModelLayout, require_declarations
from quantforge.errors import InputError, RefusedError
from quantforge.model.accumulator import Accumulator
from quantforge.model.block_inputs import Call, Passage, states_of
from quantforge.model.experts import Experts, RoutedTokens
from quantforge.model.hidden_states import TokenStates
from quantforge.model.statistics import Statistic, Statistics
from quantforge.model.weight_loading import empty
from quantforge.numerics.products import cutting
from quantforge.numerics.threads import one_thread, side_by_side
from quantforge.numerics.values import finite
from quantforge.plans import StoredTensor

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Weighed(NamedTuple):
    """Shared input to summarise, with weights of the tokens ``[rows, length]``; None weighs all alike."""

    key: str
    statistics: frozenset[Statistic]
    weights: Tensor | None = None


class Batch(NamedTuple):
    """One micro-batch on its way through a block: its first row, packed hidden states, and how it gets there."""

    start: int
    states: Tensor
    passage: Passage

    def rows(self) -> list[Batch]:
        """Return one batch for every row; on a GPU, which fills itself, one batch of all rows."""
        return self.apart(self.states.device.type == "cpu")

    def apart(self, each: bool = False) -> list[Batch]:
        """Return the batches that pass a block at once: this one, or one for ``each`` row or where rows are alone."""
        if not each and not self.passage.alone:
            return [self]
        return [
            Batch(self.start + i, self.states[i : i + 1], self.passage)
            for i in range(len(self.states))
        ]

    def run(self, module: Callable[..., Any], *, note: bool = True) -> Tensor:
        """Return the packed states that a module makes of the rows; ``note`` what it returns beside them."""
        reached = self.passage.reach(self.start, self.states)
        returned = module(reached.states, *reached.call.args, **reached.call.kwargs)
        if note:
            self.passage.left(reached, returned)
        return self.passage.layout.packed(states_of(returned))


class BlockRows(NamedTuple):
    """The calibration rows that pass a block.

    Attributes:
        shape: how many there are, and how many tokens each has.
        batches: yields them in micro-batches.
        write: overwrites the hidden states from a row on.
        store: makes room for states of all rows, of a given width.
    """

    shape: tuple[int, int]
    batches: Callable[[], Iterator[Batch]]
    write: Callable[[int, Tensor], None]
    store: Callable[[int], TokenStates]


class DecoderBlock:
    """A block with the rows that pass it; see `quantforge.model.stream.ModelStream`.

    Attributes:
        index, name: position, and canonical name (``model.layers.3``).
        module: the transformers module, materialised.
        architecture, dimensions: the declarations of the family and the sizes of this model.
        kind: what a block of this layer consists of.
        inputs: the shared inputs, in computing order.
        experts: those of a mixture, None where the block has none, or its module holds them.
        advanced: whether the hidden states are those after the block.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        model_layout: ModelLayout,
        stored: Mapping[str, StoredTensor],
        rows: BlockRows,
        experts: Experts | None = None,
        *,
        refill: Callable[[], object] = lambda: None,
        bfloat16: bool = False,
    ) -> None:
        """Hold a block.

        Args:
            index: its position.
            module: its transformers module.
            model_layout: of the model.
            stored: its parameters by canonical name relative to it.
            rows: that pass it.
            experts: those that it has, which are read one at a time; None where the module holds them.
            refill: reads the weights of the block, without those of experts, anew.
            bfloat16: matrix products of observing and advancing take their operands in that type.
        """
        self.index = index
        self.name = model_layout.block_name(index)
        self.module = module
        self.architecture, self.dimensions = require_declarations(model_layout)
        self.kind = model_layout.layers[index]
        self.inputs: tuple[SharedInput, ...] = self.kind.inputs
        self.experts = experts
        self.advanced = False
        self._places = self.kind.places()
        self._stored = stored
        self._rows, self._refill, self._bfloat16 = rows, refill, bfloat16
        self._kept: list[Batch] = []

    def has(self, name: str) -> bool:
        """Return whether the block has a parameter of this name (``self_attn.q_proj.bias``)."""
        return name in self._stored

    def parameters(self) -> tuple[str, ...]:
        """Return the names of all parameters, relative to the block, as the family declares them."""
        return tuple(self._stored)

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the linears whose matrix is a tensor of its own in files, in computing order."""
        return tuple(name for name in self.kind.linears if self.has(f"{name}.weight"))

    @property
    def own_linears(self) -> tuple[str, ...]:
        """Return the linears that are separate modules, unlike experts in a stack."""
        return tuple(name for name in self.linears if name not in self._places)

    def stack_of(self, linear: str) -> str:
        """Return the parameter that holds the matrix of a linear of an expert."""
        return self._places[linear].stack.parameter

    def is_outside_module(self, name: str) -> bool:
        """Return whether the module does not hold a tensor itself, so that no transform changes it.

        It holds something of every expert, and these are read one at a time; or the module has it in another form.
        """
        owner, _, leaf = name.rpartition(".")
        if self.experts is not None and owner == self.experts.path:
            return True
        held = {path for path, _ in self.module.named_modules()}
        return owner not in held or not hasattr(self.module.get_submodule(owner), leaf)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter (or a stored constant) as the module holds it, e.g. ``input_layernorm.weight``.

        That of an expert is a view.
        """
        linear = name.removesuffix(".weight")
        if linear in self._places:
            return self.weight(linear)
        owner, _, leaf = name.rpartition(".")
        value: Tensor = getattr(self.module.get_submodule(owner), leaf)  # a buffer of some routers
        return value

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Overwrite a parameter, in its own type and layout."""
        self.parameter(name).copy_(value)

    def weight(self, linear: str) -> Tensor:
        """Return the weight of a linear as ``[out_features, in_features]`` (a view, possibly transposed)."""
        place = self._places.get(linear)
        if place is not None and self.experts is not None:
            return self.experts.weight(place)
        if place is not None:
            return place.view(self.module.get_parameter(place.stack.parameter))
        weight = self.module.get_parameter(f"{linear}.weight")
        return weight.T if self.architecture.transposed else weight

    def set_weight(self, linear: str, value: Tensor) -> None:
        """Overwrite the weight of a linear with ``[out_features, in_features]``."""
        self.weight(linear).copy_(value)

    def rows(self, linear: str, label: str = "") -> Rows:
        """Return the rows of a slice of a fused linear (``"v"`` of a qkv projection); all rows for an empty label."""
        return self.architecture.rows(self.dimensions, linear, label)

    def stored_name(self, name: str) -> str:
        """Return the name of a parameter in the checkpoint."""
        return self._stored[name].name

    def dtype_of(self, name: str) -> str:
        """Return the type of a parameter in the checkpoint, as safetensors spells it (``BF16``)."""
        return self._stored[name].dtype

    def as_stored(self, name: str, value: Tensor) -> Tensor:
        """Round a value to the type that a parameter is stored in, and return it in its own type."""
        return value.to(TORCH_DTYPES[self.dtype_of(name)]).to(value.dtype)

    def restore(self) -> None:
        """Read the source's weights anew, those of experts left out."""
        empty(self.module)
        self._refill()

    def close(self) -> None:
        """Free the weights, and the tokens collected for the experts."""
        if self.experts is not None:
            self.experts.close()
        empty(self.module)

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

        Of a block with experts the first call keeps the tokens that reach them, in ``experts``. Their own inputs are
        not summarised, and the block does not advance.

        Returns:
            The statistics that are wanted, by `SharedInput.key`.

        Raises:
            InputError: an activation is not finite; the module and the calibration row are named.
        """
        wanted = [item.key for item in self.inputs if needs.get(item.key) and item.expert < 0]
        advance = advance and self.experts is None
        if not wanted and not whole and self.experts is None:
            return {}
        asked = [Weighed(key, needs[key]) for key in wanted]
        found = self.observe_weighed(asked, advance=advance, keep=keep, whole=whole)
        return dict(zip(wanted, found, strict=True))

    def observe_weighed(
        self,
        wanted: Sequence[Weighed],
        *,
        advance: bool = False,
        keep: int = 0,
        whole: bool = False,
    ) -> list[Statistics]:
        """Run all rows through the block as it is and summarise inputs, each as often as it is wanted.

        Args:
            wanted: inputs, with the weights of the tokens; not those of experts.
            advance: as of `observe`, like the others.
            keep: likewise.
            whole: likewise.

        Returns:
            The statistics of each, empty ones where all weights are 0. Errors as of `observe`.
        """
        keys = [item.key for item in self.inputs if item.key in {one.key for one in wanted}]
        sums = [(item, Accumulator(item.statistics)) for item in wanted]
        enough = None if advance or whole or self.experts else keys[-1]
        with one_thread(), ExitStack() as hooks:
            seen = _SeenInputs(enough)
            for key in keys:
                hooks.enter_context(seen.listening(self.module, key))
            if self.experts is not None:
                tokens = RoutedTokens(self._rows.shape, self._rows.store)
                known = self.experts.tokens is not None
                hooks.enter_context(
                    self.experts.absent() if known else self.experts.collecting(tokens)
                )
            for batch in self._rows.batches():
                if advance and batch.start < keep:
                    self._kept.append(batch._replace(states=batch.states.clone()))
                self._observe_batch(batch, seen, sums, advance=advance)
        self.advanced = advance
        return [total.result() for _, total in sums]

    def capture(self, submodule: str, rows: int) -> list[Call]:
        """Return the inputs of a submodule for the micro-batches that contain the first ``rows`` rows.

        Of an expert, it is the input of the first tokens sent to it, as many as these rows have.

        A transform runs the sub-module again on them. Micro-batches are whole, and may cover a few rows more.
        """
        if submodule in self._places and self.experts is not None:
            return [Call((self.experts.sample(self._places[submodule], rows),), {})]
        module = self.module.get_submodule(submodule)
        calls: list[Call] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(Call(args, dict(kwargs)))
            raise _EnoughError

        handle = module.register_forward_pre_hook(keep, with_kwargs=True)
        absent = self.experts.absent() if self.experts is not None else nullcontext()
        try:
            with absent:
                for batch in self._kept or self._rows.batches():
                    if batch.start >= rows:
                        break
                    for each in batch.apart():  # in float32: small differences are compared
                        self._run(each)
        finally:
            handle.remove()
        return calls

    def advance(self) -> list[float]:
        """Replace the hidden states of all rows by the output of the block as it is now.

        Returns what `Experts.run_all` does; an empty list for a block without experts.
        """
        norms = self.run_experts()
        self._advance()
        return norms

    def run_experts(self) -> list[float]:
        """Collect the tokens of the experts, and add up what these return; returns what `Experts.run_all` does."""
        if self.experts is None:
            return []
        self.experts.forget_tokens()
        self.observe({})
        return self.experts.run_all()

    def advance_source(self) -> None:
        """Replace the hidden states of all rows by what the block returns with the source's weights.

        They are read anew, because a transform keeps what a block computes, but not to the last bit. The outputs of its
        experts have to be added up already.
        """
        self.restore()
        self._advance()

    def advance_seen(self) -> None:
        """Replace the hidden states of all rows by the output of a block whose experts' tokens are collected."""
        assert self.experts is not None
        self.experts.run_all()
        self._advance()

    def _observe_batch(
        self,
        batch: Batch,
        seen: _SeenInputs,
        sums: Sequence[tuple[Weighed, Accumulator]],
        *,
        advance: bool,
    ) -> None:
        rows = batch.rows()
        passed = side_by_side(partial(self._pass, seen), rows)
        jobs = [
            job
            for item, total in sums
            for job in total.adding([inputs[item.key] for _, inputs in passed], _roots(item, rows))
        ]
        side_by_side(lambda job: job(), jobs)
        if advance:
            self._rows.write(batch.start, torch.cat([outputs for outputs, _ in passed]))

    def _advance(self) -> None:
        returning = self.experts.returning() if self.experts is not None else nullcontext()
        with returning, one_thread():
            for batch in self._rows.batches():
                passed = side_by_side(partial(self._pass, _SeenInputs(None)), batch.rows())
                self._rows.write(batch.start, torch.cat([outputs for outputs, _ in passed]))
        self.advanced = True

    def _pass(self, seen: _SeenInputs, row: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one row; return its output, and the inputs of the observed linears."""
        if self.experts is not None:
            self.experts.at(row.start)
        with torch.autocast(row.states.device.type, torch.bfloat16, enabled=self._bfloat16):
            outputs, found = seen.during(lambda: self._run(row))
        for key, x in found.items():
            self._check(key, x, row)
        return row.states if outputs is None else outputs, found

    def _run(self, batch: Batch) -> Tensor | None:
        """Run a micro-batch; return None if a hook stopped it."""
        try:
            with cutting():
                return batch.run(self.module)
        except _EnoughError:
            return None

    def _check(self, key: str, x: Tensor, batch: Batch) -> None:
        if not finite(x):
            bad = (~x.isfinite()).view(len(batch.states), -1).any(1)
            row = batch.start + int(bad.nonzero()[0])
            raise InputError(
                f"{self.name}.{key}: its input is not finite in calibration row {row}",
                "the model overflows on this text, or a norm weight is damaged; `quantforge inspect` checks weights",
                tensor=f"{self.name}.{key}",
            )


def refuse_experts(block: DecoderBlock) -> None:
    """Refuse a block with experts: the running model holds several of them in one parameter.

    Raises:
        RefusedError: naming the block.
    """
    if any(shared.expert >= 0 for shared in block.inputs):
        raise RefusedError(
            f"{block.name}: no gradients of single experts are observed",
            "methods that use gradients take dense models; --method gptq for instance",
            tensor=block.name,
        )


def _roots(item: Weighed, rows: Sequence[Batch]) -> list[Tensor] | None:
    """Return the square roots of the weights of the tokens of rows: an accumulator squares them again."""
    if item.weights is None:
        return None
    return [
        item.weights[row.start : row.start + len(row.states)].flatten().sqrt().to(row.states.device)
        for row in rows
    ]


class _EnoughError(Exception):
    """Raised to stop a forward pass once everything needed was seen."""


class _SeenInputs:
    """Inputs that linears have read, ``[tokens, in_features]`` by key, for each thread that runs the block.

    ``enough``: a run ends when this linear has been reached.
    """

    def __init__(self, enough: str | None) -> None:
        self._enough = enough
        self._of_thread = threading.local()

    def during(self, run: Callable[[], Tensor | None]) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Run the block on this thread; return its output and what was read."""
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
