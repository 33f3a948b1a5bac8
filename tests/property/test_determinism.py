"""The same command writes the same bytes in any environment; shards hold the same tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantforge import api
from quantforge.settings import Settings
from tests.conftest import FAMILIES, SIZES, Tiny, make_tiny
from tests.runs import fast_recipe, file_digests, quantize, recipe
from tests.thorough import thorough_case

METHODS = ("awq+gptq",)  # which tries plain rounding, too
# One process runs every method: what surrounds a run is the same for all of them.
SCRIPT = """
import sys, torch
import tests.conftest  # which has loops that were compiled read, not compiled again
from pathlib import Path
from quantforge import api
from quantforge.settings import Settings
from tests.runs import fast_recipe
model, out, threads, *methods = sys.argv[1:]
torch.set_num_threads(int(threads))
for method in methods:
    api.quantize(model, fast_recipe(method), Path(out) / method, Settings(threads=int(threads)))
"""


def here(model: Path, out: Path, methods: Sequence[str] = METHODS) -> None:
    """Run the same in this process, on one thread."""
    out.mkdir()
    for method in methods:
        api.quantize(str(model), fast_recipe(method), out / method, Settings(threads=1))


def elsewhere(
    model: Path, out: Path, cwd: Path, threads: int, methods: Sequence[str] = METHODS, **environment: str
) -> None:  # fmt: skip
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root, root / "calibration", root / "kernels")))
    out.mkdir()
    cwd.mkdir()
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(out), str(threads), *methods],
        check=True,
        cwd=cwd,
        umask=0o022,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads),
             "OMP_WAIT_POLICY": "PASSIVE", **environment},
    )  # fmt: skip


def test_threads_hash_seed_directory_and_locale_change_nothing(tmp_path, monkeypatch):
    # Large enough for torch and LAPACK to split the products and the factorization over threads.
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    monkeypatch.setitem(FAMILIES, "llama-512", ("llama", sizes, "bfloat16", 0))
    model = make_tiny("llama-512", tmp_path / "model")
    here(model, tmp_path / "a")
    linked = tmp_path / "elsewhere" / "models"
    linked.mkdir(parents=True)
    (linked / model.name).symlink_to(model)
    elsewhere(linked / model.name, tmp_path / "b", tmp_path / "there", 2,
              PYTHONHASHSEED="2", LC_ALL="tr_TR.UTF-8", TZ="Asia/Tokyo", COLUMNS="7")  # fmt: skip
    for method in METHODS:
        first, second = file_digests(tmp_path / "a" / method), file_digests(tmp_path / "b" / method)
        assert len(first) >= 5
        assert first == second, method


@pytest.mark.thorough
def test_large_matrices_are_the_same_for_1_and_4_threads(tmp_path, monkeypatch):
    # Large enough for parts side by side.
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 1,
             "num_attention_heads": 8}  # fmt: skip
    monkeypatch.setitem(FAMILIES, "llama-1024", ("llama", sizes, "bfloat16", 0))
    model = make_tiny("llama-1024", tmp_path / "model")
    here(model, tmp_path / "1", ["gptq"])
    elsewhere(model, tmp_path / "4", tmp_path / "in 4", 4, ["gptq"])
    assert file_digests(tmp_path / "1" / "gptq") == file_digests(tmp_path / "4" / "gptq")


@pytest.mark.parametrize(
    ("method", "format_key"),
    [
        ("gptq", "compressed-tensors"),
        *(thorough_case("rtn", format_key) for format_key in ("gptq_v2", "awq")),
    ],
)
def test_shards_hold_the_same_tensors(
    tiny: Tiny, tmp_path: Path, format_key: str, method: str
) -> None:
    model = tiny("llama-wide")
    scheme = "int4:g128:asym" if format_key == "awq" else "int4:g128:sym"
    for name, limit in (("one", 10**9), ("many", 40_000)):
        quantize(
            model,
            tmp_path / name,
            fast_recipe(method, format=format_key, scheme=scheme, max_shard_bytes=limit),
        )
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    whole = load_file(tmp_path / "one" / "model.safetensors")
    parts = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_hidden_states_in_memory_or_on_disk_give_the_same_bytes(tiny, tmp_path):
    for storage in ("memory", "disk"):
        quantize(tiny("llama-wide"), tmp_path / storage, fast_recipe("gptq"), activations=storage)
    assert file_digests(tmp_path / "memory") == file_digests(tmp_path / "disk")


def test_results_contain_no_local_paths(tiny, tmp_path):
    model = tiny("llama-wide")
    quantize(model, tmp_path / "out", fast_recipe("gptq"))
    api.export(str(tmp_path / "out"), recipe(format="gptq"), tmp_path / "again", Settings())
    for path in [*(tmp_path / "out").iterdir(), *(tmp_path / "again").iterdir()]:
        data = path.read_bytes()
        assert str(tmp_path).encode() not in data, path
        assert str(model.parent).encode() not in data, path
