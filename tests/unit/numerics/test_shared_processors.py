"""How threads wait for work, by environment, command and processor load."""

from __future__ import annotations

import os
import sys

import pytest

from quantforge.numerics import shared_processors
from tests.runs import run_command


@pytest.mark.parametrize(
    ("there", "loaded", "spins"),
    [
        ({}, {}, "2000"),
        ({}, {"torch": None}, None),
        ({"GOMP_SPINCOUNT": "7"}, {}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}, None),
    ],
)
def test_spin_count_is_set_unless_already_decided(there, loaded, spins, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(there))
    monkeypatch.setattr(sys, "modules", loaded)
    shared_processors.wait_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    assert os.environ.get("OMP_WAIT_POLICY") == there.get("OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("arguments", "briefly"),
    [
        ("quantize nowhere", True),
        (
            "release nowhere.toml -o out",
            True,
        ),  # speeds are measured where its file says so, and by no default
        ("sweep nowhere --over bits=3,4 -o out", True),
        ("eval nowhere --no-speed", True),
        ("eval nowhere", False),
        ("generate nowhere x", False),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_decoding_commands_spin_only_on_unshared_processors(
    arguments, briefly, shared, monkeypatch, capsys
):
    called: list[bool] = []
    monkeypatch.setattr("quantforge.cli.app.processors_are_shared", lambda: shared)
    monkeypatch.setattr("quantforge.cli.app.wait_briefly", lambda: called.append(True))
    assert run_command(capsys, *arguments.split()).code == 3
    assert bool(called) == (briefly or shared)


def system(monkeypatch, files: dict[str, str | list[str]]) -> None:
    """Let the system say this; a list is said one after the other."""

    def text(path) -> str:
        said = files.get(str(path), "")
        return said.pop(0) if isinstance(said, list) else said

    monkeypatch.setattr(shared_processors, "_system_text", text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(shared_processors, "SAMPLE_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("groups", "limits", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ("3:cpu,cpuacct:/x\n0::/", {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"}, 2.0),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_processor_quota_reads_the_cgroup_limit(groups, limits, quota, monkeypatch):
    files = {f"/sys/fs/cgroup/{name}": text for name, text in limits.items()}
    system(monkeypatch, {"/proc/self/cgroup": groups, **files})
    assert shared_processors.processor_quota() == quota


@pytest.mark.parametrize(
    ("load", "quota", "ticks", "shared"),
    [
        (0.0, "max 100000", None, False),  # idle for a minute: nothing is sampled
        (2.0, "max 100000", ((100, 100), (101, 199)), False),  # our own run before this one
        (2.0, "max 100000", ((100, 100), (150, 150)), True),
        (0.0, "100000 100000", None, True),
    ],
)
def test_processors_that_others_use_are_shared(load, quota, ticks, shared, monkeypatch):
    lines = [
        f"cpu0 {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu9 {busy} 0 0 0 0 0 0 0"
        for busy, idle in ticks or ()
    ]
    files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": quota, "/proc/stat": lines}
    system(monkeypatch, files)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert shared_processors.processors_are_shared() == shared


def test_processor_share_is_run_time_over_requested_time(monkeypatch):
    counts = [f"{ran} {waited} 9" for ran, waited in ((0, 0), (6_000, 2_000))]
    stat = [f"cpu0 {busy} 0 0 0 0 0 0 {stolen}" for busy, stolen in ((0, 0), (80, 20))]
    files = {f"/proc/self/task/{os.getpid()}/schedstat": counts, "/proc/stat": stat}
    system(monkeypatch, files)
    share = shared_processors.ProcessorShare()
    assert share.current_share() == pytest.approx(0.75 * 0.8)  # the hypervisor took a fifth


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not count it")
def test_processor_share_is_available_on_linux():
    share = shared_processors.ProcessorShare()
    sum(range(3_000_000))
    result = share.current_share()
    assert result is not None
    assert 0 < result <= 1


def test_processor_share_is_none_without_system_counters(monkeypatch):
    system(monkeypatch, {})
    assert shared_processors.ProcessorShare().current_share() is None
