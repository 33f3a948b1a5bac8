"""Every verb does its main task on the bundled demo model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.support import (
    DEMO_GPTQ,
    EVALUATION,
    RTN,
    Make,
    Model,
    Start,
    ask,
    command,
    document,
)

VERBS = (
    "plan", "quantize", "allocate", "export", "release", "sweep", "eval", "bench", "generate", "serve", "verify",
    "reproduce", "diff", "inspect", "formats", "recipes", "demo", "doctor",
)  # fmt: skip


@pytest.fixture(scope="module")
def result(make: Make) -> Any:
    return make("quantize", "demo", DEMO_GPTQ)


def test_demo_copies_a_model_and_a_text(tmp_path: Path) -> None:
    demo = document("demo", tmp_path / "demo")
    assert demo["schema"] == "quantforge.demo/1"
    directory = Path(demo["path"])
    assert (directory / "model.safetensors").stat().st_size > 8_000_000
    assert len((directory / "evaluation.txt").read_text()) > 1000
    assert command("demo", tmp_path / "demo").code == 4  # what exists is kept


def test_plan_and_quantize_agree(model: Model, result: Any) -> None:
    planned = document("plan", model("demo"), DEMO_GPTQ)
    assert planned["schema"] == "quantforge.plan/2"
    files = sum(path.stat().st_size for path in result.path.glob("*.safetensors"))
    assert planned["output_bytes"] == result.document["output_bytes"] == files
    assert result.document["bits_per_weight"] == pytest.approx(4.126, abs=0.001)
    assert result.document["schema"] == "quantforge.quantize/2"


def test_export_converts_a_result_to_gguf(make: Make, result: Any) -> None:
    exported = make("export", result.path, "--format gguf")
    assert exported.document["verdict"] == "exact but for the embedding"
    assert exported.path.read_bytes()[:4] == b"GGUF"


def test_eval_ranks_two_results_by_divergence(model: Model, make: Make, result: Any) -> None:
    plain = make("quantize", "demo", RTN)
    evaluation = document("eval", model("demo"), plain.path, result.path, EVALUATION)
    reference, rounded, better = evaluation["models"]
    assert reference["kl_mean"] is None
    assert 0 < better["kl_mean"] < rounded["kl_mean"] < 0.1
    assert all(row["perplexity_se"] > 0 for row in evaluation["models"])


def test_verify_diff_inspect_and_reproduce_accept_a_result(
    model: Model, make: Make, result: Any
) -> None:
    assert document("verify", result.path, "--source", model("demo"))["ok"] is True
    assert document("diff", result.path, result.path)["equal"] is True
    assert document("inspect", result.path)["schemes"]["int4:g128:sym:bf16"] == 28
    again = document("reproduce", make("quantize", "demo", RTN).path, "--source", model("demo"))
    assert (again["equal"], again["differing"]) == (True, [])


def test_generate_continues_a_text(result: Any) -> None:
    words = ("import os\n", "--raw --max-tokens 12")
    generated = document("generate", result.path, words)
    (answer,) = generated["answers"]
    assert len(answer["tokens"]) == 12
    assert command("generate", result.path, words, "-q").out.strip() == answer["text"].strip()


def test_serve_answers_over_http_and_stops_at_a_signal(result: Any, start: Start) -> None:
    server = start("serve", result.path, "--port 0 --json")
    server.until(lambda: server.out.endswith("}\n"))
    serving = json.loads(server.out)
    request = {
        "model": serving["model"],
        "prompt": "import os\n",
        "max_tokens": 12,
        "temperature": 0,
    }
    status, answer = ask(f"{serving['url']}/v1/completions", request)
    words = ("import os\n", "--raw --max-tokens 12")
    (alone,) = document("generate", result.path, words)["answers"]
    assert (status, answer["choices"][0]["text"]) == (200, alone["text"])
    server.send(signal.SIGTERM)
    assert server.ended().code == 0


def test_bench_sends_a_stream_of_requests(result: Any) -> None:
    words = "--requests 3 --prompt-tokens 8..20 --new-tokens 3..6"
    (row,) = document("bench", result.path, words)["rows"]
    assert (row["metrics"]["requests"], row["metrics"]["failed"]) == (3, 0)
    assert 9 <= row["metrics"]["new_tokens"] <= 18


@pytest.mark.thorough  # as `test_several_results` shows
def test_release_and_sweep_write_several_results(model: Model, tmp_path: Path) -> None:
    spec = tmp_path / "release.toml"
    spec.write_text(
        f'model = "{model("llama")}"\n[[variant]]\nname = "q8"\nmethod = "rtn"\ntype = "Q8_0"\n'
    )
    release = document("release", spec, "-o", tmp_path / "made")
    assert release["made"] == ["q8"]
    checked = subprocess.run(
        ["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path / "made", check=False
    )
    assert checked.returncode == 0
    words = "--over bits=4 --method rtn --calibration none"
    swept = document(
        "sweep",
        model("llama"),
        words,
        "-o",
        tmp_path / "swept",
        "--windows 2 --window-length 32",
    )
    assert {*swept["results"]} == {"bits4"}
    assert {path.name for path in (tmp_path / "swept").iterdir() if path.is_dir()} == {"bits4"}


def test_formats_recipes_and_doctor_list_their_entries() -> None:
    listed = {row["format"] for row in document("formats")["formats"]}
    assert listed == {
        "plain",
        "compressed-tensors",
        "gptq",
        "gptq_v2",
        "awq",
        "bnb",
        "fp8",
        "mlx",
        "gguf",
    }
    recipes = document("recipes")["recipes"]
    assert {"vllm-4bit", "llama.cpp-4bit", "mlx-4bit", "balanced-4bit"} <= {*recipes}
    assert "awq+gptq" in document("recipes", "balanced-4bit")["toml"]
    checks = document("doctor")["checks"]
    assert {row["check"] for row in checks} >= {"torch", "transformers", "tokenizers"}


def test_help_lists_the_options_of_every_verb() -> None:
    for verb in VERBS:
        shown = command(verb, "--help")
        assert (shown.code, shown.err) == (0, ""), verb
        assert f"quantforge {verb}" in shown.out
        assert "Example:" in shown.out or verb in {"formats", "recipes", "doctor"}
        assert command("help", verb).out == shown.out


def test_help_lists_the_verbs_and_version_is_printed() -> None:
    shown = command("--help").out
    assert shown == command().out
    assert {*re.findall(r"^  ([a-z]+) ", shown, re.MULTILINE)} >= {*VERBS}
    assert re.fullmatch(r"quantforge \d+\.\d+\.\d+\n", command("--version").out)
