"""What the verbs do around the work: required space, early refusals, and what they record."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from quantforge import api
from quantforge.api.export import find_loadable_format
from quantforge.architectures.configuration import untie_config
from quantforge.artifacts import manifest
from quantforge.artifacts.provenance import BILL, STATEMENT
from quantforge.artifacts.publish import describe_source
from quantforge.errors import InputError, IntegrityError, RefusedError, ResourceError, UsageError
from quantforge.files.output_names import MANIFEST_SUFFIX
from quantforge.files.reader import open_checkpoint
from quantforge.files.stage import Stage
from quantforge.model.hidden_states import OnDisk
from quantforge.progress import Progress
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.runs import copy_model, fast_recipe, file_digests, leftovers, quantize, recipe

GGUF = recipe(type="Q4_0", format="gguf", scales="absmax")
MEGABYTE = 2**20


def export(model: Path, out: Path | None, settings: Settings | None = None, **values: Any) -> Any:
    keywords = {
        key: values.pop(key) for key in ("allow_inexact", "source", "requantize") if key in values
    }
    return api.export(str(model), recipe(**values), out, settings or Settings(), **keywords)


@pytest.fixture(scope="module")
def quantized(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "q"
    quantize(tiny("llama-wide"), out, recipe(bits=8, scales="absmax"))
    return out


# ---- room


def required_space(work: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the free bytes that a verb requires before it begins."""
    requests: list[int] = []
    check = Stage.check_space

    def noted(stage: Stage, needed: int, *hint: str) -> None:
        requests.append(needed)
        check(stage, needed, *hint)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "check_space", noted)
        work()
    (needed,) = requests
    return needed


def size_of(out: Path) -> int:
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


@pytest.mark.parametrize("verb", ["quantize", "export"])
def test_required_space_matches_the_size_of_the_result(
    model: Path, quantized: Path, out: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Side files included, and not much more: a disk with room for the result is enough."""
    source = copy_model(model if verb == "quantize" else quantized, out.with_name("m"))
    (source / "LICENSE").write_bytes(b"terms\n" * (MEGABYTE // 2))

    def work() -> None:
        if verb == "quantize":
            quantize(source, out, recipe(scales="absmax"))
        else:
            export(source, out, format="gptq", allow_inexact=True)

    if verb == "export":
        (source / manifest.NAME).unlink()
    needed = required_space(work, monkeypatch)
    assert size_of(out) + MEGABYTE // 2 < needed < size_of(out) + MEGABYTE * 3 // 2


def test_required_space_includes_hidden_states_on_disk(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    write = OnDisk.write

    def noted(states: OnDisk, *arguments: Any) -> None:
        sizes.append(os.fstat(states._file._file.fileno()).st_size)
        write(states, *arguments)

    monkeypatch.setattr(OnDisk, "write", noted)
    outputs = [out.with_name(name) for name in ("a", "b", "c", "d")]
    memory = required_space(lambda: quantize(model, outputs[0], fast_recipe("gptq")), monkeypatch)
    plain = required_space(
        lambda: quantize(model, outputs[1], recipe(scales="absmax"), activations="disk"),
        monkeypatch,
    )
    assert not sizes
    disk = required_space(
        lambda: quantize(model, outputs[2], fast_recipe("gptq"), activations="disk"), monkeypatch
    )
    assert disk - memory == max(sizes) > 0
    assert plain == required_space(
        lambda: quantize(model, outputs[3], recipe(scales="absmax")), monkeypatch
    )


def test_planned_memory_includes_hidden_states(model: Path) -> None:
    requested = fast_recipe(
        "gptq", calibration=replace(recipe().calibration, samples=256, length=128)
    )
    memory = api.plan(str(model), requested)
    disk = api.plan(str(model), requested, Settings(activations="disk"))
    assert memory.peak_memory_bytes > disk.peak_memory_bytes
    assert memory.tensors == disk.tensors


# ---- before the work


def assert_planning(done: Progress) -> None:
    assert done.phase == "planning", "work was done"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("m.Modelfile", {"modelfile": True}),
        (f"m.gguf.{STATEMENT}", {"provenance": True}),
        (f"m.gguf.{BILL}", {"provenance": True}),
        ("m.gguf.sig", {}),
        (f"m.gguf{MANIFEST_SUFFIX}", {}),
    ],
)
def test_existing_side_files_are_refused_before_work(
    model: Path, tmp_path: Path, name: str, settings: dict[str, bool]
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(RefusedError, match=name):
        quantize(model, tmp_path / "m.gguf", GGUF, progress=assert_planning, **settings)
    assert (tmp_path / name).read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {name}


def test_side_files_that_will_not_be_written_do_not_block(model: Path, tmp_path: Path) -> None:
    for name in ("m.Modelfile", f"m.gguf.{STATEMENT}", f"m.gguf.{BILL}"):
        (tmp_path / name).write_text("mine")
    quantize(model, tmp_path / "m.gguf", GGUF)
    assert (tmp_path / "m.Modelfile").read_text() == "mine"


def test_modelfile_needs_a_gguf_output(model: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="Ollama reads GGUF"):
        quantize(model, out, recipe(), modelfile=True, progress=assert_planning)
    assert leftovers(out) == set()
    quantize(model, out.with_name("m.gguf"), GGUF, modelfile=True)
    assert "m.gguf" in out.with_name("m.Modelfile").read_text()


def test_the_requested_number_of_threads_is_set(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noted and not set: a process with a pool of threads cannot be forked by other tests."""
    thread_counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", thread_counts.append)
    quantize(model, out, recipe(scales="absmax"), threads=3)
    assert 3 in thread_counts


def test_a_side_file_changed_before_its_copy_is_detected(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copy_model(model, out.with_name("m"))
    module = import_module("quantforge.api.job")
    real = module.digest_source

    def then_edited(*arguments: Any) -> Any:
        digests = real(*arguments)
        (source / "tokenizer_config.json").write_text("{}")
        return digests

    monkeypatch.setattr(module, "digest_source", then_edited)
    with pytest.raises(IntegrityError, match="tokenizer_config"):
        quantize(source, out, recipe(scales="absmax"))
    assert not out.exists()


# ---- the same command again


def finish_before_cleanup(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> None:
    """Leave a result as after a kill right after its publication: its journal still exists."""

    def killed(_work: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("quantforge.execution.journal.Journal.remove", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(model, out, recipe(scales="absmax"), **settings)


def test_only_the_identical_command_accepts_a_finished_result(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_before_cleanup(model, out, monkeypatch)
    source = copy_model(model, out.with_name("m"))
    (source / "LICENSE").write_text("other terms")
    for other, requested in (
        (source, recipe(scales="absmax")),
        (model, recipe(bits=8, scales="absmax")),
    ):
        with pytest.raises(RefusedError, match="exists"):
            quantize(other, out, requested)
    journal = out.parent / ".out.qf/journal"
    assert journal.is_dir()
    (out.parent / ".out.qf/stage").mkdir()  # of a run that goes on: not the end of that one
    with pytest.raises(RefusedError, match="exists"):
        quantize(model, out, recipe(scales="absmax"))


def test_a_result_without_its_journal_is_refused(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_before_cleanup(model, out, monkeypatch)
    shutil.rmtree(out.parent / ".out.qf/journal")
    with pytest.raises(RefusedError, match="exists"):
        quantize(model, out, recipe(scales="absmax"))


def test_overwrite_of_a_finished_result_keeps_foreign_files(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_before_cleanup(model, out, monkeypatch)
    (out / "notes").write_text("mine")
    with pytest.raises(RefusedError, match="notes"):
        quantize(model, out, recipe(scales="absmax"), overwrite=True)


def test_a_manifest_of_an_older_schema_is_refused(model: Path, out: Path) -> None:
    quantize(model, out, recipe(scales="absmax"))
    path = out / "quantforge.manifest.json"
    document = json.loads(path.read_text())
    assert document["schema"] == "quantforge.manifest/2"
    path.write_text(json.dumps(document | {"schema": "quantforge.manifest/1"}))
    before, message = (
        file_digests(out),
        r"has schema quantforge\.manifest/1, and this version of quantforge",
    )
    with pytest.raises(RefusedError, match=message):
        quantize(model, out, recipe(scales="absmax"), overwrite=True)
    with pytest.raises(InputError, match=message):
        api.reproduce(str(out), str(model))
    findings = api.verify(out, model, forward=False).findings
    assert "quantforge.manifest/1" in next(
        finding.detail for finding in findings if finding.check == "manifest"
    )
    assert file_digests(out) == before


# ---- what is passed on


def test_an_export_records_its_lineage(quantized: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    export(quantized, first, format="gptq", allow_inexact=True)
    export(first, second, allow_inexact=True)
    documents = [manifest.read_manifest(path) or {} for path in (quantized, first, second)]
    assert (
        documents[1]["lineage"].keys()
        == {"source", "method", "recipe", "calibration", "format", "event_counts"}
        & documents[0].keys()
    )
    for document, earlier in zip(documents[1:], documents, strict=False):
        assert all(document["lineage"][key] == earlier[key] for key in document["lineage"])
    assert documents[2]["lineage"]["lineage"] == documents[1]["lineage"]
    stranger = copy_model(quantized, tmp_path / "m")
    (stranger / manifest.NAME).unlink()
    export(stranger, tmp_path / "third", format="gptq", allow_inexact=True)
    assert (manifest.read_manifest(tmp_path / "third") or {})["lineage"] == {}


def test_the_hub_revision_of_the_source_is_recorded(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name/snapshots" / ("a1" * 20)
    snapshot.parent.mkdir(parents=True)
    described = describe_source(open_checkpoint(copy_model(model, snapshot)))
    assert (described["model"], described["revision"]) == ("org/name", "a1" * 20)
    assert "revision" not in describe_source(open_checkpoint(model))
    assert set(described["files"]) == {path.name for path in snapshot.iterdir()}


def test_engine_formats_apply_to_quantized_models_only(model: Path, quantized: Path) -> None:
    assert find_loadable_format(str(model), "vllm", 1) is None
    assert find_loadable_format(str(quantized), "vllm", 1) == "compressed-tensors"


def test_export_requantizes_only_on_request(quantized: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    target = {"type": "Q4_0", "format": "gguf"}
    with pytest.raises(RefusedError, match="second quantization"):
        export(quantized, out, **target)
    assert not list(tmp_path.iterdir())
    done = export(quantized, out, **target, requantize=True)
    assert [event.kind for event in done.events].count("requantized") == 1
    again = export(quantized, tmp_path / "n.gguf", **target, source=str(model))
    assert "requantized" not in {event.kind for event in again.events}


def test_export_of_an_unquantized_model_copies_or_quantizes(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "plain", format="plain")
    export(model, tmp_path / "packed", format="compressed-tensors", bits=8, scales="absmax")
    config = {
        name: json.loads((tmp_path / name / "config.json").read_text())
        for name in ("plain", "packed")
    }
    assert "quantization_config" not in config["plain"]
    assert config["packed"]["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_an_index_is_written_for_several_files(model: Path, out: Path, shards: int) -> None:
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    export(model, out, format="plain", max_shard_bytes=size * 6 // (5 * shards))
    files = {path.name for path in out.glob("*.safetensors")}
    index = out / "model.safetensors.index.json"
    assert len(files) == shards
    assert index.exists() == (shards > 1)
    if shards > 1:
        assert set(json.loads(index.read_text())["weight_map"].values()) == files


@pytest.mark.parametrize("suffix", ["", ".gguf"])
def test_provenance_files_lie_in_or_beside_the_result(
    model: Path, tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / f"m{suffix}"
    quantize(model, out, GGUF if suffix else recipe(), provenance=True)
    prefix = tmp_path / "m.gguf." if suffix else out / "_"
    for name in (STATEMENT, BILL):
        assert Path(str(prefix).removesuffix("_") + name).is_file()


def test_nested_configurations_are_untied_too() -> None:
    config = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True, "a": 1}}
    assert untie_config(config) == {
        "tie_word_embeddings": False,
        "text_config": {"tie_word_embeddings": False, "a": 1},
    }


def test_a_quantized_head_unties_the_configuration(tiny: Tiny, tmp_path: Path) -> None:
    quantize(tiny("llama-tied"), tmp_path / "own", recipe(lm_head="int8:g32:sym", scales="absmax"))
    quantize(tiny("llama-tied"), tmp_path / "tied", recipe(scales="absmax"))
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("own", "tied")
    ]
    assert [config["tie_word_embeddings"] for config in configs] == [False, True]


def test_too_little_space_is_refused_before_an_export(
    quantized: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantforge.files.stage.free_bytes", lambda _: 1000)
    with pytest.raises(ResourceError):
        export(quantized, out, format="gptq", allow_inexact=True)
    assert leftovers(out) == set()


def test_diff_of_an_exact_export_finds_nothing(model, tmp_path):
    quantize(model, tmp_path / "q", recipe(scheme="int4:g32:sym", scales="absmax"))
    api.export(tmp_path / "q", None, tmp_path / "mlx", format="mlx")
    difference = api.diff(tmp_path / "q", tmp_path / "mlx")
    assert (difference.equal, difference.files) == (True, [])
    config = tmp_path / "mlx/config.json"
    document = json.loads(config.read_text())
    config.write_text(json.dumps({**document, "bos_token_id": 7}))
    assert api.diff(tmp_path / "q", tmp_path / "mlx").files == ["config.json"]


def test_exporting_gguf_to_gguf_is_refused(model, tmp_path):
    path = tmp_path / "m.gguf"
    quantize(model, path, recipe(type="Q4_K_M", format="gguf", scales="absmax"))
    with pytest.raises(RefusedError, match="of that format already") as refused:
        api.export(path, None, tmp_path / "n.gguf", format="gguf")
    assert "use it as it is" in refused.value.hint
    assert not (tmp_path / "n.gguf").exists()
