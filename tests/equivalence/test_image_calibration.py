"""Calibration on rows with images: from files to the last block, as transformers' processor and model make it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantforge.api import allocate
from quantforge.errors import InputError, IntegrityError, QuantForgeError
from quantforge.model.model_parts import block_list_name
from quantforge.model.stream import ModelStream
from quantforge.recipe import CalibrationOptions
from quantforge_calibration import SourceError
from quantforge_calibration.chat import load_chat_template
from quantforge_calibration.draw import RowRequest, draw
from quantforge_calibration.image_documents import read_image
from quantforge_calibration.row_processor import IDS, load_processor
from quantforge_calibration.tokenizer import load_tokenizer
from tests.equivalence.test_stream import opened, whole_model
from tests.runs import (
    StopError,
    crash_after,
    fast_recipe,
    file_digests,
    quantize,
    recipe,
    run_command,
)
from tests.thorough import mark_others_thorough
from tests.vision import (
    GEMMA,
    IMAGE,
    IMAGE_MARKERS,
    QWEN,
    QWEN3,
    draw_image,
    make_vision,
    write_rows,
)

FAMILIES = (GEMMA, QWEN, QWEN3)
SCHEME = "int4:g16:sym"
LENGTH = 64


@pytest.fixture(scope="module", params=mark_others_thorough(FAMILIES, GEMMA))
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(family, tmp_path_factory.mktemp(family))


def rows_file(folder: Path, family: str, seed: int = 0) -> Path:
    """Write documents: images in texts, a text alone, an image in messages."""
    place = IMAGE_MARKERS[family]
    for number in range(4):
        draw_image(folder / "images" / f"{number}.png", seed + number)
    rows: list[dict[str, Any]] = [
        {"text": f"the weights {place} of picture {number}", "image": f"images/{number}.png"}
        for number in range(3)
    ]
    rows.insert(1, {"text": "only words, rounded to the nearest point of the grid"})
    part = {"type": "image", "path": "images/3.png"}
    talk = [{"role": "user", "content": [part, {"type": "text", "text": "what is it"}]}]
    return write_rows(folder / "rows.jsonl", *rows, {"messages": talk})


def options(file: Path, **values: Any) -> CalibrationOptions:
    given = {"samples": 2, "length": LENGTH, "micro_batch": 2, "chat_template": True, **values}
    return CalibrationOptions(source=str(file), **given)


def test_files_reach_the_blocks_as_transformers_hands_them_over(
    family: str, model: Path, tmp_path: Path
) -> None:
    file = rows_file(tmp_path, family)
    request = RowRequest(source=str(file), rows=2, length=LENGTH)
    sample = draw(request, load_tokenizer(model), chat=load_chat_template(model), model=model)
    assert sample.images is not None
    assert sample.ids.shape == (2, LENGTH)
    assert sample.images.count >= 2
    assert int((sample.ids == IMAGE).sum()) == 4 * sample.images.count
    whole = whole_model(model)
    last: list[torch.Tensor] = []
    whole.get_submodule(block_list_name(whole))[-1].register_forward_hook(
        lambda _, __, out: last.append(out if isinstance(out, torch.Tensor) else out[0])
    )
    processor = load_processor(model, "a row")
    for row in sample.images.rows:
        assert row is not None
        pictures = [read_image(path, "a row") for path in row.images]
        given = dict(processor._processor(text=[row.text], images=[pictures], return_tensors="pt"))
        tokens = given[IDS].shape[1]
        cut = {
            name: value[:, :LENGTH] if value.shape[:2] == (1, tokens) else value
            for name, value in given.items()
        }
        whole(**cut)  # its attention mask included
    checkpoint, model_layout = opened(model)
    with (
        torch.inference_mode(),
        ModelStream(checkpoint, model_layout, sample, micro_batch=2) as stream,
    ):
        for part in stream:
            part.advance()
        assert torch.equal(stream._states.read(0, 2), torch.cat(last))
    draw_image(tmp_path / "images" / "0.png", 77)
    with (
        ModelStream(checkpoint, model_layout, sample) as stream,
        pytest.raises(InputError, match="calibration row 0 changed meanwhile"),
    ):
        stream.embed()


def test_gptq_rounds_by_what_the_images_show(family: str, model: Path, tmp_path: Path) -> None:
    found = {}
    for name, seed in (("one", 0), ("two", 100), ("again", 0)):
        file = rows_file(tmp_path / name, family, seed)
        wanted = fast_recipe("gptq", calibration=options(file), scheme=SCHEME)
        quantize(model, tmp_path / name / "q", wanted)
        found[name] = load_file(tmp_path / name / "q" / "model.safetensors")
    assert all(torch.equal(found["one"][key], value) for key, value in found["again"].items())
    differ = [
        key for key, value in found["two"].items() if not torch.equal(found["one"][key], value)
    ]
    assert any("weight_packed" in key for key in differ)
    assert not any("vis" in key for key in differ)
    for name in ("processor_config.json", "preprocessor_config.json"):
        assert (tmp_path / "one" / "q" / name).read_bytes() == (model / name).read_bytes()
    manifest = json.loads((tmp_path / "one" / "q" / "quantforge.manifest.json").read_text())
    told = json.dumps(manifest["calibration"])
    assert '"images": ' in told
    assert str(tmp_path) not in told


def test_gradients_go_back_through_rows_with_images(
    family: str, model: Path, tmp_path: Path
) -> None:
    found = {}
    choices = {
        GEMMA: {"tune": 1},
        QWEN: {"guided_hessians": 1},
        QWEN3: {"guided_hessians": 1, "tune": 1},
    }[family]
    for name, seed in (("one", 0), ("two", 100)):
        file = rows_file(tmp_path / name, family, seed)
        wanted = fast_recipe("gptq", calibration=options(file), scheme=SCHEME, **choices)
        quantize(model, tmp_path / name / "q", wanted)
        found[name] = load_file(tmp_path / name / "q" / "model.safetensors")
    differ = {key for key, one in found["one"].items() if not torch.equal(one, found["two"][key])}
    assert any("layers.0." in key and "weight_packed" in key for key in differ)


def test_bits_are_allocated_by_rows_with_images(family: str, model: Path, tmp_path: Path) -> None:
    file = rows_file(tmp_path, family)
    wanted = fast_recipe("gptq", calibration=options(file), scheme=None)
    schemes = (SCHEME, "int8:g16:sym")
    made = allocate(model, "6bpw", tmp_path / "r.toml", wanted, candidates=schemes)
    quantize(model, tmp_path / "q", made.recipe)


def test_a_run_with_images_goes_on_and_refuses_images_that_changed(
    family: str, model: Path, tmp_path: Path
) -> None:
    file = rows_file(tmp_path, family)
    method = "awq+gptq" if family == QWEN else "gptq"
    wanted = fast_recipe(method, calibration=options(file), scheme=SCHEME)
    quantize(model, tmp_path / "whole", wanted, activations="disk")
    with pytest.raises(StopError):
        quantize(model, tmp_path / "again", wanted, progress=crash_after("block 0"))
    draw_image(tmp_path / "images" / "0.png", 77)
    with pytest.raises(IntegrityError, match="calibration"):
        quantize(model, tmp_path / "again", wanted)
    draw_image(tmp_path / "images" / "0.png", 0)
    quantize(model, tmp_path / "again", wanted)
    assert file_digests(tmp_path / "again") == file_digests(tmp_path / "whole")


def changed(model: Path, folder: Path, family: str) -> tuple[Path, Path]:
    """Return a copy of a model, and its rows."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    return copy, rows_file(folder, family)


def refusal(model: Path, file: Path, **values: Any) -> str:
    """Return how a run is refused; it leaves nothing."""
    wanted = recipe("gptq", calibration=options(file, **values), scheme=SCHEME)
    with pytest.raises(QuantForgeError) as refused:
        quantize(model, file.parent / "q", wanted)
    assert refused.value.hint
    assert not (file.parent / "q").exists()
    return f"{refused.value.message}; {refused.value.hint}"


def test_what_lacks_is_named_with_its_row(family: str, model: Path, tmp_path: Path) -> None:
    copy, file = changed(model, tmp_path, family)
    place = IMAGE_MARKERS[family]
    write_rows(file, {"text": f"a {place}", "image": "images/9.png"})
    assert "rows.jsonl, line 1: image" in (said := refusal(copy, file, samples=1))
    assert "No such file" in said
    write_rows(file, {"text": f"{place} {place}", "image": "images/1.png"})
    assert "line 1: 1 image(s), and its text has" in (said := refusal(copy, file, samples=1))
    assert f"write {place} where an image belongs" in said
    write_rows(file, {"text": f"{'words ' * LENGTH} {place}", "image": "images/1.png"})
    assert "line 1: its images end with token" in (said := refusal(copy, file, samples=1))
    assert "--length" in said
    write_rows(file, {"text": f"a {place}", "image": "images/1.png"})
    assert "--samples 1" in refusal(copy, file, samples=3)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (copy / name).unlink()
    assert "has no processor" in (said := refusal(copy, file, samples=1))
    assert "copy the processor files" in said


def test_code_of_a_processor_is_never_run(tmp_path: Path) -> None:
    model, file = make_vision(QWEN, tmp_path / "model"), rows_file(tmp_path, QWEN)
    (model / "evil.py").write_text("raise SystemExit('run')")
    named = {"processor_class": "Evil", "auto_map": {"AutoProcessor": "evil.Evil"}}
    (model / "processor_config.json").write_text(json.dumps(named))
    assert "transformers has no processor Evil" in refusal(model, file)


def test_a_model_without_a_tower_is_given_no_images(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows_file(tmp_path, QWEN)
    said = refusal(tiny("llama"), file)
    assert f"{file}, line 1 names an image, and llama has no tower that reads any" in said
    ended = run_command(capsys, "plan", tiny("llama"), "--method", "gptq", "--calibration", file)
    assert ended.code == 3
    assert "has no tower that reads any" in ended.err


def test_a_plan_counts_the_towers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = make_vision(QWEN, tmp_path / "model"), rows_file(tmp_path, QWEN)
    text = write_rows(tmp_path / "text.jsonl", {"text": "the weights of the model " * 60})
    peaks = {}
    for source in (text, file):
        ended = run_command(
            capsys, "plan", model, "--method", "gptq", "--scheme", SCHEME, "--calibration", source,
            "--samples", 2, "--length", LENGTH, "--chat-template", "--json",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        plan = json.loads(ended.out)
        peaks[source] = plan["peak_memory_bytes"]
        assert ("run once for each row" in ended.out) is (source == file)
    assert peaks[file] > peaks[text]


def test_texts_beside_images_have_rows_of_their_own(tmp_path: Path) -> None:
    model, file = make_vision(GEMMA, tmp_path / "model"), rows_file(tmp_path, GEMMA)
    source = f"{file}=1,builtin=1"
    wanted = replace(options(file), source=source)
    quantize(model, tmp_path / "q", recipe("gptq", calibration=wanted, scheme=SCHEME))
    with pytest.raises(SourceError, match=r"line 5 holds chat messages .*"):
        draw(RowRequest(source=source, rows=8, length=LENGTH), load_tokenizer(model), model=model)
