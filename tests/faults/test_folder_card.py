"""The model card of a folder of GGUF files: updated without losing user text, refused before measuring."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from quantforge.api import evaluate, release
from quantforge.api.folder_cards import (
    FILES_PART,
    FolderFile,
    choose_example_file,
    render_files_part,
)
from quantforge.artifacts.number_text import size
from quantforge.errors import InputError
from tests.faults.test_release import Q8, write_spec
from tests.runs import copy_model, quantize, recipe
from tests.thorough import thorough_case

EVALUATION = {"windows": 2, "length": 16, "speed": False}
Q4 = Q8.replace("q8", "q4").replace("Q8_0", "Q4_0")


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    for kind in ("Q8_0", "Q4_0"):
        quantize(tiny("llama-wide"), directory / f"x-{kind}.gguf", recipe(type=kind))
    return directory


@pytest.fixture
def folder(files, tmp_path):
    return copy_model(files, tmp_path / "f")


def test_a_folder_card_keeps_text_added_by_hand(model, folder):
    from huggingface_hub import ModelCard

    card = folder / "README.md"
    evaluate(model, [folder / "x-Q8_0.gguf"], card=folder, **EVALUATION)
    first = card.read_text()
    assert first.count("| `x-Q8_0.gguf` |") == 3  # files, which one, figures
    assert first.count("| `x-Q4_0.gguf` |") == 1  # not measured
    assert "llama-server -m x-Q8_0.gguf" in first
    card.write_text(first.replace(FILES_PART.begin, f"Mine.\n\n{FILES_PART.begin}"))
    files = sorted(folder.glob("*.gguf"))
    evaluate(model, files, card=folder, **EVALUATION)
    second = card.read_text()
    assert "\nMine.\n" in second
    assert second.count("| `x-Q4_0.gguf` |") == 2  # no machine is so small that it is the one
    assert "least divergence" in second
    assert "llama-server -m x-Q8_0.gguf" in second  # which fits into every memory, and is closest
    data = ModelCard(second).data
    assert data.library_name == "gguf"
    assert {result.metric_type for result in data.eval_results} >= {"perplexity", "kl_divergence"}


def test_a_folder_card_ignores_same_named_files_elsewhere(model, folder, tmp_path):
    other = tmp_path / "o/x-Q8_0.gguf"
    other.parent.mkdir()
    quantize(model, other, recipe(type="Q4_0"))
    files = [folder / "x-Q8_0.gguf", other]
    evaluate(model, files[:1], card=folder, **EVALUATION)
    alone = (folder / "README.md").read_text()
    evaluate(model, files, card=folder, **EVALUATION)
    assert (folder / "README.md").read_text() == alone


def test_split_gguf_parts_are_one_entry_with_total_size(model, tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    quantize(model, folder / "x.gguf", recipe(type="Q8_0", max_shard_bytes=100_000))
    parts = sorted(folder.glob("*.gguf"))
    assert len(parts) > 2
    evaluate(model, [parts[1]], card=folder, **EVALUATION)
    files = (folder / "README.md").read_text().partition("## Which one")[0].splitlines()
    (row,) = (line for line in files if ".gguf" in line and line.startswith("| "))
    assert row.startswith(f"| `{parts[0].name}` |")
    assert f"| {size(sum(part.stat().st_size for part in parts))} |" in row
    assert not row.endswith("| - |")


@pytest.mark.parametrize("bits", ["x", True, -4.5, thorough_case(None)])
def test_invalid_bits_in_a_manifest_are_shown_as_absent(model, folder, bits):
    for path in folder.glob("*.gguf.quantforge.json"):
        document = json.loads(path.read_text())
        del document["source"]
        path.write_text(json.dumps({**document, "bits_per_weight": bits}))
    evaluate(model, [folder / "x-Q8_0.gguf"], card=folder, **EVALUATION)
    assert (folder / "README.md").read_text().count("| rtn | - |") == 2


def test_an_unwritable_card_is_refused_before_measuring(model, folder, monkeypatch):
    monkeypatch.setattr(import_module("quantforge.api.evaluate"), "_evaluation_options", None)
    card = folder / "README.md"
    for text in ("# Mine\n", f"{FILES_PART.begin}\n"):
        card.write_text(text)
        with pytest.raises(InputError, match="the part"):
            evaluate(model, [folder / "x-Q8_0.gguf"], card=folder, **EVALUATION)
        assert card.read_text() == text
    card.unlink()
    four = folder / "x-Q4_0.gguf"
    whole = four.read_bytes()
    four.write_bytes(whole[:4])
    with pytest.raises(InputError, match="x-Q4_0"):
        evaluate(model, [folder / "x-Q8_0.gguf"], card=folder, **EVALUATION)
    four.write_bytes(whole)
    (folder / "x-Q8_0.gguf.quantforge.json").unlink()
    with pytest.raises(InputError, match="no manifest beside it"):
        evaluate(model, [folder / "x-Q8_0.gguf"], card=folder, **EVALUATION)
    assert not card.exists()


def test_a_release_card_omits_variants_that_fail_a_gate(tmp_path, model):
    beyond = f"{Q4}gates = {{max_bytes = 1}}\n"
    result = release(write_spec(tmp_path, model, Q8, beyond), tmp_path / "r")
    assert [variant.failed != () for variant in result.variants] == [False, True]
    card = (tmp_path / "r/gguf/README.md").read_text()
    assert "q8.gguf" in card
    assert "q4.gguf" not in card
    assert "gguf/README.md" in (tmp_path / "r/SHA256SUMS").read_text()
    assert "--include README.md" in (tmp_path / "r/upload.sh").read_text()


def test_the_card_advises_the_closest_file_that_fits():
    def file(name, nbytes, kl):
        return FolderFile(name, "gptq", nbytes / 1e9, nbytes, nbytes * 1.1, kl)

    large, small, bad = (
        file("l", 30_000_000_000, 0.001), file("s", 5_000_000_000, 0.1), file("b", 9_000_000_000, 0.2),
    )  # fmt: skip
    text = render_files_part([large, small, bad], 8192, [])
    rows = [line for line in text.splitlines() if "GB | `" in line and line.startswith("| ")]
    assert [row for row in rows if row.count("|") == 4] == [
        "| 6 GB | `s` | 5.50 GB |", "| 48 GB | `l` | 33.0 GB |",
    ]  # fmt: skip
    assert "closer to the source: `b` (`s`)." in text
    assert r"| a\|b |" in render_files_part([FolderFile("x", "a|b", 4.0, 1, 1.0, None)], 8, [])
    unmeasured = render_files_part(
        [file("s", 5_000_000_000, None), file("b", 9_000_000_000, None)], 8, []
    )
    assert "| 12 GB | `b` |" in unmeasured
    assert "most bits per weight" in unmeasured
    assert "closer" not in unmeasured


def test_the_example_file_is_advised_and_measured():
    def file(name, bits, kl, size=1e9):
        return FolderFile(name, "gptq", bits, int(bits * size), bits * size * 1.1, kl)

    small, bad, good = file("2", 2.5, 0.5), file("5", 5.0, 0.9), file("6", 6.5, 0.01)
    assert (
        choose_example_file([small, bad, good]).name == "6"
    )  # the one of 5 bits is advised to nobody
    assert choose_example_file([small, file("5", 5.0, None), good]).name == "6"  # not measured
    assert choose_example_file([file("2", 2.5, None), file("5", 5.0, None)]).name == "5"
    assert choose_example_file([file("4", 4.0, None, 1e12), file("8", 8.5, None, 1e12)]).name == "8"
