"""Compilation of a program: from LLVM's intermediate code to a callable function.

Work is divided among the threads of the OpenMP library that torch ships (``GOMP_parallel``), which are already running:
a second thread pool would compete with it for the same cores. Where torch has
another library (macOS), one thread does the work. Calls release the GIL.

Compiled programs are kept on disk (`program_cache`) under a digest of their text, the versions of
LLVM, and the CPU features that they may use.
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
from quantforge_kernels.cpu.instruction_sets import avx512_disallowed

OPTIMIZATION_LEVEL = 3
COMPILED_NAMES: list[str] = []  # names of the programs that this process compiled
_TUNING = "+fast-dpwssd"  # or LLVM, for some processors, takes vpdpwssd apart again


def _cpu_name_and_features() -> tuple[str, str]:
    """Return the CPU's name and the features that LLVM may use, in LLVM's notation: ``+avx2,-sse4a...``."""
    host_features = llvm.get_host_cpu_features()
    if avx512_disallowed():
        for name in host_features:
            host_features[name] &= not name.startswith(("avx512", "avx10", "amx"))
    return llvm.get_host_cpu_name(), f"{host_features.flatten()},{_TUNING}"


def target_machine() -> Any:
    """Return LLVM's code generator for this CPU, limited to the features that programs may use."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        *_cpu_name_and_features(), opt=OPTIMIZATION_LEVEL
    )


def optimize(text: str, machine: Any) -> Any:
    """Parse LLVM's intermediate code and optimize it for a machine.

    Raises:
        RuntimeError: LLVM rejects the text.
    """
    module = llvm.parse_assembly(text)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(1))
    builder.getModulePassManager().run(module, builder)
    return module


Call = tuple[int, "ctypes.Array[ctypes.c_int64]"]  # address of a program, and its words


class Program:
    """A compiled function that takes an array of 64-bit words.

    Args:
        module: module with an entry from `llvm_emitter.add_entry_point`.
        name: name of the function.

    Raises:
        RuntimeError: LLVM rejects the module.
    """

    def __init__(self, module: ir.Module, name: str) -> None:
        text, machine = str(module), target_machine()
        versions = (llvm.llvm_version_info, llvmlite.__version__, OPTIMIZATION_LEVEL)
        fingerprint = repr((versions, machine.triple, _cpu_name_and_features(), text))
        key = hashlib.sha256(fingerprint.encode()).hexdigest()
        code = program_cache.load_program(key)
        if code is None:
            while program_cache.BEFORE_COMPILE_CALLBACKS:
                program_cache.BEFORE_COMPILE_CALLBACKS.pop()()
            COMPILED_NAMES.append(name)
            code = machine.emit_object(optimize(text, machine))
            program_cache.save_program(key, code)
        # Holds the code
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(f"{name}_run")
        self._function = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))(self.address)

    def __call__(self, arguments: Sequence[int]) -> None:
        """Run the program; its first words are range, threads and rows (`llvm_emitter`), the others depend on it."""
        array = (ctypes.c_int64 * len(arguments))(*arguments)
        if CALL_LOG.calls is not None:
            CALL_LOG.calls.append((self.address, array))
        self._function(array)


class _CallLog(threading.local):
    """Log of the program calls that this thread makes; ``calls`` is None unless `recording.record` is active."""

    calls: list[Call] | None = None


CALL_LOG = _CallLog()


@cache
def load_openmp() -> bool:
    """Make torch's OpenMP library known to LLVM; return False if torch has another one."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        library = ctypes.CDLL(str(path))  # the one that torch has loaded, since it is the same file
        for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        return True
    return False
