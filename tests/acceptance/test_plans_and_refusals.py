"""`plan`, `inspect`, error codes and messages, and the Python functions of all verbs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quantforge
from tests.acceptance.support import (
    COMMAND_PROGRAM,
    DEMO_GPTQ,
    EVALUATION,
    GPTQ,
    RTN,
    Copy,
    Make,
    Model,
    Start,
    command,
    digests,
    document,
    tensors,
)
from tests.thorough import thorough_case

# ---- plan


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixture", RTN), ("hybrid", GPTQ), ("tower", RTN),
        ("llama", "--method rtn --scheme nf4 --calibration none"),
        ("llama", "--method rtn --type Q4_0 --calibration none"),
        thorough_case("llama", RTN), thorough_case("gpt2", RTN),
        thorough_case("llama", "--method rtn --format mlx --bits 4 --calibration none"),
    ],
)  # fmt: skip
def test_a_plan_predicts_output_bytes_and_every_tensor(
    name: str, words: str, model: Model, make: Make
) -> None:
    """Exact bytes, and every tensor of the source exactly once."""
    planned = document("plan", model(name), words)
    result = make("quantize", name, words)
    files = [result.path] if result.path.is_file() else [*result.path.glob("*.safetensors")]
    assert planned["output_bytes"] == sum(path.stat().st_size for path in files)
    assert planned["bits_per_weight"] == result.document["bits_per_weight"]
    assert [row["name"] for row in planned["tensors"]] == sorted({*tensors(model(name))}) or {
        row["name"] for row in planned["tensors"]
    } >= {*tensors(model(name))}
    assert all(row["rule"] for row in planned["tensors"])


def test_a_plan_reads_headers_only_and_writes_nothing(
    model: Model, copied: Copy, tmp_path: Path
) -> None:
    source = copied(model("demo"))
    weights = source / "model.safetensors"
    before = weights.read_bytes()
    header = 8 + int.from_bytes(before[:8], "little")
    weights.write_bytes(before[:header] + b"\xff" * (len(before) - header))  # all NaN
    files = digests(tmp_path)
    planned = document("plan", source, RTN)
    assert planned["tensors"]
    assert digests(tmp_path) == files


def test_a_plan_estimates_memory_time_and_engine_support(model: Model) -> None:
    planned = document("plan", model("demo"), DEMO_GPTQ)
    assert planned["peak_memory_bytes"] > 0
    assert planned["forecast"]["total_seconds"] > 0
    engines = {row["engine"]: row["loads"] for row in planned["engines"]}
    assert (engines["vllm"], engines["transformers"], engines["llama.cpp"]) == (True, True, False)
    shown = command("plan", model("demo"), DEMO_GPTQ)
    for word in ("down_proj", "int4:g128:sym", "peak memory"):
        assert word in shown.out


def test_plan_reports_whether_a_result_fits_a_device(model: Model) -> None:
    planned = ("plan", model("demo"), RTN, "--context 64 --batch 8")
    device = "--bandwidth 1TB/s --compute 100TFLOPS --price 2.5/h"
    small, large = (
        document(*planned, f"--memory {size} {device}")["capacity"] for size in ("1MB", "24GB")
    )
    assert [capacity["cards"][0]["fits"] for capacity in (small, large)] == [False, True]
    assert large["needed_bytes"] > large["weights_bytes"] + large["cache_bytes"] > 0
    assert large["cards"][0]["cost_per_million"] > 0
    # Two numbers of 16 bits for each of two heads of 64 columns in four blocks.
    assert large["cache_token_bytes"] == 2 * 2 * 2 * 64 * 4
    l4_capacity = document(*planned, "--cache int8 --device-name l4")["capacity"]
    assert l4_capacity["cache_bytes"] < 0.6 * large["cache_bytes"]
    assert l4_capacity["cards"][0]["name"] == "l4"


# ---- inspect


def test_inspect_reads_headers_of_models_files_and_results(model: Model, make: Make) -> None:
    whole = document("inspect", model("demo"))
    assert whole["weights"] == sum(weight.numel() for weight in tensors(model("demo")).values())
    single = document("inspect", model("demo") / "model.safetensors")
    assert single["weights"] == whole["weights"]
    file = make("export", "demo", "--type Q4_K_M").path
    assert document("inspect", file)["schemes"]["q4_k"] >= 20
    listed = document("inspect", file, "--tensors *ffn_down*")
    assert len(listed["tensors"]) == 4
    result = document("inspect", make("quantize", "llama", GPTQ).path)
    assert result["provenance"]["method"] == "gptq"
    assert result["bits_per_quantized_weight"] == pytest.approx(4.13, abs=0.01)


def test_inspect_derives_linears_that_share_an_input(model: Model, tmp_path: Path) -> None:
    derived = document("inspect", model("llama"), "--derive -o", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["kinds"] == derived["kinds"]
    groups = [{*group["linears"]} for kind in derived["kinds"] for group in kind["inputs"]]
    assert {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"} in groups
    assert {"mlp.gate_proj", "mlp.up_proj"} in groups


# ---- errors


REFUSALS: list[tuple[tuple[str, ...], int, str]] = [
    (("plam", "MODEL"), 2, "plan"),
    (("quantize", "MODEL", "--metod rtn"), 2, "--method"),
    (("quantize", "MODEL", "--method gtpq"), 2, "gptq"),
    (("quantize", "MODEL", "--bits 11"), 2, "8"),
    (("quantize", "MODEL", "--scheme int4:g12x"), 2, "g12x"),
    (("quantize", "MODEL", "--format qptq"), 2, "gptq"),
    (("quantize", "MODEL", "--type Q4_K_X"), 2, "Q4_K"),
    (("quantize", "MODEL", "--for vlm --bits 4"), 2, "vllm"),
    (("quantize", "MODEL", "--bits 4 --scheme int4"), 2, "--scheme"),
    (("quantize", "MODEL", "--bits 4 --format awq -o x.gguf"), 2, "gguf"),
    (("quantize", "MODEL", "--bits 4 --modelfile"), 2, "--modelfile"),
    (("quantize", "MODEL", "--bits 4 --allow nothing=1"), 2, "nothing"),
    (("quantize", "MODEL", "--format gptq --scheme nf4"), 4, "nf4"),
    (("quantize", "MODEL", "--method rtn --tune 1 --bits 4"), 2, "--tune"),
    (("quantize", "MODEL", "--method rtn --type Q8_0 --lm-head int8:row"), 4, "head"),
    (("quantize", "./absent", "--bits 4"), 3, "absent"),
    (("quantize", "MODEL", "--bits 4 --device cuda:99"), 2, "--device"),
    (("eval", "MODEL", "--report r.txt"), 2, ".html"),
    (("generate", "./absent", "x"), 3, "absent"),
    (("recipes", "vllm-4bitt"), 2, "vllm-4bit"),
    (("inspect", "./absent"), 3, "absent"),
    (("reproduce", "MODEL", "--source MODEL"), 3, "manifest"),
]  # fmt: skip


def test_a_refusal_has_an_exit_code_and_names_the_mistake(model: Model, tmp_path: Path) -> None:
    for words, code, named in REFUSALS:
        line = [word.replace("MODEL", str(model("llama"))) for word in words]
        ended = command(*line, "--json", cwd=tmp_path)
        assert ended.out == "", words
        error = ended.error
        names = {2: "usage", 3: "input", 4: "refused"}
        assert (ended.code, error["code"]) == (code, names[code]), error
        assert named in f"{error['message']} {error['hint']}", error
        assert [*tmp_path.iterdir()] == []
        plain = command(*line, cwd=tmp_path)
        assert (plain.code, plain.out, "Traceback" in plain.err) == (code, "", False), words
        assert error["message"].split()[0] in plain.err


def test_a_closed_stdout_pipe_ends_with_code_141() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND_PROGRAM, "formats"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.thorough  # as `tests/cli/test_cli.py` shows of more commands
def test_help_and_plan_do_not_import_torch(model: Model) -> None:
    script = (
        "import sys, quantforge\n"
        "assert 'torch' not in sys.modules\n"
        "from importlib.metadata import entry_points\n"
        "(command,) = entry_points(group='console_scripts', name='quantforge')\n"
        "for words in (['--help'], ['quantize', '--help'], ['plan', sys.argv[1], '--bits', '4']):\n"
        "    sys.argv[1:] = words\n"
        "    try: command.load()()\n"
        "    except SystemExit as end: assert not end.code\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    words = script.replace("sys.argv[1], '--bits'", f"{str(model('llama'))!r}, '--bits'")
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- import quantforge


def test_the_package_exports_the_documented_names() -> None:
    functions = {"allocate", "capacity", "demo", "derive_declarations", "diff", "evaluate", "export", "generate",
                 "inspect", "load", "make_imatrix", "plan", "quantize", "release", "reproduce", "serve", "sweep",
                 "verify"}  # fmt: skip
    classes = {"Recipe", "Rule", "Settings", "Policy", "GptqOptions", "AwqOptions", "CalibrationOptions", "Load",
               "Plan", "Progress", "QuantForgeError", "Serving"}  # fmt: skip
    assert functions | classes <= {*quantforge.__all__}
    assert all(callable(getattr(quantforge, name)) for name in functions)
    assert {*quantforge.__all__} <= {*dir(quantforge)}


def test_python_functions_match_the_command_line(
    model: Model, make: Make, tmp_path: Path, capsys: Any
) -> None:
    source, out = model("llama"), tmp_path / "out"
    planned = quantforge.plan(source, method="gptq", bits=4, samples=8, length=64)
    result = quantforge.quantize(source, method="gptq", bits=4, samples=8, length=64, out=out)
    expected = make("quantize", "llama", GPTQ)
    assert digests(out) == digests(expected.path)
    assert planned.output_bytes == expected.document["output_bytes"]
    assert Path(result.out) == out
    assert [event.kind for event in result.events] == ["few-calibration-tokens"]
    moved = quantforge.export(out, out=tmp_path / "x.gguf")
    assert (moved.verdict, moved.layers) == ("exact", 14)
    assert quantforge.verify(out, source=source).findings == []
    rows = quantforge.evaluate(source, [out], windows=4, length=32, speed=False).rows
    (_, row) = document("eval", source, expected.path, EVALUATION)["models"]
    assert rows[1]["kl_mean"] == pytest.approx(row["kl_mean"], rel=1e-6)
    assert quantforge.diff(out, expected.path).equal
    assert quantforge.inspect(out).schemes["int4:g128:sym:bf16"] == 14
    assert not quantforge.reproduce(out, source=source).differing
    assert [*capsys.readouterr()] == ["", ""]  # nothing is printed


def test_recipe_and_settings_objects_match_the_options(
    model: Model, make: Make, tmp_path: Path
) -> None:
    shares: list[float] = []
    recipe = quantforge.Recipe(
        method="rtn",
        bits=4,
        calibration=quantforge.CalibrationOptions(source="none"),
        rules=(quantforge.Rule("down_proj", "int8:g128:sym"),),
    )
    settings = quantforge.Settings(
        threads=1,
        policy=quantforge.Policy(strict=True),
        progress=lambda at: shares.append(at.share),
    )
    quantforge.quantize(model("llama"), recipe, tmp_path / "out", settings)
    words = f"{RTN} --rule down_proj=int8:g128:sym"
    assert digests(tmp_path / "out") == digests(make("quantize", "llama", words).path)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_api_errors_are_quantforge_errors_with_exit_codes(model: Model, tmp_path: Path) -> None:
    wrong: list[tuple[int, Callable[[], object]]] = [
        (2, lambda: quantforge.plan(model("llama"), bitz=4)),
        (2, lambda: quantforge.plan(model("llama"), method="gtpq")),
        (2, lambda: quantforge.plan(model("llama"), bits="four")),
        (3, lambda: quantforge.plan(tmp_path / "absent")),
        (3, lambda: quantforge.Recipe(bits=40)),
        (4, lambda: quantforge.plan(model("llama"), scheme="nf4", format="gptq")),
    ]
    for code, call in wrong:
        with pytest.raises(quantforge.QuantForgeError) as raised:
            call()
        assert raised.value.exit_code == code, raised.value
        assert raised.value.message


def test_an_exception_in_the_progress_callback_stops_a_run(model: Model, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(at: Any) -> None:
        if at.share > 0.5:
            raise EnoughError

    settings = quantforge.Settings(progress=stop)
    with pytest.raises(EnoughError):
        quantforge.quantize(
            model("llama"),
            method="rtn",
            bits=4,
            calibration="none",
            out=tmp_path / "out",
            settings=settings,
        )
    assert not (tmp_path / "out").exists()


def test_a_loaded_model_computes_logits_and_generates(model: Model, make: Make) -> None:
    result = make("quantize", "demo", DEMO_GPTQ).path
    loaded = quantforge.load(result)
    with torch.inference_mode():
        logits = loaded.model(torch.arange(8)[None]).logits
    assert logits.shape == (1, 8, 4096)
    assert torch.isfinite(logits).all()
    pieces: list[str] = []
    answer = quantforge.generate(loaded, "import os", raw=True, max_tokens=6, stream=pieces.append)
    assert "".join(pieces) == answer.text
    assert len(answer.tokens) == 6
    chat = quantforge.generate(loaded, [{"role": "user", "content": "Explain json."}], max_tokens=2)
    assert len(chat.choices) == 1


def test_serve_calls_ready_when_it_listens(model: Model, start: Start) -> None:
    servings: list[Any] = []

    class StopError(Exception):
        pass

    def ready(serving: Any) -> None:
        servings.append(serving)
        raise StopError

    with pytest.raises(StopError):
        quantforge.serve(model("demo"), ready=ready, port=0)
    assert servings[0].url.startswith("http://127.0.0.1:")


def test_make_imatrix_and_derive_declarations_write_files(model: Model, tmp_path: Path) -> None:
    recipe = quantforge.Recipe(calibration=quantforge.CalibrationOptions(samples=4, length=32))
    quantforge.make_imatrix(
        model("wide"), recipe, tmp_path / "importance.gguf", quantforge.Settings()
    )
    assert (tmp_path / "importance.gguf").read_bytes()[:4] == b"GGUF"
    declarations = quantforge.derive_declarations(model("llama"), tmp_path / "found.json")
    assert declarations is not None
    assert json.loads((tmp_path / "found.json").read_text())["kinds"]


def test_capacity_depends_on_the_cache_precision(model: Model) -> None:
    load = quantforge.Load(context=64, batch=8, cache="int8")
    plan, used = quantforge.capacity(model("demo"), load, method="rtn", bits=4)
    assert used.weights_bytes > 0
    wider = quantforge.capacity(
        model("demo"), quantforge.Load(context=64, batch=8), method="rtn", bits=4
    )[1]
    assert used.cache.token_bytes < wider.cache.token_bytes
    assert plan.output_bytes > 0


@pytest.mark.thorough  # each function has tests of its own in `tests/faults` and `tests/unit/execution`
def test_sweep_release_and_allocate_from_python(model: Model, tmp_path: Path) -> None:
    swept = quantforge.sweep(
        model("llama"), {"bits": [4]}, tmp_path / "swept", method="rtn", calibration="none",
        measured={"windows": 2, "length": 32},
    )  # fmt: skip
    assert {*swept.results} == {"bits4"}
    spec = tmp_path / "release.toml"
    spec.write_text(
        f'model = "{model("llama")}"\n[[variant]]\nname = "q8"\nmethod = "rtn"\ntype = "Q8_0"\n'
    )
    released = quantforge.release(spec, tmp_path / "released")
    assert tuple(released.made) == ("q8",)
    released.check_gates()
    allocation = quantforge.allocate(
        model("llama"),
        "3.5bpw",
        tmp_path / "mixed.toml",
        candidates=("int3:g128", "int4:g128"),
        samples=4,
        length=32,
    )
    assert allocation.nbytes > 0
    assert (tmp_path / "mixed.toml").exists()
