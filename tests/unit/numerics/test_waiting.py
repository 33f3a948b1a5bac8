"""How threads wait: as the environment says, else as the verb wants it, and said before torch is imported."""

from __future__ import annotations

import os
import sys

import pytest

from quantforge.numerics import waiting
from tests.runs import command


@pytest.mark.parametrize(
    ("there", "loaded", "spins"),
    [
        ({}, {}, "2000"),
        ({}, {"torch": None}, None),
        ({"GOMP_SPINCOUNT": "7"}, {}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}, None),
    ],
)
def test_it_is_set_where_nobody_has_decided(there, loaded, spins, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(there))
    monkeypatch.setattr(sys, "modules", loaded)
    waiting.wait_briefly()
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
def test_verbs_that_decode_keep_their_threads_awake(arguments, briefly, monkeypatch, capsys):
    called: list[bool] = []
    monkeypatch.setattr("quantforge.cli.app.wait_briefly", lambda: called.append(True))
    assert command(capsys, *arguments.split()).code == 3
    assert bool(called) == briefly
