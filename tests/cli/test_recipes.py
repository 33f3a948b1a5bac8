"""The built-in recipes: each plans without a substitution, makes a result, and is told of in one table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quantforge import api
from quantforge.engines import TARGETS
from quantforge.formats import load_format
from quantforge.planning.recipe_options import builtin_recipes, described_recipes, load_recipe
from quantforge.settings import Policy, Settings
from tests.conftest import make_tiny
from tests.runs import run_command
from tests.thorough import mark_others_thorough

DEMO = Path(__file__).parents[2] / "models" / "demo"
DATA_FREE = "no data"
# Of those that differ in the engine alone, the first: what is made is the same.
NAMES = sorted(builtin_recipes())
# Of each method and each format one runs in the quick suite.
QUICK = (
    "autoawq-4bit", "balanced-4bit", "fast-8bit", "llama.cpp-5bit", "mlx-4bit", "sglang-8bit", "transformers-4bit",
    "vllm-8bit-int",
)  # fmt: skip
DIFFERENT = {
    str(replace(load_recipe(name), engine="")): name
    for name in sorted(builtin_recipes(), reverse=True)
}


def test_there_is_one_for_every_engine_and_width() -> None:
    found = {(item.engine, item.bits) for item in described_recipes().values()}
    assert found >= {
        (engine, bits) for engine in TARGETS for bits in TARGETS[engine].default_options
    }
    assert set(described_recipes()) == set(builtin_recipes())


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of one block, wide enough for the groups of every recipe."""
    return make_tiny("llama-wide", tmp_path_factory.mktemp("block"), num_hidden_layers=1)


@pytest.mark.parametrize("name", mark_others_thorough(NAMES, *QUICK))
def test_a_recipe_plans_and_runs(name: str, block: Path, tmp_path: Path) -> None:
    plan, told = api.plan(DEMO, name), described_recipes()[name]
    assert plan.substitutions == ()
    assert any(verdict.loads for verdict in plan.engines)
    assert bool(plan.needs) == (not told.needs.startswith(DATA_FREE))
    assert plan.format == load_recipe(name).format or not load_recipe(name).format
    if name not in DIFFERENT.values():
        return
    out = tmp_path / ("q" + load_format(plan.format).INFO.file_suffix)
    settings = Settings(policy=Policy(allow={"rtn-fallback": 0}))
    made = api.quantize(block, name, out, settings, samples=4, length=24)
    assert len(made.plan.quantized()) >= 7
    assert api.verify(out, forward=False).findings == []


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run_command(capsys, "recipes")
    lines = ended.out.splitlines()
    assert lines[0].split() == ["recipe", "engine", "bits", "quality", "needs"]
    assert len(lines) == 1 + len(builtin_recipes()) >= 15
    assert max(map(len, lines)) <= 80
    document = json.loads(run_command(capsys, "recipes", "--json").out)
    assert document["recipes"]["vllm-4bit"]["engine"] == "vllm"
