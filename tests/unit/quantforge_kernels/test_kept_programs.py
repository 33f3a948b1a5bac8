"""Compiled programs are cached on disk and loaded only from files that nobody else could write."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quantforge_kernels.cpu import compiler, instruction_sets, layer_programs, program_cache

KEY = "ab" * 32
CHILD = """
import torch
from quantforge_kernels.cpu import compiler
from quantforge_kernels.matmul_spec import MatmulSpec
from quantforge_kernels.select import select_kernel
spec = MatmulSpec(32, 64, 4, 32, True, torch.bfloat16, "cpu")
kernel = select_kernel(spec)
codes = torch.arange(32 * 64).view(32, 64).remainder(16).to(torch.uint8)
packed = kernel.prepare(codes, {"scales": torch.linspace(0.1, 1, 64).view(32, 2).half()}, spec)
y = kernel.matmul(torch.linspace(-1, 1, 64).view(1, 64).bfloat16(), packed, spec)
print(len(compiler.COMPILED_NAMES), y.float().tolist())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of our own."""
    monkeypatch.setenv(program_cache.CACHE_VARIABLE, str(tmp_path / "programs"))
    return tmp_path / "programs"


def program() -> compiler.Program:
    return compiler.Program(
        layer_programs.build_add_rms_norm(torch.float32, 1e-5, 0.0, False, 8, False), "norm"
    )


def compiled(work) -> int:
    before = len(compiler.COMPILED_NAMES)
    work()
    return len(compiler.COMPILED_NAMES) - before


def norm(compiled_program: compiler.Program) -> torch.Tensor:
    x, weight, out = torch.linspace(-1, 3, 64), torch.linspace(1, 2, 64), torch.empty(64)
    places = [value.data_ptr() for value in (x, x, weight, out, x)]
    compiled_program([0, 1, 1, 1, *places, 8, 1, 256])
    return out


def run(**environment: str) -> tuple[int, str]:
    output = subprocess.run(
        [sys.executable, "-c", CHILD], env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    count, _, values = output.partition(" ")
    return int(count), values


@pytest.mark.thorough
@pytest.mark.skipif(
    instruction_sets.best_instruction_set() is None, reason="for processors with AVX2"
)
def test_next_process_reuses_compiled_programs(folder):
    first, second, without = run(), run(), run(QUANTFORGE_CACHE="")
    assert [first[0], second[0], without[0]] == [1, 0, 1]
    assert first[1] == second[1] == without[1]
    assert run(QUANTFORGE_CPU_LIMIT="avx2")[0] == (
        1 if instruction_sets.best_instruction_set() != "avx2" else 0
    )


def test_cached_program_is_reused(folder):
    assert compiled(program) == 1
    assert compiled(program) == 0
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "another"])
def test_damaged_cache_file_is_recompiled(folder, damage):
    expected = norm(program())
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "another":  # a program that is whole, under another key
        program_cache.save_program(KEY, bytes(content[32:]))
        content = bytearray((folder / f"{KEY}.program").read_bytes())
    file.write_bytes({"cut": content[:-9], "empty": b""}.get(damage, bytes(content)))
    assert compiled(lambda: torch.testing.assert_close(norm(program()), expected)) == 1
    assert compiled(program) == 0


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_cache_folder_writable_by_others_is_ignored(folder, mode):
    program()
    folder.chmod(mode)
    assert compiled(program) == 1
    program_cache.save_program(KEY, b"code")
    folder.chmod(0o700)
    assert program_cache.load_program(KEY) is None
    assert compiled(program) == 0


def test_cache_files_of_other_users_are_ignored(folder, monkeypatch):
    program_cache.save_program(KEY, b"code")
    (folder / f"{KEY}.program").chmod(0o620)
    assert program_cache.load_program(KEY) is None
    (folder / f"{KEY}.program").chmod(0o600)
    assert program_cache.load_program(KEY) == b"code"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert program_cache.load_program(KEY) is None


@pytest.mark.parametrize("kind", ["folder", "file", "pipe"])
def test_cache_symlinks_and_pipes_are_not_followed(folder, tmp_path, kind):
    program_cache.save_program(KEY, b"code")
    file = folder / f"{KEY}.program"
    if kind == "folder":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        program_cache.save_program("cd" * 32, b"code")
        assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    elif kind == "file":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.unlink()
        os.mkfifo(file)
    assert program_cache.load_program(KEY) is None


def test_oldest_cache_files_are_evicted(folder, monkeypatch):
    monkeypatch.setattr(program_cache, "MAX_BYTES", 5000)
    for number in range(8):
        program_cache.save_program(f"{number:064x}", bytes(968))
        os.utime(folder / f"{number:064x}.program", (number, number))
        assert program_cache.load_program(f"{0:064x}") is not None  # which makes it the youngest
    names = sorted(int(file.stem, 16) for file in folder.iterdir())
    assert names == [0, 4, 5, 6, 7]
    monkeypatch.setattr(program_cache, "MAX_PROGRAM_BYTES", 10)
    program_cache.save_program(KEY, bytes(11))
    assert program_cache.load_program(KEY) is None


def test_concurrent_cache_writers_do_not_conflict(folder):
    codes = {f"{number:064x}": bytes([number]) * 5000 for number in range(4)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: program_cache.save_program(*item), [*codes.items()] * 20))
    assert {key: program_cache.load_program(key) for key in codes} == codes
    assert len(list(folder.iterdir())) == len(codes)


def test_without_cache_folder_programs_are_compiled(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for value in ("", str(tmp_path / "file"), str(tmp_path / "file" / "below"), "/proc/nowhere"):
        monkeypatch.setenv(program_cache.CACHE_VARIABLE, value)
        assert compiled(program) == 1


def test_cache_folder_follows_xdg_and_home(tmp_path, monkeypatch):
    monkeypatch.delenv(program_cache.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert program_cache.cache_folder() == tmp_path / "quantforge" / "programs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert program_cache.cache_folder() == tmp_path / ".cache" / "quantforge" / "programs"
    monkeypatch.setenv("HOME", "relative")
    assert program_cache.cache_folder() is None
