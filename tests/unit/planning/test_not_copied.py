"""Files and keys that are not copied are reported by plan, run and manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantforge import api
from tests.conftest import Tiny
from tests.runs import copy_model, recipe, run_command

NO_LICENCE = "the source states no licence"


@pytest.fixture
def model(tiny: Tiny, tmp_path: Path) -> Path:
    return copy_model(tiny("llama"), tmp_path / "m")


def not_copied_notes(model: Path) -> list[str]:
    return list(api.plan(str(model), recipe(bits=4)).not_copied)


def update_config(model: Path, **values: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}))


def test_files_not_carried_over_are_named(model: Path) -> None:
    for name in ("modeling_x.py", "pytorch_model.bin", "a\nb.exe", ".gitattributes"):
        (model / name).touch()
    (model / "original").mkdir()
    (stray,) = (line for line in not_copied_notes(model) if line.startswith("not carried over"))
    assert stray == r"not carried over: 'a\nb.exe', modeling_x.py, original/, pytorch_model.bin"
    for n in range(20):
        (model / f"{n:02}.txt").touch()
    assert "00.txt, 01.txt," in "".join(not_copied_notes(model))
    assert "07.txt and 16 more" in "".join(not_copied_notes(model))


@pytest.mark.parametrize(
    "values",
    [
        {"auto_map": {"AutoModel": "modeling_x.X"}}, {"trust_remote_code": True}, {"_target_": "os.system"},
        {"vision_config": {"auto_map": {"AutoModel": "modeling_x.X"}}},
    ],
)  # fmt: skip
def test_config_keys_that_name_code_are_reported(model: Path, values: dict[str, object]) -> None:
    assert not any("code" in line for line in not_copied_notes(model))
    update_config(model, **values)
    key = next(iter(values)).replace("vision_config", "auto_map")
    assert f"config.json names code, which is never run: {key}" in not_copied_notes(model)
    update_config(model, **dict.fromkeys(values))
    assert not any("code" in line for line in not_copied_notes(model))


@pytest.mark.parametrize(
    ("name", "text", "has_license"),
    [
        ("LICENSE.md", "terms", True), ("README.md", "---\nlicense: other\n---\n", True),
        ("README.md", "---\nlicense_name: mine\n---\n", True), ("README.md", "the license: mit\n", False),
    ],
)  # fmt: skip
def test_a_missing_license_is_reported(model, name, text, has_license):
    assert any(line.startswith(NO_LICENCE) for line in not_copied_notes(model))
    (model / name).write_text(text)
    assert any(line.startswith(NO_LICENCE) for line in not_copied_notes(model)) is not has_license


def test_files_not_copied_are_shown_and_recorded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "modeling_x.py").touch()
    line, out = "not carried over: modeling_x.py", tmp_path / "out"
    options = ("--scheme", "int4:g32:sym", "--scales", "absmax")
    assert line in run_command(capsys, "plan", model, *options).out
    assert line in run_command(capsys, "quantize", model, *options, "-o", out).err
    manifest = json.loads((out / "quantforge.manifest.json").read_bytes())
    assert line in manifest["not_copied"]
    done = run_command(capsys, "export", out, "--format", "gptq", "-o", tmp_path / "gptq")
    assert (done.code, NO_LICENCE in done.err, "not carried" in done.err) == (0, True, False)
