"""One decoder block with its weights, and the calibration rows that pass through it.

A quantization method sees ``[out_features, in_features]`` matrices by name. This module hides how the model stores
them: transposed (gpt2), as rows of one fused matrix (q, k and v of phi3), or with all experts in one parameter. Rows
pass through the block in micro-batches, and the rows of a micro-batch run on the threads of the run.
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
from quantforge.model.block_calls import Call, hidden_states_of
from quantforge.model.block_inputs import BlockInputs
from quantforge.model.experts import Experts, RoutedTokens
from quantforge.model.hidden_states import TokenStates
from quantforge.model.statistics import Statistic, Statistics
from quantforge.model.weight_loading import free_weights
from quantforge.numerics.products import tiled_products
from quantforge.numerics.threads import one_thread, run_parallel
from quantforge.numerics.values import all_finite
from quantforge.plans import StoredTensor

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class WeightedInput(NamedTuple):
    """A shared input to summarize, with weights ``[rows, length]`` of the tokens; None weighs all tokens equally."""

    key: str
    statistics: frozenset[Statistic]
    weights: Tensor | None = None


class MicroBatch(NamedTuple):
    """Some calibration rows on their way through a block.

    Attributes:
        start: index of the first row.
        states: packed hidden states ``[rows, length, width]`` before the block.
        inputs: supplies the other arguments of the block.
    """

    start: int
    states: Tensor
    inputs: BlockInputs

    def split_into_rows(self) -> list[MicroBatch]:
        """Return one batch per row to run on several threads; on a GPU, one batch with all rows."""
        return self.split(self.states.device.type == "cpu")

    def split(self, every_row: bool = False) -> list[MicroBatch]:
        """Split into batches of one row if ``every_row`` is set or rows have to run alone; else return this batch."""
        if not every_row and not self.inputs.one_row_at_a_time:
            return [self]
        return [
            MicroBatch(self.start + i, self.states[i : i + 1], self.inputs)
            for i in range(len(self.states))
        ]

    def run(self, module: Callable[..., Any], *, record: bool = True) -> Tensor:
        """Run a module on the rows and return its packed hidden states.

        ``record`` its other outputs for later blocks.
        """
        call = self.inputs.call_for(self.start, self.states)
        result = module(call.states, *call.arguments.args, **call.arguments.kwargs)
        if record:
            self.inputs.record_output(call, result)
        return self.inputs.layout.pack(hidden_states_of(result))


class BlockRows(NamedTuple):
    """The calibration rows that pass through a block.

    Attributes:
        shape: number of rows, and tokens per row.
        micro_batches: returns an iterator over the rows in micro-batches.
        write_states: overwrites the hidden states, starting at a row.
        make_store: allocates a store for states of all rows with a given width.
    """

    shape: tuple[int, int]
    micro_batches: Callable[[], Iterator[MicroBatch]]
    write_states: Callable[[int, Tensor], None]
    make_store: Callable[[int], TokenStates]


class DecoderBlock:
    """One decoder block and the calibration rows that pass through it; see `quantforge.model.stream.ModelStream`.

    Attributes:
        index, name: position, and canonical name (``model.layers.3``).
        module: the transformers module with its weights loaded.
        architecture, dimensions: the declarations of the family and the sizes of this model.
        kind: the declaration of this kind of layer.
        inputs: the shared inputs, in computing order.
        experts: the experts of a mixture that are loaded one at a time; None if the block has none or its module holds
            them.
        advanced: whether the hidden states are already those after the block.
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
        reload: Callable[[], object] = lambda: None,
        bfloat16: bool = False,
    ) -> None:
        """Wrap a loaded block.

        Args:
            index: position of the block in the model.
            module: its transformers module.
            model_layout: the tensors of the model and their declarations.
            stored: its stored tensors by canonical name relative to the block.
            rows: the calibration rows.
            experts: its experts, if they are loaded one at a time; None if the module holds them.
            reload: reads the weights of the block again, except those of the experts.
            bfloat16: compute the matrix products of observing and advancing in bfloat16.
        """
        self.index = index
        self.name = model_layout.block_name(index)
        self.module = module
        self.architecture, self.dimensions = require_declarations(model_layout)
        self.kind = model_layout.layers[index]
        self.inputs: tuple[SharedInput, ...] = self.kind.inputs
        self.experts = experts
        self.advanced = False
        self._expert_places = self.kind.expert_slices()
        self._stored = stored
        self._rows, self._reload, self._bfloat16 = rows, reload, bfloat16
        self._kept_batches: list[MicroBatch] = []

    def has_parameter(self, name: str) -> bool:
        """Return whether the block has a parameter of this name (``self_attn.q_proj.bias``)."""
        return name in self._stored

    def parameters(self) -> tuple[str, ...]:
        """Return the names of all parameters, relative to the block, as the family declares them."""
        return tuple(self._stored)

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the linears whose matrix is a separate tensor in files, in computing order."""
        return tuple(name for name in self.kind.linears if self.has_parameter(f"{name}.weight"))

    @property
    def separate_linears(self) -> tuple[str, ...]:
        """Return the linears that are modules of their own, unlike experts in a stacked parameter."""
        return tuple(name for name in self.linears if name not in self._expert_places)

    def stack_parameter_of(self, linear: str) -> str:
        """Return the name of the stacked parameter that holds the matrix of an expert's linear."""
        return self._expert_places[linear].stack.parameter

    def is_outside_module(self, name: str) -> bool:
        """Return whether the module does not hold a tensor under this name, so that no transform changes it.

        This is the case for tensors of experts that are loaded one at a time, and for tensors that the running module
        holds in another layout.
        """
        owner, _, leaf = name.rpartition(".")
        if self.experts is not None and owner == self.experts.path:
            return True
        module_paths = {path for path, _ in self.module.named_modules()}
        return owner not in module_paths or not hasattr(self.module.get_submodule(owner), leaf)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter or stored constant as the module holds it, e.g. ``input_layernorm.weight``.

        The matrix of an expert is returned as a view.
        """
        linear = name.removesuffix(".weight")
        if linear in self._expert_places:
            return self.weight(linear)
        owner, _, leaf = name.rpartition(".")
        value: Tensor = getattr(self.module.get_submodule(owner), leaf)  # a buffer of some routers
        return value

    def set_parameter(self, name: str, value: Tensor) -> None:
        """Overwrite a parameter, in its own type and layout."""
        self.parameter(name).copy_(value)

    def weight(self, linear: str) -> Tensor:
        """Return the weight of a linear as ``[out_features, in_features]`` (a view, possibly transposed)."""
        stack_slice = self._expert_places.get(linear)
        if stack_slice is not None and self.experts is not None:
            return self.experts.weight(stack_slice)
        if stack_slice is not None:
            return stack_slice.view(self.module.get_parameter(stack_slice.stack.parameter))
        weight = self.module.get_parameter(f"{linear}.weight")
        return weight.T if self.architecture.transposed else weight

    def set_weight(self, linear: str, value: Tensor) -> None:
        """Overwrite the weight of a linear with ``[out_features, in_features]``."""
        self.weight(linear).copy_(value)

    def rows(self, linear: str, label: str = "") -> Rows:
        """Return the rows of a slice of a fused linear (``"v"`` of a qkv projection); all rows for an empty label."""
        return self.architecture.slice_rows(self.dimensions, linear, label)

    def stored_name(self, name: str) -> str:
        """Return the name of a parameter in the checkpoint."""
        return self._stored[name].name

    def dtype_of(self, name: str) -> str:
        """Return the type of a parameter in the checkpoint, as safetensors spells it (``BF16``)."""
        return self._stored[name].dtype

    def as_stored(self, name: str, value: Tensor) -> Tensor:
        """Round a value to the type that a parameter is stored in, and return it in its own type."""
        return value.to(TORCH_DTYPES[self.dtype_of(name)]).to(value.dtype)

    def reload_source_weights(self) -> None:
        """Read the weights of the source again, except those of experts."""
        free_weights(self.module)
        self._reload()

    def release(self) -> None:
        """Free the weights, and the tokens collected for the experts."""
        if self.experts is not None:
            self.experts.close()
        free_weights(self.module)

    def observe(
        self,
        needs: Mapping[str, frozenset[Statistic]],
        *,
        advance: bool = False,
        keep_rows: int = 0,
        run_to_end: bool = False,
    ) -> dict[str, Statistics]:
        """Run all rows through the block and return the requested statistics of its shared inputs.

        If the block has experts, the first call collects the tokens that reach them (in ``experts``). The inputs inside
        the experts are not summarized, and the block does not advance.

        Args:
            needs: requested statistics by `SharedInput.key`; inputs without a request are skipped.
            advance: also replace the hidden states by the outputs of the block, in the same pass; see `advance`.
            keep_rows: with ``advance``, keep the states before the block for this many rows, for `capture_calls`.
            run_to_end: run the block to its end even if the requested inputs come earlier, because other hooks listen
                too.

        Returns:
            The requested statistics, by `SharedInput.key`.

        Raises:
            InputError: an activation is not finite; the message names the module and the calibration row.
        """
        requested = [item.key for item in self.inputs if needs.get(item.key) and item.expert < 0]
        advance = advance and self.experts is None
        if not requested and not run_to_end and self.experts is None:
            return {}
        inputs = [WeightedInput(key, needs[key]) for key in requested]
        statistics = self.observe_weighted(
            inputs, advance=advance, keep_rows=keep_rows, run_to_end=run_to_end
        )
        return dict(zip(requested, statistics, strict=True))

    def observe_weighted(
        self,
        requested: Sequence[WeightedInput],
        *,
        advance: bool = False,
        keep_rows: int = 0,
        run_to_end: bool = False,
    ) -> list[Statistics]:
        """Run all rows through the block and return statistics of inputs with token weights.

        Args:
            requested: the inputs, with token weights; an input may occur more than once. Inputs of experts are not
                supported.
            advance: see `observe`.
            keep_rows: see `observe`.
            run_to_end: see `observe`.

        Returns:
            The statistics of each request; empty if all weights are 0.

        Raises:
            InputError: see `observe`.
        """
        keys = [
            item.key for item in self.inputs if item.key in {weighted.key for weighted in requested}
        ]
        accumulators = [(item, Accumulator(item.statistics)) for item in requested]
        last_linear = None if advance or run_to_end or self.experts else keys[-1]
        with one_thread(), ExitStack() as hooks:
            recorder = _InputRecorder(last_linear)
            for key in keys:
                hooks.enter_context(recorder.recording(self.module, key))
            if self.experts is not None:
                tokens = RoutedTokens(self._rows.shape, self._rows.make_store)
                collected = self.experts.tokens is not None
                hooks.enter_context(
                    self.experts.returning_nan()
                    if collected
                    else self.experts.collecting_tokens(tokens)
                )
            for batch in self._rows.micro_batches():
                if advance and batch.start < keep_rows:
                    self._kept_batches.append(batch._replace(states=batch.states.clone()))
                self._observe_batch(batch, recorder, accumulators, advance=advance)
        self.advanced = advance
        return [accumulator.result() for _, accumulator in accumulators]

    def capture_calls(self, submodule: str, rows: int) -> list[Call]:
        """Return the arguments with which a submodule is called for the micro-batches of the first ``rows`` rows.

        A transform runs the submodule on them again. Micro-batches are kept whole, so they may cover a few rows more.
        For an expert, this returns the input of the first tokens routed to it, as many as these rows have.
        """
        if submodule in self._expert_places and self.experts is not None:
            return [Call((self.experts.sample(self._expert_places[submodule], rows),), {})]
        module = self.module.get_submodule(submodule)
        calls: list[Call] = []

        def record_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(Call(args, dict(kwargs)))
            raise _StopForwardError

        handle = module.register_forward_pre_hook(record_call, with_kwargs=True)
        without_experts = (
            self.experts.returning_nan() if self.experts is not None else nullcontext()
        )
        try:
            with without_experts:
                for batch in self._kept_batches or self._rows.micro_batches():
                    if batch.start >= rows:
                        break
                    for call in batch.split():  # in float32: small differences are compared
                        self._run(call)
        finally:
            handle.remove()
        return calls

    def advance(self) -> list[float]:
        """Replace the hidden states of all rows by the output of the block with its current weights.

        Returns:
            The result of `Experts.run_all`; an empty list for a block without experts.
        """
        norms = self.run_experts()
        self._advance()
        return norms

    def run_experts(self) -> list[float]:
        """Collect the tokens of the experts, run them and sum the outputs; return the result of `Experts.run_all`."""
        if self.experts is None:
            return []
        self.experts.release_tokens()
        self.observe({})
        return self.experts.run_all()

    def advance_source(self) -> None:
        """Replace the hidden states of all rows by the output of the block with the weights of the source.

        The weights are read again, because a transform preserves the function of a block but not its last bits. The
        outputs of the experts have to be summed already.
        """
        self.reload_source_weights()
        self._advance()

    def advance_with_collected_tokens(self) -> None:
        """Run the experts on the tokens already collected, then advance the hidden states of all rows."""
        assert self.experts is not None
        self.experts.run_all()
        self._advance()

    def _observe_batch(
        self,
        batch: MicroBatch,
        recorder: _InputRecorder,
        accumulators: Sequence[tuple[WeightedInput, Accumulator]],
        *,
        advance: bool,
    ) -> None:
        rows = batch.split_into_rows()
        results = run_parallel(partial(self._run_recorded, recorder), rows)
        jobs = [
            job
            for item, accumulator in accumulators
            for job in accumulator.addition_jobs(
                [inputs[item.key] for _, inputs in results], _sqrt_weights(item, rows)
            )
        ]
        run_parallel(lambda job: job(), jobs)
        if advance:
            self._rows.write_states(batch.start, torch.cat([outputs for outputs, _ in results]))

    def _advance(self) -> None:
        replaced_experts = (
            self.experts.returning_sums() if self.experts is not None else nullcontext()
        )
        with replaced_experts, one_thread():
            for batch in self._rows.micro_batches():
                results = run_parallel(
                    partial(self._run_recorded, _InputRecorder(None)), batch.split_into_rows()
                )
                self._rows.write_states(batch.start, torch.cat([outputs for outputs, _ in results]))
        self.advanced = True

    def _run_recorded(
        self, recorder: _InputRecorder, row: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one row; return its output and the recorded inputs of the observed linears."""
        if self.experts is not None:
            self.experts.set_row(row.start)
        with torch.autocast(row.states.device.type, torch.bfloat16, enabled=self._bfloat16):
            outputs, inputs = recorder.run(lambda: self._run(row))
        for key, x in inputs.items():
            self._check_finite(key, x, row)
        return row.states if outputs is None else outputs, inputs

    def _run(self, batch: MicroBatch) -> Tensor | None:
        """Run a micro-batch; return None if a hook stopped the forward pass."""
        try:
            with tiled_products():
                return batch.run(self.module)
        except _StopForwardError:
            return None

    def _check_finite(self, key: str, x: Tensor, batch: MicroBatch) -> None:
        if not all_finite(x):
            nonfinite_rows = (~x.isfinite()).view(len(batch.states), -1).any(1)
            row = batch.start + int(nonfinite_rows.nonzero()[0])
            raise InputError(
                f"{self.name}.{key}: its input is not finite in calibration row {row}",
                "the model overflows on this text, or a norm weight is damaged; `quantforge inspect` checks weights",
                tensor=f"{self.name}.{key}",
            )


def refuse_experts(block: DecoderBlock) -> None:
    """Raise RefusedError for a block with experts, whose single gradients cannot be observed.

    Raises:
        RefusedError: naming the block.
    """
    if any(shared.expert >= 0 for shared in block.inputs):
        raise RefusedError(
            f"{block.name}: no gradients of single experts are observed",
            "methods that use gradients take dense models; --method gptq for instance",
            tensor=block.name,
        )


def _sqrt_weights(item: WeightedInput, rows: Sequence[MicroBatch]) -> list[Tensor] | None:
    """Return the square roots of the token weights of some rows, because an accumulator squares its weights."""
    if item.weights is None:
        return None
    return [
        item.weights[row.start : row.start + len(row.states)].flatten().sqrt().to(row.states.device)
        for row in rows
    ]


class _StopForwardError(Exception):
    """Raised by a hook to stop a forward pass once all requested inputs were recorded."""


class _InputRecorder:
    """Recorder of the inputs of linears, ``[tokens, in_features]`` by name, separately for each thread.

    Args:
        last_linear: stop the forward pass when this linear is reached; None runs it to the end.
    """

    def __init__(self, last_linear: str | None) -> None:
        self._last_linear = last_linear
        self._thread_local = threading.local()

    def run(self, run: Callable[[], Tensor | None]) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Run the block on this thread; return its output and the recorded inputs."""
        inputs: dict[str, Tensor] = {}
        self._thread_local.inputs = inputs
        try:
            return run(), inputs
        finally:
            del self._thread_local.inputs

    @contextmanager
    def recording(self, module: nn.Module, key: str) -> Iterator[None]:
        """Record the input of one linear while the context is active."""

        def record(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].detach().flatten(0, -2)
            self._thread_local.inputs[key] = x.float() if x.dtype == torch.bfloat16 else x
            if key == self._last_linear:
                raise _StopForwardError

        handle = module.get_submodule(key).register_forward_pre_hook(record)
        try:
            yield
        finally:
            handle.remove()
