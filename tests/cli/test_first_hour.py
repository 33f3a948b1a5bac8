"""What a person who comes from elsewhere types first is answered with what to type."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quantforge.cli.path_arguments import display_path
from quantforge.cli.progress_bar import Clock
from quantforge.cli.release import _default_directory
from quantforge.engines import with_output_path
from quantforge.errors import InputError, nearest_hint
from quantforge.files.disk import no_space_error
from quantforge.formats.gguf.mixture import MIXTURES
from quantforge.notation import parse_share
from quantforge.plans import Note, NoteKind
from quantforge.progress import Progress
from quantforge_calibration.readers import RowReader, read_hub
from quantforge_calibration.source_error import SourceError
from tests.runs import copy_model, run_command


def test_all_names_that_are_equally_near_are_told() -> None:
    assert nearest_hint("Q4_K_N", MIXTURES) == "did you mean 'Q4_K_S' or 'Q4_K_M'?"
    assert nearest_hint("itn4", ["int2", "int3", "int4"]) == "did you mean 'int4'?"


def test_models_inside_of_a_directory_that_is_none_are_named(model, tmp_path: Path, capsys) -> None:
    for name in ("b", "a"):
        copy_model(model, tmp_path / name)
    (tmp_path / "c.gguf").touch()
    (tmp_path / "other").mkdir()
    ended = run_command(capsys, "plan", tmp_path, "--bits", "4")
    assert ended.code == 3
    inside = " or ".join(str(tmp_path / name) for name in ("a", "b", "c.gguf"))
    assert f"hint: a model is inside: {inside}\n" in ended.err
    (tmp_path / "other" / "adapter_config.json").touch()
    ended = run_command(capsys, "quantize", tmp_path / "other", "--bits", "4")
    assert ended.code == 3
    assert (
        f"hint: it is an adapter: quantforge quantize BASE --adapter {tmp_path}/other\n"
        in ended.err
    )


def test_a_type_beside_bits_is_refused_as_it_was_typed(model, capsys) -> None:
    for option, value in (("--bits", "4"), ("--scheme", "int4:g32")):
        ended = run_command(capsys, "plan", model, "--type", "q4_k_m", option, value)
        assert ended.code == 2
        assert f"--type and {option} are both given" in ended.err


@pytest.mark.parametrize(
    "typed",
    [
        "https://huggingface.co/acme/wren",
        "hf.co/acme/wren/tree/main",
        "https://huggingface.co/acme/wren/",
    ],
)
def test_an_address_of_the_hub_is_answered_with_the_name_and_how_to_fetch_it(
    typed: str, capsys
) -> None:
    ended = run_command(capsys, "plan", typed, "--bits", "4")
    assert ended.code == 3
    assert "hint: acme/wren, or where there is a network" in ended.err
    assert "hf download acme/wren --local-dir wren" in ended.err


def test_a_split_of_the_hub_keeps_its_column() -> None:
    with pytest.raises(SourceError) as caught:
        list(read_hub("wiki:train:body", "train", RowReader("body"), offline=True))
    assert caught.value.hint.endswith("give DIR:train:body")


def test_a_release_has_a_place_of_its_own(tmp_path: Path, capsys) -> None:
    assert [str(_default_directory(Path(name))) for name in ("x/release.toml", "demo.toml")] == [
        "release",
        "demo-release",
    ]
    assert run_command(capsys, "release", tmp_path / "no.toml").code == 3


def test_a_file_that_an_engine_reads_a_name_from_is_said_to_lie_there() -> None:
    note = Note("serve it with: printf 'FROM OUT' > Modelfile", NoteKind.SERVE)
    assert "FROM ./x.gguf" in with_output_path(note, "x.gguf")
    assert "FROM /a/x.gguf" in with_output_path(note, "/a/x.gguf")
    assert with_output_path(str(note), "x.gguf") == note  # the kind counts, not how the text begins


def test_bytes_that_do_not_fit_have_a_unit(tmp_path: Path) -> None:
    assert "(2.5 GB, " in no_space_error(tmp_path, 2_500_000_000, "full").message


def test_a_number_in_place_of_a_share_is_told_from_one() -> None:
    with pytest.raises(InputError) as caught:
        parse_share("2", "prune_experts")
    assert caught.value.hint == "a share, 25% or 0.25; not a number of them"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("diff", "MODEL", "nope"), 3, "nope: no such directory"),
        (("verify", "MODEL", "--for", "x"), 2, "--for x: unknown engine"),
        (("verify", "MODEL", "--key", "no.pub"), 3, "no.pub: No such file"),
        (("verify", "MODEL", "--source", "nope"), 3, "nope: no such directory"),
    ],
)
def test_what_is_typed_wrongly_is_refused_before_anything_is_imported(
    words, code, said, model, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("verify", "difference"):
        monkeypatch.setitem(sys.modules, f"quantforge.verification.{name}", None)
    ended = run_command(capsys, *(model if word == "MODEL" else word for word in words))
    assert ended.code == code
    assert said in ended.err


def test_a_directory_that_is_no_model_is_named_once(tmp_path: Path, capsys) -> None:
    ended = run_command(capsys, "verify", tmp_path)
    assert ended.code == 5
    assert "error: config.json: no config.json\n" in ended.out


def test_what_is_no_model_or_no_release_file_is_answered_with_what_to_type(
    model, tmp_path: Path, capsys
) -> None:
    (tmp_path / "test.txt").write_text("some words")
    ended = run_command(capsys, "eval", tmp_path / "test.txt", model)
    assert (ended.code, "--text FILE" in ended.err) == (3, True)
    ended = run_command(capsys, "release", model)
    assert (ended.code, "sets = [" in ended.err) == (3, True)
    (tmp_path / "broken.toml").write_text("a = [")
    ended = run_command(capsys, "release", tmp_path / "broken.toml")
    assert (ended.code, "sets = [" in ended.err) == (3, True)
    assert "recipes" not in ended.err
    assert "recipes" in run_command(capsys, "plan", model, "--recipe", tmp_path / "broken.toml").err


def test_the_plan_of_a_conversion_forecasts_no_memory_of_nothing(
    model, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "q"
    quick = ("--method", "rtn", "--scales", "absmax", "--bits", 4)
    assert run_command(capsys, "quantize", model, *quick, "-o", out).code == 0
    said = run_command(capsys, "export", out, "--format", "gptq", "--dry-run").out
    assert "above the imports" not in said
    assert "above the imports" in run_command(capsys, "plan", model, "--bits", 4).out
    assert display_path(Path("../x")) == "../x"
    assert display_path(Path("x")) == "./x"


def test_documents_hold_no_marks_of_a_markup(capsys) -> None:
    assert "`" not in run_command(capsys, "formats", "--json").out


def test_the_end_is_estimated_when_the_work_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of a start, then two percent a second: half of it is left after 24 s more."""
    now = [0.0]
    monkeypatch.setattr("quantforge.cli.progress_bar.time.monotonic", lambda: now[0])
    clock, told = Clock(0.0), {}
    for second in range(59):
        now[0] = float(second)
        told[second] = clock.remaining(Progress(share=0.02 * max(0, second - 9)))
    assert not [one for second, one in told.items() if second < 15 and one is not None]
    assert told[34] == pytest.approx(25)
    slow = Clock(now[0])
    assert slow.remaining(Progress(share=0.02)) is None
    now[0] += 61
    assert slow.remaining(Progress(share=0.05)) == pytest.approx(61 * 0.95 / 0.03)
    assert slow.remaining(Progress(share=0.05, waits=True)) is None


def test_a_plan_has_one_line_for_a_matrix_of_all_experts(tiny, capsys) -> None:
    said = run_command(
        capsys, "plan", tiny("qwen3-moe"), "--method", "rtn", "--scheme", "int4:g32"
    ).out
    lines = [line.split()[:2] for line in said.splitlines() if "experts" in line.split("  ")[0]]
    names = ("down_proj", "gate_proj", "up_proj")
    assert lines == [[f"layers.*.mlp.experts.*.{name}", "8"] for name in names]


def test_a_plan_joins_the_layers_of_a_tower(tiny, capsys) -> None:
    said = run_command(
        capsys, "plan", tiny("mistral3"), "--method", "rtn", "--scheme", "int4:g32"
    ).out
    tower = [line.split()[0] for line in said.splitlines() if line.startswith("vision_tower.")]
    assert "vision_tower.transformer.layers.*.attention.q_proj" in tower
    assert len(tower) == len(set(tower))
