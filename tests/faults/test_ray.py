"""A release on a Ray cluster: the bytes of one process, also where a machine dies; what cannot run there is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quantforge.errors import InputError, UsageError
from quantforge.settings import Settings
from quantforge.verbs import ray_variants, release
from quantforge.verbs.ray_variants import shares
from quantforge.verbs.variants import make_variants
from tests.runs import CALIBRATION, recipe, tree

ROOT = Path(__file__).parents[2]
DEADLINE = 240
HEAD = """model = "{model}"
[calibration]
samples = 4
length = 16
"""
VARIANT = """[[variant]]
name = "int{bits}"
recipe = {{method = "gptq", scheme = "int{bits}:g32:sym"}}
format = "compressed-tensors"
"""


@pytest.fixture
def cluster(monkeypatch):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    yield found
    found.shutdown()


def made(model: Path, out: Path, **settings: Any) -> tuple[str, ...]:
    """Make one variant as the settings say."""
    one = {out.name: recipe("gptq", bits=4)}
    return make_variants(model, one, lambda _, __: out, Settings(**settings))


def holders(out: Path) -> set[int]:
    found = set()
    for lock in out.glob("compressed-tensors/.*.qf/lock"):
        with suppress(OSError, ValueError, KeyError):  # of a run that begins or ends
            found.add(json.loads(lock.read_text())["pid"])
    return found


@pytest.mark.thorough
def test_a_machine_dies_and_the_release_has_the_bytes_of_one_process(
    cluster, model, tmp_path, monkeypatch
):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    spec, out = tmp_path / "release.toml", tmp_path / "out"
    spec.write_text(
        HEAD.format(model=model) + "".join(VARIANT.format(bits=bits) for bits in (2, 3, 4, 8))
    )
    release(spec, tmp_path / "whole")
    second = cluster.add_node(num_cpus=1)
    command = [sys.executable, "-m", "quantforge", "release", spec, "-o", out, "--threads", "1"]
    run = subprocess.Popen(
        [*command, "--ray", cluster.address, "--json"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    deadline = time.monotonic() + DEADLINE
    workers: set[int] = set()
    while len(workers) < 2:  # processes that hold a variant's lock
        workers |= holders(out)
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert run.pid not in workers
    cluster.remove_node(second, allow_graceful=False)
    said, errors = run.communicate(timeout=DEADLINE)
    assert run.returncode == 0, errors
    assert "Traceback" not in errors
    assert json.loads(said)["made"] == ["int2", "int3", "int4", "int8"]
    assert tree(out) == tree(tmp_path / "whole")

    with pytest.raises(InputError, match="no machine of the cluster has CPU 2"):
        made(model, tmp_path / "other", ray=cluster.address, threads=2)
    assert not (tmp_path / "other").exists()


def test_variants_of_one_calibration_are_dealt_out():
    rtn = recipe(calibration=CALIBRATION)
    other = recipe("gptq", calibration=CALIBRATION.__class__(samples=2))
    recipes = dict(zip("abcdef", (rtn, rtn, other, rtn, rtn, rtn), strict=True))
    assert shares(recipes, 2) == [["a", "d", "f"], ["b", "e"], ["c"]]
    assert shares(recipes, 99) == [["a"], ["b"], ["d"], ["e"], ["f"], ["c"]]


def test_no_cluster_and_no_library_are_told(model, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="no Ray cluster answers"):
        made(model, tmp_path / "out", ray="127.0.0.1:1")
    monkeypatch.setattr(ray_variants.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed"):
        made(model, tmp_path / "out", ray="auto")
    with pytest.raises(UsageError, match="processes that share"):
        Settings(ray="auto", join=True)


@pytest.mark.parametrize("address", ["local", "nonsense", ":6379", "127.0.0.1", "h:x", "h:6379 "])
def test_what_is_no_address_is_refused_at_once(address):
    with pytest.raises(UsageError, match="is no address"):
        Settings(ray=address)


@pytest.mark.parametrize("address", ["auto", "h:6379", "10.0.0.1:1", "[::1]:6379", "ray://h:10001"])
def test_addresses_of_clusters_pass(address):
    assert Settings(ray=address).ray == address
