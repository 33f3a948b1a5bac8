"""A few families of `scripts/families.py`: none is rounded wrongly, and stock transformers reads what was written.

One for each thing that a family can have which no declared family has: fused queries of another order and a key that
asks transformers to decode while loading, experts in one matrix, state spaces beside experts, a tower beside the
decoder, a list of layers under another name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import families
from tests.conftest import tiny_tokenizer
from tests.thorough import mark_others_thorough, thorough_case

FAMILIES = ("bloom", "dbrx", "deepseek_v3", "falcon", "gpt_oss", "jamba", "llava", "mamba", "molmo2", "olmo_hybrid",
            "qwen3_vl_moe")  # fmt: skip
UNLOADED = {"gpt_oss", "qwen3_vl_moe"}  # by the plan: transformers wants its experts stacked


@pytest.mark.parametrize(
    "name", mark_others_thorough(FAMILIES, "falcon", "dbrx", "jamba", "llava", "molmo2")
)
def test_nothing_is_silently_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = _run(name, ("plan", "rtn", "logits"), tmp_path, monkeypatch)
    states = {step: found[0] for step, found in document["found"].items()}
    assert (states["build"], states["plan"], states["rtn"]) == ("ok", "ok", "ok"), document
    assert states["logits"] == ("not loaded" if name in UNLOADED else "ok"), document


@pytest.mark.parametrize(
    ("name", "steps", "share"),
    [
        thorough_case(
            "axk2", ("plan", "gptq", "eval"), 0.95
        ),  # its blocks ask a packed weight for its type
        ("biogpt", ("plan", "awq", "verify"), 0.99),  # what absorbed a factor is derived
        thorough_case("falcon", ("plan", "gptq", "verify"), 0.99),
        thorough_case(
            "kimi_linear", ("plan", "awq"), 0.9
        ),  # files hold the convolutions of q, k and v apart
        ("mistral4", ("plan", "gptq", "eval"), 0.99),  # files hold all experts in one tensor
    ],
)
def test_derived_families_are_calibrated(
    name: str, steps: tuple[str, ...], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = _run(name, steps, tmp_path, monkeypatch)
    assert {step: document["found"][step][0] for step in steps} == dict.fromkeys(steps, "ok"), (
        document
    )
    assert document["share"] > share


def _run(
    name: str, steps: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.setattr(families, "TOKENIZER", [tiny_tokenizer()])
    monkeypatch.setattr(families, "SMALL", {"samples": 6, "length": 32})
    told: list[dict[str, Any]] = []
    families.run(families.Family(name, place), steps, told.append)
    assert told[-1]["wrong"] == []
    return told[-1]


def test_a_report_keeps_rows_that_were_not_run(tmp_path: Path) -> None:
    path = tmp_path / "families.json"
    path.write_text(
        '[{"family": "llama", "share": 1}, {"family": "opt", "share": 1}, {"family": "gone", "share": 1}]'
    )
    found = families.merged(path, {"opt": {"family": "opt", "share": 2}}, ["llama", "opt", "new"])
    assert {name: document["share"] for name, document in found.items()} == {"llama": 1, "opt": 2}
    assert families.merged(tmp_path / "none.json", {"opt": {}}, ["opt"]) == {"opt": {}}
