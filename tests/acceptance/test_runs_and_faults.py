"""A run writes all or nothing, resumes after a kill, is reproducible, and touches nothing else."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.support import (
    GPTQ,
    ROWS,
    RTN,
    Copy,
    Make,
    Model,
    Running,
    Start,
    command,
    digests,
    document,
    manifest,
    refusal,
    split_arguments,
)
from tests.thorough import thorough_case


def finished_parts(run: Running) -> list[str]:
    """The parts that a run with ``--json-progress`` has finished."""
    lines = [json.loads(line) for line in run.err.splitlines() if line.endswith("}")]
    return [line["part"] for line in lines if line.get("part")]


def names_beside(out: Path) -> set[str]:
    return {path.name for path in out.parent.iterdir()} - {out.name}


@pytest.mark.parametrize(
    ("numbers", "codes"),
    [
        ([signal.SIGTERM], {143}),
        ([signal.SIGHUP], {129}),
        ([signal.SIGINT, signal.SIGINT], {130, -signal.SIGINT}),  # the second one ends it at once
        thorough_case([signal.SIGKILL], {-signal.SIGKILL}),
        thorough_case([signal.SIGINT], {130}),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_a_stopped_run_resumes_to_the_same_bytes(
    numbers: list[int], codes: set[int], model: Model, make: Make, start: Start, tmp_path: Path
) -> None:
    out, words = tmp_path / "out", ("quantize", model("llama"), GPTQ)
    run = start(words, "-o", out, "--json-progress")
    run.until(lambda: len(finished_parts(run)) >= 2)
    for number in numbers:
        run.send(number)
    assert run.ended().code in codes
    assert "Traceback" not in run.err
    assert not out.exists()
    result = document(words, "-o", out)
    assert result["resumed"] is True
    assert digests(out) == digests(make("quantize", "llama", GPTQ).path)
    assert names_beside(out) == set()


@pytest.fixture
def stopped(model: Model, start: Start, tmp_path: Path) -> Path:
    """The output of a run that was killed after its first parts."""
    out = tmp_path / "out"
    run = start("quantize", model("llama"), GPTQ, "-o", out, "--json-progress")
    run.until(lambda: len(finished_parts(run)) >= 2)
    run.send(signal.SIGKILL)
    run.ended()
    return out


def test_resuming_with_another_recipe_is_refused(stopped: Path, model: Model) -> None:
    other = f"--method gptq --bits 3 {ROWS}"
    message = refusal(5, "quantize", model("llama"), other, "-o", stopped)
    assert "bits" in message or "recipe" in message
    assert "--overwrite" in message
    result = document("quantize", model("llama"), other, "-o", stopped, "--overwrite")
    assert result["resumed"] is False
    assert result["bits_per_weight"] < 3.5


def test_resume_detects_changed_finished_work(stopped: Path, model: Model) -> None:
    (work,) = (path for path in stopped.parent.iterdir() if path != stopped)
    weights = max(
        (path for path in work.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    data = weights.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    weights.write_bytes(data[:header] + bytes(255 - byte if byte else 0 for byte in data[header:]))
    assert command("quantize", model("llama"), GPTQ, "-o", stopped).code == 5


def test_a_second_writer_of_an_output_is_refused(
    model: Model, make: Make, start: Start, tmp_path: Path
) -> None:
    out, words = tmp_path / "out", ("quantize", model("llama"), GPTQ)
    run = start(words, "-o", out, "--json-progress")
    run.until(lambda: len(finished_parts(run)) >= 1)
    run.send(signal.SIGSTOP)
    message = refusal(75, words, "-o", out)
    assert str(run.pid) in message
    run.send(signal.SIGCONT)
    assert run.ended().code == 0
    assert digests(out) == digests(make("quantize", "llama", GPTQ).path)


def test_processes_that_join_a_run_write_the_same_bytes(
    model: Model, make: Make, start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    runs = [start("quantize", model("llama"), RTN, "-o", out, "--join") for _ in range(2)]
    assert [run.ended().code for run in runs] == [0, 0], [run.err for run in runs]
    assert digests(out) == digests(make("quantize", "llama", RTN).path)
    assert names_beside(out) == set()


@pytest.mark.parametrize(
    "words", [("--threads 2 --activations disk", "-v"), thorough_case(("-q",))]
)
def test_threads_disk_and_verbosity_do_not_change_the_output(
    words: tuple[str, ...], model: Model, make: Make, start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "another place"
    run = start("quantize", model("llama"), GPTQ, words, "-o", out, cwd=tmp_path)
    assert run.ended().code == 0, run.err
    assert digests(out) == digests(make("quantize", "llama", GPTQ).path)


def test_a_result_contains_no_local_path(model: Model, make: Make) -> None:
    result = make("quantize", "llama", GPTQ).path
    for word in (str(model("llama").parent), str(result.parent)):
        for path in result.iterdir():
            assert word.encode() not in path.read_bytes(), path.name


BITS8 = "--method rtn --bits 8 --calibration none"


def test_an_existing_output_needs_overwrite_and_foreign_files_stay(
    model: Model, copied: Copy, make: Make, tmp_path: Path
) -> None:
    result = copied(make("quantize", "llama", RTN).path)
    before = digests(result)
    message = refusal(4, "quantize", model("llama"), BITS8, "-o", result)
    assert "--overwrite" in message
    assert digests(result) == before
    (result / "mine.txt").write_text("mine")
    message = refusal(4, "quantize", model("llama"), BITS8, "-o", result, "--overwrite")
    assert "mine.txt" in message
    (result / "mine.txt").unlink()
    document("quantize", model("llama"), BITS8, "-o", result, "--overwrite")
    assert digests(result) != before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("mine")
    ended = command("quantize", model("llama"), RTN, "-o", foreign, "--overwrite")
    assert ended.code in {3, 4}
    assert {path.name for path in foreign.iterdir()} == {"mine.txt"}


def test_a_failed_overwrite_keeps_the_old_result(
    model: Model, copied: Copy, make: Make, start: Start
) -> None:
    result = copied(make("quantize", "llama", RTN).path)
    before = digests(result)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = ("quantize", model("llama"), BITS8, "-o", result, "--overwrite")
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        ended = command(words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert ended.code == 7, ended.err
    assert digests(result) == before
    assert command(words).code == 0


def test_a_dry_run_shows_the_plan_and_writes_nothing(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = document("quantize", model("llama"), RTN, "-o", out, "--dry-run")
    planned = document("plan", model("llama"), RTN, "-o", out)
    assert shown["tensors"] == planned["tensors"]
    assert [*tmp_path.iterdir()] == []


def test_json_progress_goes_to_stderr(model: Model, start: Start, tmp_path: Path) -> None:
    run = start("quantize", model("llama"), GPTQ, "-o", tmp_path / "out", "--json-progress --json")
    assert run.ended().code == 0
    lines = [json.loads(line) for line in run.err.splitlines()]
    shares = [line["progress"] for line in lines if "progress" in line]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] == 1
    assert json.loads(run.out)["schema"] == "quantforge.quantize/2"
    quiet = command("quantize", model("llama"), GPTQ, "-o", tmp_path / "quiet", "--quiet")
    assert quiet.err == ""


def test_the_log_option_writes_a_jsonl_file(model: Model, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    document("quantize", model("llama"), RTN, "-o", tmp_path / "out", "--log", log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) >= 3
    assert not [*(tmp_path / "out").glob("*.jsonl")]


AUDIT = """
import functools, os, sys
import numba
numba.njit = functools.partial(numba.njit, cache=True)  # compiled when the result was made for comparison
FOREIGN = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="quantforge")
report = open(sys.argv.pop(1), "w")
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        report.write(f"write {arguments[0]}\\n")
    elif event in FOREIGN:
        report.write(f"{event} {arguments}\\n")
    elif event == "pickle.find_class":
        report.write(f"{event} {arguments}\\n")
sys.addaudithook(watch)
try:
    command.load()()
finally:
    report.flush()
"""


# `tests/faults/test_audit.py` watches a forked run, `tests/property/test_determinism.py` changes the surroundings.
@pytest.mark.thorough
def test_a_separate_process_writes_only_its_output_reproducibly(
    model: Model, make: Make, tmp_path: Path
) -> None:
    """Watched by the interpreter's own audit: no connection, no process, no pickle, no file but the output's.

    Hash seed, locale, time zone, home and working directory are others than here.
    """
    report, directory, scratch = (tmp_path / name for name in ("report", "place", "scratch"))
    directory.mkdir()
    scratch.mkdir()
    before, expected = digests(model("llama")), digests(make("quantize", "llama", GPTQ).path)
    words = ["quantize", model("llama"), GPTQ, "-o", directory / "out"]
    surroundings = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "7",
        "LC_ALL": "C",
        "TZ": "Asia/Tokyo",
        "TMPDIR": str(scratch),
        "HOME": str(scratch),
    }
    done = subprocess.run([sys.executable, "-c", AUDIT, report, *split_arguments(words)], capture_output=True,
                          text=True, check=False, cwd=scratch, env=surroundings)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = report.read_text().splitlines()
    allowed = (f"write {directory}", f"write {scratch}", "write /dev/null")
    # What is opened by its name in a folder that is open already has no path here.
    absolute = [line for line in lines if not re.fullmatch(r"write [^/]+", line)]
    assert [line for line in absolute if not line.startswith(allowed)] == []
    assert [
        path for path in scratch.rglob("*") if path.is_file() and ".cache" not in path.parts
    ] == []
    assert digests(model("llama")) == before
    assert [path.name for path in directory.iterdir()] == ["out"]
    assert digests(directory / "out") == expected


def test_default_output_names(model: Model, copied: Copy, tmp_path: Path) -> None:
    """Without `-o` a result lies in the working directory, under a name that says what it is."""
    shutil.copytree(model("llama"), tmp_path / "wren")
    names = {
        f"quantize wren {RTN}": "wren-rtn-int4",
        "quantize wren --method rtn --scheme W8A8 --calibration none": "wren-rtn-w8a8",
        f"quantize wren {RTN} --format gptq": "wren-rtn-int4-gptq",
        "quantize wren --method rtn --scheme nf4 --calibration none": "wren-rtn-nf4-bnb",
        f"quantize wren --method gptq --type Q4_K_M {ROWS}": "wren-gptq-Q4_K_M.gguf",
        "export wren --type Q4_K_M": "wren-Q4_K_M.gguf",
        "export wren --format plain": "wren-plain",
    }
    for line, name in names.items():
        planned = document(*line.split(), "--dry-run", cwd=tmp_path)
        assert Path(planned["output"]).name == name
    document("quantize", "wren", RTN, cwd=tmp_path)
    assert (tmp_path / "wren-rtn-int4" / "config.json").exists()
    document("export", "wren-rtn-int4", "--format gguf", cwd=tmp_path)
    assert (tmp_path / "wren-Q4_0.gguf").exists()


# ---- recipes, provenance, signatures


def test_a_recipe_file_is_equivalent_to_options(model: Model, make: Make, tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('method = "gptq"\nbits = 4\n[calibration]\nsamples = 8\nlength = 64\n')
    document("quantize", model("llama"), "--recipe", recipe, "-o", tmp_path / "out")
    expected = make("quantize", "llama", GPTQ).path
    assert digests(tmp_path / "out") == digests(expected)
    recorded = tmp_path / "stated.toml"
    recorded.write_text(manifest(expected)["recipe"])  # what is recorded is a recipe
    document("quantize", model("llama"), "--recipe", recorded, "-o", tmp_path / "again")
    assert digests(tmp_path / "again") == digests(expected)
    over = document("plan", model("llama"), "--recipe", recipe, "--bits 3")
    assert over["bits_per_weight"] < 3.5


@pytest.mark.parametrize(
    ("text", "word"),
    [('metod = "gptq"', "method"), ("bits = 40", "bits"), ('bits = "four"', "bits"), ("bits = ", ""),
     ("[gptq]\ndampng = 1", "damping"), ('scheme = "int4"\nbits = 4', "scheme")],
)  # fmt: skip
def test_an_invalid_recipe_is_refused(text: str, word: str, model: Model, tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(text)
    message = refusal(3, "plan", model("llama"), "--recipe", recipe)
    assert word in message


@pytest.mark.parametrize(
    "name",
    [
        "vllm-4bit",
        *map(thorough_case, ("llama.cpp-4bit", "mlx-4bit", "transformers-4bit", "fast-8bit")),
    ],
)
def test_a_built_in_recipe_can_be_planned(name: str, model: Model) -> None:
    planned = document("plan", model("demo"), "--recipe", name)
    assert planned["output_bytes"] > 0
    refused = refusal(3, "plan", model("demo"), "--recipe", f"{name}x")
    assert name in refused


def test_reproduce_rebuilds_a_result_and_detects_edits(
    model: Model, make: Make, copied: Copy, tmp_path: Path
) -> None:
    result = copied(make("quantize", "llama", GPTQ).path)
    kept = tmp_path / "second"
    report = document("reproduce", result, "--source", model("llama"), "-o", kept)
    assert report["equal"] is True
    assert (kept / "model.safetensors").read_bytes() == (result / "model.safetensors").read_bytes()
    settings = json.loads((result / "generation_config.json").read_text())
    (result / "generation_config.json").write_text(json.dumps({**settings, "temperature": 0.1}))
    report = document("reproduce", result, "--source", model("llama"), code=5)
    assert any(
        "generation_config.json" in str(name) for name in (*report["differing"], *report["edited"])
    )
    refusal(5, "reproduce", make("quantize", "llama", GPTQ).path, "--source", model("wide"))


def test_reproduce_rebuilds_a_gguf_result(model: Model, make: Make) -> None:
    result = make("quantize", "llama", "--method rtn --type Q8_0 --calibration none").path
    assert document("reproduce", result, "--source", model("llama"))["equal"] is True


def test_diff_compares_two_results(make: Make, model: Model) -> None:
    first, second = make("quantize", "llama", RTN).path, make("quantize", "llama", GPTQ).path
    assert document("diff", first, first)["equal"] is True
    difference = document("diff", first, second, code=5)
    assert difference["equal"] is False
    assert len([row for row in difference["tensors"] if not row["equal_values"]]) == 14
    shown = command("diff", first, second)
    assert (shown.code, "rtn" in shown.out, "gptq" in shown.out) == (5, True, True)


def test_provenance_writes_a_statement_and_a_bill_of_materials(
    model: Model, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    document("quantize", model("llama"), RTN, "--provenance -o", out)
    statement = json.loads((out / "provenance.intoto.json").read_text())
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert subjects["model.safetensors"] == digests(out)["model.safetensors"]
    bill = json.loads((out / "bom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"


def test_verify_checks_a_signature_with_the_users_key(model: Model, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    for name in ("own", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        (tmp_path / name).write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))  # fmt: skip
        (tmp_path / f"{name}.pub").write_bytes(key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))  # fmt: skip
    out = tmp_path / "out"
    document("quantize", model("llama"), RTN, "--sign", tmp_path / "own", "-o", out)
    words = ("verify", out, "--no-forward --key")
    assert command(words, tmp_path / "own.pub").code == 0
    assert command(words, tmp_path / "other.pub").code == 5
    (out / "config.json").write_text((out / "config.json").read_text() + " ")
    assert command(words, tmp_path / "own.pub").code == 5
    refusal(
        3, "quantize", model("llama"), RTN, "--sign", tmp_path / "absent", "-o", tmp_path / "none"
    )


def test_the_model_card_has_hub_metadata(model: Model, make: Make, tmp_path: Path) -> None:
    import yaml

    out = tmp_path / "out"
    document("quantize", model("demo"), RTN, "--base-model org/original -o", out)
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] in ("org/original", ["org/original"])
    assert front["license"] == "apache-2.0"
    assert "vllm serve" in card
    assert 'method = "rtn"' in card
