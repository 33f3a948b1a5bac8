"""`import quantforge`: the verbs as functions, whatever else is imported, as docs/python.md shows them."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import quantforge
from quantforge import api
from scripts.python_notebook import NOTEBOOK, cells
from scripts.structure import modules
from tests.conftest import Tiny

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text()
FUNCTIONS = (
    "plan",
    "quantize",
    "export",
    "evaluate",
    "generate",
    "verify",
    "reproduce",
    "inspect",
    "diff",
    "load",
)


@pytest.fixture
def place(tiny: Tiny, tmp_path: Path) -> Path:
    """A working directory with a small model as ``models/demo``."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/demo").symlink_to(tiny("llama-wide"))
    return tmp_path


def test_the_page_runs_as_it_stands(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    small = (place / "models/demo").resolve()  # in place of the larger one of the package
    monkeypatch.setattr(quantforge, "demo", lambda out: Path(out).symlink_to(small))
    blocks = ["".join(cell["source"]) for cell in code(cells(PAGE))[1:]]
    assert len(blocks) == PAGE.count("```python")
    known: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), known)
    said = capsys.readouterr()
    assert "exact" in said.out
    assert said.err == ""
    assert {path.name for path in place.iterdir()} >= {"demo-awq", "demo.gguf", "demo-rtn"}
    first, second = known["found"].rows[1:]  # type: ignore[attr-defined]
    assert 0 < first["kl_mean"] == pytest.approx(second["kl_mean"], rel=0.05)
    assert known["report"].findings == []  # type: ignore[attr-defined]
    assert known["model"].config.model_type == "llama"  # type: ignore[attr-defined]


def code(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cell for cell in made if cell["cell_type"] == "code"]


def test_the_notebook_is_the_page_run_to_its_end() -> None:
    """Where this fails, ``python scripts/python_notebook.py`` makes it anew."""
    kept = json.loads(NOTEBOOK.read_text())["cells"]
    ran = [cell["execution_count"] for cell in code(kept)]
    assert ran == [*range(1, len(ran) + 1)]
    printed = ["".join(one["text"]) for cell in code(kept) for one in cell["outputs"]]
    assert printed[0].splitlines()[2] == "exact 28"
    assert not re.search(r"(^|\s)/\w", "".join(printed))  # no path of a machine
    bare = [
        {**cell, "execution_count": None, "outputs": []} if cell in code(kept) else cell
        for cell in kept
    ]
    assert bare == cells(PAGE)


SCRIPT = """
import json, sys
import quantforge
quick = [name for name in ("torch", "numpy", "quantforge.api") if name in sys.modules]
quantforge.plan("models/demo", bits=8), quantforge.inspect("models/demo")
planned = [name for name in ("torch", "numpy") if name in sys.modules]
print(json.dumps([quick, planned]))
"""


def test_torch_waits_for_work(place: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, cwd=place, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == json.dumps([[], []])


def test_no_module_takes_the_place_of_a_function() -> None:
    for name in modules():
        if name.startswith("quantforge.") and "__main__" not in name:
            importlib.import_module(name)
    for package in (quantforge, api):
        replaced = [
            name for name in quantforge.__all__ if isinstance(getattr(package, name), ModuleType)
        ]
        assert replaced == []


def test_the_names_are_those_of_the_verbs_documented_and_typed() -> None:
    assert quantforge.__all__ == api.__all__ == sorted(api.__all__)
    assert {*FUNCTIONS, "__version__"} <= {*dir(quantforge)}
    known: dict[str, object] = {}
    exec("from quantforge import *", known)
    assert known["quantize"] is api.quantize
    for name in quantforge.__all__:
        assert getattr(quantforge, name) is getattr(api, name)
    for name in (*FUNCTIONS, "make_imatrix"):
        assert f"`{name}(" in PAGE, name
        given = inspect.signature(getattr(quantforge, name))
        untyped = [one for one in given.parameters.values() if one.annotation is one.empty]
        assert not untyped, name
        assert given.return_annotation is not given.empty
    with pytest.raises(AttributeError, match="quantise"):
        _ = quantforge.quantise  # type: ignore[attr-defined]
