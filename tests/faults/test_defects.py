"""`verify` finds the defects that a generator plants in a tiny model in three formats, if they change results.

A sample of `scripts/verify_defects.py`, whose judge says which count without asking `verify`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

from quantforge.runtime import linear
from quantforge_kernels import fallback
from scripts.defects import artifacts, mistakes, results, session
from scripts.defects.artifacts import Healthy
from scripts.defects.damage import Damage, Finding, damage_of
from scripts.defects.files import Copy
from scripts.defects.judge import judge
from tests.conftest import Tiny

SEED = 3
BASES = {
    artifacts.CT: ("m", "{plain} --scheme int4:g32:sym"),
    artifacts.GPTQ: ("q", "{plain} --scheme int4:g32:asym --format gptq"),
    artifacts.GGUF: ("m.gguf", "{plain} --type Q8_0"),
}


@pytest.fixture(scope="module")
def bases(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Healthy]:
    source, directory = tiny("llama-wide"), tmp_path_factory.mktemp("bases")
    artifacts_made = []
    for family, (name, command) in BASES.items():
        artifacts.by_command(command, source, directory / name)
        artifacts_made.append(
            Healthy(name, family, lambda name=name: (directory / name, source), command)
        )
    return artifacts_made


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "select_kernel", lambda _problem: fallback.KERNEL)


@pytest.mark.thorough
def test_planted_defects_that_change_results_are_found(bases, tmp_path):
    names = [f"bundled-{number}" for number in range(len(session.KINDS))]  # one of every kind
    tried = (session.tried(bases, SEED, name, tmp_path) for name in names)
    records = [record for record in tried if record]
    counted = [record for record in records if record.counts]
    assert len(counted) >= 12
    assert len({record.family for record in counted}) == len(BASES)
    assert [record for record in counted if not record.found] == []
    assert not any(text.startswith("CRASH") for record in records for text in record.texts)
    # Some can be known without the source.
    assert Counter(record.found_alone for record in counted)[True] >= 2


def test_healthy_artifacts_have_no_findings_and_copies_are_independent(bases, tmp_path):
    for healthy in bases:
        before = {path: path.read_bytes() for path in _files(healthy.path)}
        copy = Copy(healthy.path, tmp_path / healthy.name)
        assert judge(copy, healthy).reason == ""
        for source in (healthy.source, None):
            assert session.findings(copy.path, source) == []
        for name in copy.names():
            copy.write(name, b"")
        assert {path: path.read_bytes() for path in _files(healthy.path)} == before


def test_a_source_mistake_changes_one_tensor_in_every_format(bases, tmp_path):
    """A mistake in one source tensor changes that tensor alone, in every format."""
    for number, healthy in enumerate(bases):
        copy = Copy(healthy.path, tmp_path / str(number), healthy.source, healthy.command)
        assert mistakes.halves(copy, Random(number))
        assert len(copy.changed) == 1
        damage = damage_of(copy)
        damaged_names = {
            name for name in damage.tensors if name.startswith("blk.") or not copy.one_file
        }
        assert 1 <= len(damaged_names) <= 2, damage


@pytest.mark.parametrize(
    ("where", "detail", "check", "named"),
    [
        ("model.layers.1.mlp.up_proj.weight", "off", "quantization-error", True),
        ("blk.1.ffn_up.weight", "off", "quantization-error", True),
        ("model.layers.11.mlp.up_proj.weight", "off", "quantization-error", False),
        ("m.gguf", "differs from layers.1.mlp.up_proj", "swapped-tensors", True),
        ("m.gguf", "far from the source", "logits", False),
        ("m.gguf", "something is off", "quantization-error", False),
    ],
)
def test_a_finding_names_the_tensor_and_not_the_model(where, detail, check, named):
    damage = Damage(frozenset({"layers.1.mlp.up_proj", "blk.1.ffn_up"}), frozenset({"m.gguf"}))
    assert damage.named(Finding(check, where, detail)) is named


def test_a_finding_names_the_file_without_a_single_damaged_tensor():
    finding = Finding("unreadable", "model-2.safetensors", "cut off")
    names = frozenset({"model-2.safetensors"})
    assert Damage(frozenset(), names).named(finding)
    assert Damage(frozenset({"layers.0.k_proj"}), names, several=True).named(finding)
    assert not Damage(frozenset({"layers.0.k_proj"}), names).named(finding)
    says = Finding("zero-points", "x.qzeros", "differ from what the configuration says")
    assert Damage(frozenset(), frozenset({"config.json"})).named(says)


def test_missed_detection_targets_are_reported_by_name():
    def record(number: int, verdict: str, kind: str = "codes") -> session.Record:
        return session.Record(
            f"bundled-{number}", kind, "gguf", "a", "t", "why", 0, 1, 0, verdict, verdict, [], []
        )

    good = [record(n, session.ERROR) for n in range(40)]
    healthy = [session.Looked(str(n), [], [], [], [], 0) for n in range(20)]
    assert list(results.failures(good, healthy)) == []
    bad = [record(n, session.UNNAMED, "scales") for n in range(3)]
    assert list(results.failures([*good, *bad], healthy)) == [
        "found in bundled models: 93%, at least 95% are wanted"
    ]
    warned = [session.Looked(str(n), [], ["w"], [], [], 0) for n in range(3)]
    failed = [session.Looked("x", ["e"], [], [], [], 0)]
    assert list(results.failures(good, [*healthy, *warned, *failed])) == [
        "1 healthy artifacts with an error, none is wanted",
        "healthy artifacts with a warning: 12%, at most 10% are wanted",
    ]
    assert "| codes | 40 | 40 | 40 | 100% | 100% | 0% | 100% |" in results.table(good, healthy, [])


@pytest.mark.parametrize(
    ("factor", "counts"), [(1.0001, False), (1.5, True)], ids=["harmless", "harmful"]
)
def test_the_judge_separates_harmless_from_harmful_changes(factor, counts, bases, tmp_path):
    from scripts.defects.files import parts_of

    copy = Copy(bases[0].path, tmp_path / "copy")
    weights = parts_of(copy)
    for part in weights.parts:
        if part.role == "scales" and "down_proj" in part.name:
            part.put(part.values() * factor)
    weights.save()
    with torch.inference_mode():
        assert judge(copy, bases[0]).counts is counts


def _files(path: Path) -> list[Path]:
    return [item for item in path.rglob("*") if item.is_file()] if path.is_dir() else [path]
