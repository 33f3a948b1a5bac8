"""Compilation of a program, from LLVM's intermediate code to a function that can be called.

Work is shared out by the OpenMP library that torch brings (``GOMP_parallel``), so that its threads,
which are awake, do it: a second pool would compete with it for the same cores. Where torch has
another library (macOS) one thread works. Calls release the interpreter's lock.

What a program was compiled to is kept on disk (`program_cache`), under a digest of its text, of the versions of
LLVM and of what it may use of the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import torch
from llvmlite import ir

from quantforge_kernels.cpu import program_cache
from quantforge_kernels.cpu.features import without_avx512

OPTIMIZE = 3
COMPILED: list[str] = []  # names of the programs that this process compiled
_TUNING = "+fast-dpwssd"  # or LLVM, for some processors, takes vpdpwssd apart again


def _processor() -> tuple[str, str]:
    """Return the name of the processor, and the features that LLVM may use, as it wants them: ``+avx2,-sse4a...``."""
    there = llvm.get_host_cpu_features()
    if without_avx512():
        for name in there:
            there[name] &= not name.startswith(("avx512", "avx10", "amx"))
    return llvm.get_host_cpu_name(), f"{there.flatten()},{_TUNING}"


def target_machine() -> Any:
    """Return LLVM's generator of code for this processor, as far as programs may use it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(*_processor(), opt=OPTIMIZE)


def optimized(text: str, machine: Any) -> Any:
    """Parse LLVM's intermediate code and optimize it for a machine.

    Raises:
        RuntimeError: LLVM refuses the text.
    """
    parsed = llvm.parse_assembly(text)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(1))
    builder.getModulePassManager().run(parsed, builder)
    return parsed


Call = tuple[int, "ctypes.Array[ctypes.c_int64]"]  # address of a program, and its words


class Program:
    """A compiled function of an array of words.

    Args:
        module: to which `emit.add_entry` was applied.
        name: of the function.

    Raises:
        RuntimeError: LLVM refuses the module.
    """

    def __init__(self, module: ir.Module, name: str) -> None:
        text, machine = str(module), target_machine()
        versions = (llvm.llvm_version_info, llvmlite.__version__, OPTIMIZE)
        facts = repr((versions, machine.triple, _processor(), text))
        key = hashlib.sha256(facts.encode()).hexdigest()
        code = program_cache.find(key)
        if code is None:
            while program_cache.LISTENERS:
                program_cache.LISTENERS.pop()()
            COMPILED.append(name)
            code = machine.emit_object(optimized(text, machine))
            program_cache.keep(key, code)
        self._engine = llvm.create_mcjit_compiler(
            llvm.parse_assembly(""), machine
        )  # holds the code
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(f"{name}_run")
        self._function = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))(self.address)

    def __call__(self, words: Sequence[int]) -> None:
        """Run the program on its words: the first ones are a range, threads and rows (`emit`), the others its own."""
        array = (ctypes.c_int64 * len(words))(*words)
        if CALLS.open is not None:
            CALLS.open.append((self.address, array))
        self._function(array)


class _Calls(threading.local):
    """List in which calls of programs by this thread are noted while it is open (`recording.record`)."""

    open: list[Call] | None = None


CALLS = _Calls()


@cache
def openmp() -> bool:
    """Tell LLVM where the OpenMP library of torch is; return False where torch has another one."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        library = ctypes.CDLL(str(path))  # the one that torch has loaded, since it is the same file
        for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        return True
    return False
