"""What a person who comes from elsewhere types first is answered with what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantforge.checkpoint.disk import no_space
from quantforge.cli.release import _place
from quantforge.errors import InputError, nearest
from quantforge.formats.gguf.mixture import MIXTURES
from quantforge.formats.targets import placed
from quantforge.notation import share_of
from quantforge_calibration.hub_datasets import read_hub
from quantforge_calibration.source_error import SourceError
from tests.runs import command, copied


def test_all_names_that_are_equally_near_are_told() -> None:
    assert nearest("Q4_K_N", MIXTURES) == "did you mean 'Q4_K_S' or 'Q4_K_M'?"
    assert nearest("itn4", ["int2", "int3", "int4"]) == "did you mean 'int4'?"


def test_models_inside_of_a_directory_that_is_none_are_named(model, tmp_path: Path, capsys) -> None:
    for name in ("b", "a"):
        copied(model, tmp_path / name)
    (tmp_path / "c.gguf").touch()
    (tmp_path / "other").mkdir()
    ended = command(capsys, "plan", tmp_path, "--bits", "4")
    assert ended.code == 3
    inside = " or ".join(str(tmp_path / name) for name in ("a", "b", "c.gguf"))
    assert f"hint: a model is inside: {inside}\n" in ended.err
    (tmp_path / "other" / "adapter_config.json").touch()
    ended = command(capsys, "quantize", tmp_path / "other", "--bits", "4")
    assert ended.code == 3
    assert (
        f"hint: it is an adapter: quantforge quantize BASE --adapter {tmp_path}/other\n"
        in ended.err
    )


def test_a_type_beside_bits_is_refused_as_it_was_typed(model, capsys) -> None:
    for option, value in (("--bits", "4"), ("--scheme", "int4:g32")):
        ended = command(capsys, "plan", model, "--type", "q4_k_m", option, value)
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
    ended = command(capsys, "plan", typed, "--bits", "4")
    assert ended.code == 3
    assert "hint: acme/wren, or where there is a network" in ended.err
    assert "hf download acme/wren --local-dir wren" in ended.err


def test_a_split_of_the_hub_keeps_its_column() -> None:
    with pytest.raises(SourceError) as caught:
        list(read_hub("wiki:train:body", "train", "body", chat=False, offline=True))
    assert caught.value.hint.endswith("give DIR:train:body")


def test_a_release_has_a_place_of_its_own(tmp_path: Path, capsys) -> None:
    assert [str(_place(Path(name))) for name in ("x/release.toml", "demo.toml")] == [
        "release",
        "demo-release",
    ]
    assert command(capsys, "release", tmp_path / "no.toml").code == 3


def test_a_file_that_an_engine_reads_a_name_from_is_said_to_lie_there() -> None:
    note = "serve it with: printf 'FROM OUT' > Modelfile"
    assert "FROM ./x.gguf" in placed(note, "x.gguf")
    assert "FROM /a/x.gguf" in placed(note, "/a/x.gguf")


def test_bytes_that_do_not_fit_have_a_unit(tmp_path: Path) -> None:
    assert "(2.5 GB, " in no_space(tmp_path, 2_500_000_000, "full").message


def test_the_script_of_a_shell_that_is_not_there_is_only_printed(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    ended = command(capsys, "--install-completion", "powershell")
    assert ended.code == 3
    assert "quantforge --show-completion powershell" in ended.err
    assert "Register-ArgumentCompleter" in command(capsys, "--show-completion", "powershell").out


def test_a_number_in_place_of_a_share_is_told_from_one() -> None:
    with pytest.raises(InputError) as caught:
        share_of("2", "prune_experts")
    assert caught.value.hint == "a share, 25% or 0.25; not a number of them"
