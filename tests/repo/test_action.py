"""The GitHub Action and the workflows: valid by the published schemas; the action's own steps run as plain shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
WORKFLOWS = [
    *sorted((ROOT / ".github/workflows").glob("*.yml")),
    ROOT / "docs/examples/release-workflow.yml",
]
SOURCES = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "calibration"))
FILE = """model = "{model}"
[gates]
max_bytes = {limit}
[[variant]]
name = "a"
method = "rtn"
type = "Q8_0"
scales = "absmax"
[[variant]]
name = "b"
recipe = {{method = "rtn", scheme = "int4:g128:sym", scales = "absmax"}}
"""


@pytest.mark.parametrize("path", [ROOT / "action.yml", *WORKFLOWS], ids=lambda path: path.name)
def test_the_published_schemas_hold(path: Path) -> None:
    checker = pytest.importorskip("check_jsonschema")
    kind = "github-actions" if path.name == "action.yml" else "github-workflows"
    ended = CliRunner().invoke(checker.main, ["--builtin-schema", f"vendor.{kind}", str(path)])
    assert ended.exit_code == 0, ended.output


def test_what_steps_and_the_example_name_is_there() -> None:
    text = (ROOT / "action.yml").read_text()
    for name in ACTION["inputs"]:
        assert f"inputs.{name}" in text
    used = yaml.safe_load(WORKFLOWS[-1].read_text())["jobs"]["release"]["steps"]
    given = next(step["with"] for step in used if "quantforge" in step.get("uses", ""))
    assert given.keys() <= ACTION["inputs"].keys()
    page = (ROOT / "docs/release.md").read_text()
    assert all(f"`{name}`" in page for name in ACTION["inputs"])


def stepped(name: str, place: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the action as a runner does: its environment from the inputs, bash with -e and pipefail."""
    step = next(one for one in ACTION["runs"]["steps"] if one["name"] == name)
    values = {key: str(item["default"]) for key, item in ACTION["inputs"].items()} | inputs
    given = {
        key: values[text.removeprefix("${{ inputs.").removesuffix(" }}")]
        for key, text in step["env"].items()
    }
    files = {f"GITHUB_{key}": str(place / key) for key in ("OUTPUT", "STEP_SUMMARY")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [shutil.which("bash") or "bash", "-eo", "pipefail", "-c", step["run"]]
    there = {**os.environ, **files, **given, "PATH": path, "PYTHONPATH": SOURCES}
    return subprocess.run(
        command, cwd=place, env=there, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_the_steps_make_a_release_and_its_summary(tmp_path: Path) -> None:
    (tmp_path / "release.toml").write_text(FILE.format(model=ROOT / "models/demo", limit=4000000))
    assert stepped("Write the release file", tmp_path).returncode == 0
    made = stepped("Make the release", tmp_path, only="a b")
    assert made.returncode == 6, made.stderr
    assert (tmp_path / "OUTPUT").read_text() == "directory=release\n"
    summary = (tmp_path / "STEP_SUMMARY").read_text()
    assert "| a | gguf | rtn |" in summary
    assert "bytes, at most 4000000" in summary
    uploaded = (tmp_path / "release/upload.sh").read_text()
    assert "name=b\n" in uploaded
    assert "-GGUF" not in uploaded


def test_a_release_file_is_written_from_inputs_and_never_over_one(tmp_path: Path) -> None:
    from quantforge.planning.release_spec import read_release

    assert "no input model" in stepped("Write the release file", tmp_path).stdout
    model = 'it"s $(touch planted)/m'
    given = {"model": model, "set": "mlx", "max-kl": "0.05"}
    assert stepped("Write the release file", tmp_path, **given).returncode == 0
    spec = read_release(tmp_path / "release.toml")
    assert (spec.model, spec.variants[0].gates.max_kl) == (model, 0.05)
    again = stepped("Write the release file", tmp_path, **given)
    assert (again.returncode, "exists" in again.stdout) == (2, True)
    bad = stepped(
        "Write the release file", tmp_path, release="other.toml", model="m", **{"max-kl": "x"}
    )
    assert bad.returncode
    assert {path.name for path in tmp_path.iterdir()} == {"release.toml", "other.toml.part"}
