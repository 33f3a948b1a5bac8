"""Reading a model directory: configuration, shard index, side files and links; malformed input is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantforge.errors import InputError
from quantforge.files.finite_values import check_finite
from quantforge.files.reader import open_checkpoint
from tests.thorough import parametrize_each_value

WREN = Path(__file__).parents[4] / "shared/models/wren"
INDEX = "model.safetensors.index.json"
CONFIG = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "dtype": "bfloat16"}


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), float(number)) for number, name in enumerate(names)}


@pytest.fixture(scope="module")
def audited() -> deque[str]:
    """Return the files that this process opened last; an audit hook cannot be removed."""
    names: deque[str] = deque(maxlen=100)
    sys.addaudithook(lambda event, args: names.append(str(args[0])) if event == "open" else None)
    return names


@pytest.fixture
def opened(audited: deque[str]) -> deque[str]:
    audited.clear()
    return audited


@pytest.fixture
def single(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors("b", "a"), model / "model.safetensors")
    return model


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors("a", "b"), model / "model-00001-of-00002.safetensors")
    save_file(tensors("c"), model / "model-00002-of-00002.safetensors")
    write_index(model, a=1, b=1, c=2)
    return model


def write_index(model: Path, **shards: int | str) -> None:
    weight_map = {
        name: f"model-{where:05}-of-00002.safetensors" if isinstance(where, int) else where
        for name, where in shards.items()
    }
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal_message(model: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(model)
    assert caught.value.hint
    assert caught.value.message.isprintable()
    return caught.value.message


def test_a_single_file_model_is_opened(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    assert checkpoint.path == single
    assert checkpoint.config == CONFIG
    assert list(checkpoint.entries) == ["a", "b"]
    assert checkpoint.shards == (single / "model.safetensors",)
    assert (checkpoint.side_files, checkpoint.card) == ((), None)
    assert checkpoint.read("a").tolist() == [[1.0] * 3] * 2
    assert checkpoint.read_rows("b", 1, 2).tolist() == [[0.0] * 3]


def test_a_sharded_model_is_opened(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert {name: entry.file.name for name, entry in checkpoint.entries.items()} == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    assert [shard.name for shard in checkpoint.shards] == sorted(
        {e.file.name for e in checkpoint.entries.values()}
    )


def test_opening_imports_no_torch(sharded: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from quantforge.files import hub, reader, stage, writer\n"
        f"checkpoint = reader.open_checkpoint(Path({str(sharded)!r}))\n"
        "planned = writer.plan_shards([e.to_stored_tensor() for e in checkpoint.entries.values()], 30)\n"
        "assert len(planned) == 3 and checkpoint.dtype == 'BF16'\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & sys.modules.keys()\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not WREN.exists(), reason="the shared models are not here")
def test_a_real_model_is_opened() -> None:
    checkpoint = open_checkpoint(WREN)
    assert checkpoint.dtype == "BF16"
    names = [path.name for path in checkpoint.side_files]
    assert names == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in checkpoint.entries:
        check_finite(name, checkpoint.read(name))


# --- the index, both ways -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors", "/etc/passwd", "C:\\x.safetensors", "C:x.safetensors",
        "\\\\host\\share\\x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "",
        "x.safetensors\0", "x.safetensors\n", ".hidden.safetensors", "x.bin",
        "x.safetensors:stream",
    ],
)  # fmt: skip
def test_names_outside_of_the_directory_are_refused(
    sharded: Path, opened: deque[str], name: str
) -> None:
    save_file(tensors("c"), sharded.parent / "other.safetensors")
    write_index(sharded, a=1, b=1, c=name)
    opened.clear()
    assert "is not the name of a file beside it" in refusal_message(sharded)
    assert [path.rpartition("/")[2] for path in opened] == ["config.json", INDEX]


def test_all_index_errors_are_listed_at_once(sharded: Path) -> None:
    save_file(tensors("a", "d"), sharded / "model-00002-of-00002.safetensors")
    save_file(tensors("e"), sharded / "extra.safetensors")
    write_index(sharded, a=1, b=1, c=2, g="gone.safetensors")
    message = refusal_message(sharded)
    for problem in (
        "'extra.safetensors' is not in the index",
        "gone.safetensors: No such file",
        "tensor 'a' is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors",
        "tensor 'd' of model-00002-of-00002.safetensors is not in the index",
        "tensor 'c' is not in model-00002-of-00002.safetensors, where the index puts it",
    ):
        assert problem in message


def test_a_long_list_of_index_errors_is_truncated(sharded: Path) -> None:
    shards = {f"t{n}": 1 for n in range(1000)}
    write_index(sharded, a=1, b=1, c=2, **shards)
    message = refusal_message(sharded)
    assert "and 980 more" in message
    assert len(message) < 5000


def test_a_damaged_shard_is_listed_among_index_errors(sharded: Path) -> None:
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "model-00002-of-00002.safetensors: tensor 'c': ends at" in refusal_message(sharded)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "weight_map is not a table"),
        ('{"weight_map": []}', "weight_map is not a table"),
        ('{"weight_map": {}}', "weight_map is not a table"),
        ('{"weight_map": {"a": 1}}', "weight_map is not a table"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' occurs twice"),
        ("[" * 200_000, "nested deeper than"),
        ("[]", "not a JSON object"),
    ],
)
def test_malformed_shard_indexes_are_refused(sharded: Path, content: str, words: str) -> None:
    (sharded / INDEX).write_text(content)
    assert words in refusal_message(sharded)


def test_stale_or_unsupported_weight_files_are_refused(single: Path) -> None:
    weights = single / "model.safetensors"
    save_file(tensors("x"), single / "stale.safetensors")
    assert "['stale.safetensors'] beside model.safetensors" in refusal_message(single)
    (single / "stale.safetensors").unlink()
    weights.rename(single / "consolidated.safetensors")
    assert "neither model.safetensors nor" in refusal_message(single)
    (single / "consolidated.safetensors").rename(single / "other.safetensors")
    assert "found 'other.safetensors'" in refusal_message(single)
    (single / "other.safetensors").rename(single / "x.gguf")
    assert "found 'x.gguf'" in refusal_message(single)
    save_file({}, weights)
    assert "holds no tensors" in refusal_message(single)


def test_consolidated_safetensors_are_ignored(single: Path) -> None:
    save_file(tensors("layers.0.w"), single / "consolidated.safetensors")
    assert list(open_checkpoint(single).entries) == ["a", "b"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_a_hint(single: Path, name: str) -> None:
    (single / "model.safetensors").rename(single / name)
    with pytest.raises(InputError, match="pickle can run code and is never read") as caught:
        open_checkpoint(single)
    assert name in caught.value.message
    assert "save_pretrained" in caught.value.hint


# --- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
        (b'{"a": "\xe9"}', "not UTF-8 at byte 7"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
        (b'{"rope_theta": NaN}', "NaN is not a JSON number"),
        (b'{"rope_theta": 1e400}', "1e400 is too large"),
        (b'{"a": "\\udc00"}', "surrogate"),
        (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "nested deeper than 64"),
        (b'{"a": ' * 100_000, "nested deeper than 64"),
        (b'{"hidden_size": "32"}', "hidden_size = '32' is not a size"),
        (b'{"hidden_size": -32}', "hidden_size = -32 is not a size"),
        (b'{"hidden_size": 32.5}', "is not a size"),
        (b'{"hidden_size": true}', "is not a size"),
        (b'{"vocab_size": 1000000000000}', "vocab_size = 1000000000000 is not a size"),
        (b'{"num_hidden_layers": 10000000}', "but the model holds only 2 tensors"),
        (b'{"text_config": {"num_hidden_layers": 10000000}}', "holds only 2 tensors"),
        (b'{"intermediate_size": [8, 0]}', "intermediate_size = 0"),
        (b" " * (64 * 2**20) + b"{}", "bytes, more than"),
    ],
    ids=lambda value: value[:30].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_malformed_configurations_are_refused(single: Path, content: bytes, words: str) -> None:
    (single / "config.json").write_bytes(content)
    assert words in refusal_message(single)


def test_infinite_numbers_are_read_in_either_spelling(single: Path) -> None:
    content = b'{"time_step_limit": [0.0, Infinity], "least": -Infinity}'
    (single / "config.json").write_bytes(content)
    assert open_checkpoint(single).config == {
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "least": {"__float__": "-Infinity"},
    }


def test_unusual_valid_json_configurations_are_read(single: Path) -> None:
    content = '{"x":\r\n [1e-5, -3, "\\ud83d\\ude00", "é", null], "intermediate_size": [8, 9]}\r\n'
    (single / "config.json").write_bytes(content.encode())
    assert open_checkpoint(single).config["x"] == [1e-5, -3, "\U0001f600", "é", None]


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "F16"),
        ({"torch_dtype": "torch.bfloat16"}, "BF16"),
        ({"text_config": {"torch_dtype": "float16"}}, "F16"),
        ({"dtype": "auto"}, "F32"),
        ({}, "F32"),
    ],
)
def test_the_model_dtype_comes_from_config_or_tensors(
    single: Path, config: dict[str, object], dtype: str
) -> None:
    save_file(
        {"big": torch.zeros(9), "x": torch.zeros(4).bfloat16(), "y": torch.zeros(4).bfloat16(),
         "codes": torch.zeros(99, dtype=torch.int32)},
        single / "model.safetensors",
    )  # fmt: skip
    (single / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(single).dtype == dtype


# --- side files and links -------------------------------------------------------------------------


def test_side_files_and_card_are_selected(single: Path) -> None:
    carried = {
        "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md", "added_tokens.json",
        "additional_chat_templates/rag.jinja", "chat_template.jinja", "chat_template.json",
        "generation_config.json", "licence.txt", "merges.txt", "preprocessor_config.json",
        "processor_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
        "tokenizer.model.v3", "tokenizer_config.json", "vocab.json",
    }  # fmt: skip
    left = {
        "modeling_x.py", "pytorch_model.bin", "run.exe", "training_args.bin", "notes.txt",
        "LICENSE.py", "additional_chat_templates/x.py", "original/tokenizer.model", ".gitattributes",
        "quantize_config.json", "tokenizer.py",
    }  # fmt: skip
    for name in carried | left | {"README.md"}:
        (single / name).parent.mkdir(exist_ok=True)
        (single / name).write_text("x")
    checkpoint = open_checkpoint(single)
    assert [path.relative_to(single).as_posix() for path in checkpoint.side_files] == sorted(
        carried
    )
    assert checkpoint.card == single / "README.md"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "LICENSE", "README.md"])
def test_links_out_of_the_model_are_refused(single: Path, name: str) -> None:
    (single.parent / "secret").write_bytes(
        (single / name).read_bytes() if (single / name).exists() else b"secret"
    )
    (single / name).unlink(missing_ok=True)
    (single / name).symlink_to("../secret")
    assert "is a link to" in refusal_message(single)
    (single / name).unlink()
    (single / name).symlink_to(name)
    assert "symbolic links" in refusal_message(single)
    (single / name).unlink()
    (single / name).symlink_to("nothing")
    assert "No such file" in refusal_message(single)
    (single / name).unlink()
    os.mkfifo(single / name)
    assert "not a regular file" in refusal_message(single)
    (single / name).unlink()
    (single / name).symlink_to("/dev/zero")
    assert "is a link to /dev/zero" in refusal_message(single)


def test_a_directory_in_place_of_a_file_is_refused(single: Path) -> None:
    (single / "config.json").unlink()
    (single / "config.json").mkdir()
    assert "not a regular file" in refusal_message(single)


def test_a_linked_folder_of_templates_is_refused(single: Path) -> None:
    (single.parent / "outside").mkdir()
    (single.parent / "outside/x.jinja").write_text("secret")
    (single / "additional_chat_templates").symlink_to("../outside")
    assert "is a link to" in refusal_message(single)


def test_a_file_name_with_a_line_break_is_refused(single: Path) -> None:
    (single / "LICENSE\n\x1b[31m").write_text("x")
    assert r"'LICENSE\n\x1b[31m' is no name" in refusal_message(single)


def test_links_inside_of_the_model_are_followed(single: Path) -> None:
    (single / "model.safetensors").rename(single / "data")
    (single / "model.safetensors").symlink_to("data")
    (single / "LICENSE").write_text("x")
    (single / "LICENSE.txt").symlink_to("LICENSE")
    checkpoint = open_checkpoint(single)
    assert [path.name for path in checkpoint.side_files] == ["LICENSE", "LICENSE.txt"]
    assert checkpoint.read("a").sum() == 6


def test_a_hub_snapshot_links_to_its_blobs_and_to_no_others(single: Path) -> None:
    repo = single.parent / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    (repo / "blobs").mkdir(parents=True)
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (single / "additional_chat_templates").mkdir()
    (single / "additional_chat_templates/x.jinja").write_text("x")
    for name in ("config.json", "model.safetensors", "additional_chat_templates/x.jinja"):
        blob = repo / "blobs" / name.replace("/", "_")
        (single / name).rename(blob)
        (snapshot / name).symlink_to(blob)
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.read("a").sum() == 6
    assert len(checkpoint.side_files) == 1
    assert str(snapshot) in str(checkpoint.shards[0]), "messages name the file, not the blob"
    link = single.parent / "link"
    link.symlink_to(snapshot)
    assert open_checkpoint(link).read("a").sum() == 6
    other = single.parent / "models--org--other/blobs"
    other.mkdir(parents=True)
    (other / "LICENSE").write_text("x")
    (snapshot / "LICENSE").symlink_to(other / "LICENSE")
    assert "is a link to" in refusal_message(snapshot)


def test_paths_without_a_model_are_refused(tmp_path: Path) -> None:
    assert "no config.json" in refusal_message(tmp_path)
    assert "No such file" in refusal_message(tmp_path / "nothing")
    (tmp_path / "file").touch()
    assert "Not a directory" in refusal_message(tmp_path / "file")
    assert "too long" in refusal_message(tmp_path / ("x" * 4000))


# --- values ---------------------------------------------------------------------------------------


@parametrize_each_value(
    ("dtype", ["float32", "float16", "bfloat16", "float8_e5m2"]),
    ("position", [(0, 0), (1, 1234), (1029, 1529)]),
    ("value", [float("nan"), float("inf"), float("-inf")]),
)
def test_non_finite_values_are_refused_with_their_position(
    dtype: str, position: tuple[int, int], value: float
) -> None:
    weight = torch.ones(1030, 1530, dtype=getattr(torch, dtype))
    check_finite("w", weight)
    weight[position] = value
    weight[1029, 1529] = value  # the first one counts
    with pytest.raises(InputError) as caught:
        check_finite("w", weight, Path("model.safetensors"))
    assert caught.value.message == (
        f"model.safetensors: tensor 'w' holds {value} at {list(position)} of [1030, 1530]"
    )
    assert caught.value.tensor == "w"


def test_integer_empty_and_input_max_tensors_pass_check_finite() -> None:
    check_finite("codes", torch.ones(3, dtype=torch.int32))
    check_finite("empty", torch.empty(0, 3))
    check_finite("scalar", torch.tensor(1.0))
    check_finite("tower.linear.input_max", torch.tensor(float("inf")))
    with pytest.raises(InputError, match=r"at \[\] of \[\]"):
        check_finite("scalar", torch.tensor(float("nan")))
