"""Recording of the programs of a decoding step, to replay them: the CPU's counterpart of a CUDA graph.

A decoding step calls ten programs per block, each for a few microseconds, and the Python and torch code around them
takes as long again. While a function is recorded, its program calls are logged with their arguments, which are
addresses; tensors that it allocates are kept alive, so that the addresses stay valid. A replay computes from the
current contents of the tensors that were used.

This is correct only if programs do all the work. Therefore every torch operation is watched, and one that computes
or reads a value makes the recording invalid.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantforge_kernels.cpu.compiler import CALL_LOG, Call, Program
from quantforge_kernels.cpu.llvm_emitter import I64, Emitter, add_entry_point

ARG_TABLE = 4  # word: address of pairs of a program and its words
_ALLOCATING_OPERATORS = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty"})


class RecordedPrograms:
    """The programs that a function ran, ready to be replayed.

    Attributes:
        result: result of the function; every `replay` overwrites it.
    """

    def __init__(self, result: Tensor, calls: list[Call], tensors: list[Any]) -> None:
        self.result = result
        self._kept = (calls, tensors)
        pairs = [(address, ctypes.addressof(arguments)) for address, arguments in calls]
        self._table = torch.tensor(pairs, dtype=torch.int64)

    def replay(self) -> Tensor:
        """Run all programs in order and return the result."""
        count = len(self._table)
        _sequence_program()([0, count, 1, count, self._table.data_ptr()])
        return self.result


def record(function: Callable[[], Tensor]) -> tuple[Tensor, RecordedPrograms | None]:
    """Call a function; return its result and its recording, or None for the latter if torch computed a part of it."""
    watcher = _TorchWatcher()
    calls: list[Call] = []
    CALL_LOG.calls = calls
    try:
        with watcher:
            result = function()
    finally:
        CALL_LOG.calls = None
    return result, None if watcher.computed else RecordedPrograms(result, calls, watcher.results)


class _TorchWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch dispatch mode that keeps all results alive and notes whether torch computed anything."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid importing torch's compiler, which would delay the first completion by a second."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[Any] = []
        self.computed = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.results.append(result)
        allocates = func._schema.name in _ALLOCATING_OPERATORS
        self.computed |= not (allocates or (func.is_view and _shares_memory(args[0], result)))
        return result


def _shares_memory(tensor: Tensor, result: Any) -> bool:
    """Return whether all results are views of ``tensor``; `reshape` and `contiguous` copy if they must."""
    results = [result] if isinstance(result, Tensor) else result
    storage = tensor.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == storage for part in results)


@cache
def _sequence_program() -> Program:
    """Build ``sequence_run``, which calls a list of programs one after the other."""
    module = ir.Module()
    e = Emitter(module, "sequence", 1)
    builder, table = e.builder, e.load_address(ARG_TABLE)
    kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()]).as_pointer()
    with e.loop(e.first, e.last) as (i, _):
        address, arguments = (e.load(table, e.scale_index(i, 16, plus), I64) for plus in (0, 8))
        builder.call(
            builder.inttoptr(address, kind), [builder.inttoptr(arguments, I64.as_pointer())]
        )
    builder.ret_void()
    add_entry_point(module, "sequence")
    return Program(module, "sequence")
