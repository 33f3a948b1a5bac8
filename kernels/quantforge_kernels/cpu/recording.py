"""A list of programs to be run again: what a CUDA graph is to a GPU, for a processor.

A decoding step calls ten programs per block, each for some microseconds, through as much of Python
and torch. While a function is recorded, the calls it makes are noted with their arguments, which are
addresses; tensors that it makes are kept, so that the addresses remain theirs. Played again, the list
computes from whatever then lies in the tensors that were given.

That is true only of work that programs do. Every operation of torch is watched: one that computes,
or asks for a value, ends the recording.
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

from quantforge_kernels.cpu.compiler import CALLS, Call, Program
from quantforge_kernels.cpu.emit import I64, Emitter, add_entry

_TABLE = 4  # word: address of pairs of a program and its words
_ALLOCATE = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty"})


class Recorded:
    """Record of the programs that a function ran, to be run again.

    Attributes:
        result: of the function; every `play` writes it anew.
    """

    def __init__(self, result: Tensor, calls: list[Call], kept: list[Any]) -> None:
        self.result = result
        self._kept = (calls, kept)
        pairs = [(address, ctypes.addressof(words)) for address, words in calls]
        self._table = torch.tensor(pairs, dtype=torch.int64)

    def play(self) -> Tensor:
        """Run all programs in their order."""
        count = len(self._table)
        _sequence()([0, count, 1, count, self._table.data_ptr()])
        return self.result


def record(function: Callable[[], Tensor]) -> tuple[Tensor, Recorded | None]:
    """Call a function; return its result, and the record that repeats it, or None where torch computed a part of it."""
    watch = _Watch()
    calls: list[Call] = []
    CALLS.open = calls
    try:
        with watch:
            result = function()
    finally:
        CALLS.open = None
    return result, None if watch.computed else Recorded(result, calls, watch.kept)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watch over torch that keeps what it makes, and notes whether it computes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch call us without its compiler, whose import takes a second of a first answer."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Any] = []
        self.computed = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kept.append(result)
        allocates = func._schema.name in _ALLOCATE
        self.computed |= not (allocates or (func.is_view and _same_memory(args[0], result)))
        return result


def _same_memory(given: Tensor, result: Any) -> bool:
    """Return whether a result, or every one of them, is a view; `reshape` and `contiguous` copy if they must."""
    parts = [result] if isinstance(result, Tensor) else result
    place = given.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == place for part in parts)


@cache
def _sequence() -> Program:
    """Build ``sequence_run``: call a range of programs, one after the other."""
    module = ir.Module()
    e = Emitter(module, "sequence", 1)
    build, table = e.build, e.address(_TABLE)
    kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()]).as_pointer()
    with e.loop(e.first, e.last) as (i, _):
        address, words = (e.load(table, e.scaled(i, 16, plus), I64) for plus in (0, 8))
        build.call(build.inttoptr(address, kind), [build.inttoptr(words, I64.as_pointer())])
    build.ret_void()
    add_entry(module, "sequence")
    return Program(module, "sequence")
