"""Record what every command makes, or compare with what was recorded: for changes that must not change a byte.

    python scripts/same_results.py record FILE.json [--model DIR ...] [--only TEXT] [--jobs N]
    python scripts/same_results.py compare FILE.json [...]

Before code is moved, `record`; after each step, `compare` on the same machine with the same libraries. Covered are all
methods with all schemes and formats, exports between all formats, GGUF mixtures and the options that change bytes; of
everything the SHA-256 of each file, of manifests and documents on stdout without versions. A refusal is recorded by its
exit code and words. Exits 5 if a file, a document or an exit code differs; other words of a refusal are told, no more.

Commands are given as a user would give them, so that the script outlives whatever is moved. Each runs in a fork of one
process that has imported what is heavy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "calibration"), str(ROOT / "kernels")]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

METHODS = ("rtn", "gptq", "awq", "awq+gptq", "smooth", "smooth+gptq")
CALIBRATED = ("--calibration", "builtin", "--samples", "6", "--length", "128", "--threads", "1")
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L",
         "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")  # fmt: skip
SCHEMES = ("int2:g32:asym", "int3:g64:sym", "int5:g128:asym", "int6:g64:sym", "int7:row:sym", "W8A8_STATIC",
           "FP8_STATIC", "FP8_DYNAMIC", "NVFP4", "NVFP4_W4A4", "MXFP4", "LLM_INT8", "int3:g32:sym:search")  # fmt: skip
OPTIONS = (
    "--bits 4 --scales absmax",
    "--type Q4_K_M --scales reference",
    "--type Q4_0 --scales absmax --max-shard-bytes 2000000",
    "--bits 4 --method gptq --refine 0",
    "--bits 4 --head int8:g128:sym --embedding int8:g64:sym",
    "--bits 4 --rule down_proj=int8:g64:sym --ignore k_proj",
    "--scheme FP8_STATIC --kv-cache fp8 --inputs percentile",
    "--scheme W8A8_STATIC --kv-cache fp8_head --inputs mse",
    "--bits 4 --method gptq --activations disk --max-shard-bytes 1000000",
    "--bits 4 --for vllm --tensor-parallel 2",
    "--bits 4 --for llama.cpp",
    "--bits 4 --provenance",
)


@dataclass
class Result:
    """What came of a command."""

    code: int = 0
    words: str = ""
    files: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def main() -> int:
    """Run all commands and write or compare what they made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path, action="append", help="default: the bundled one")
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    _warm()
    found: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="same-") as name:
        for model in asked.model or [ROOT / "models" / "demo"]:
            work = Path(name) / model.name
            work.mkdir()
            os.chdir(work)
            Path("model").symlink_to(model.resolve())
            for stage in stages():
                chosen = [line for line in stage if asked.only in line]
                with ThreadPoolExecutor(asked.jobs) as pool:
                    made = list(pool.map(_run, chosen))
                found |= {
                    f"{model.name}: {line}": one for line, one in zip(chosen, made, strict=True)
                }
        os.chdir("/")
    print(f"{len(found)} commands, {sum(len(one.files) for one in found.values())} files and documents, "
          f"{sum(one.seconds for one in found.values()):.0f} s")  # fmt: skip
    if asked.verb == "record":
        asked.file.write_text(
            json.dumps({key: asdict(one) for key, one in found.items()}, indent=1)
        )
        return 0
    before = {key: Result(**one) for key, one in json.loads(asked.file.read_text()).items()}
    return compare({key: one for key, one in before.items() if asked.only in key}, found)


def stages() -> Iterator[list[str]]:
    """Yield lists of commands; those of one list do not need each other."""
    rows = _conversions()
    sources = sorted({(row["from"], row["scheme"]) for row in rows})
    yield [
        *(f"quantize model --format {form} --scheme {scheme} --method {method} -o q/{method}/{_name(form, scheme)}"
          for form, scheme in sources for method in METHODS if form != "gguf"),
        *(f"quantize model --scheme {scheme} --method {method} -o q/{method}/{_name('default', scheme)}"
          for scheme in SCHEMES for method in METHODS),
        *(f"quantize model --type {kind} --method {method} -o q/{method}/{kind}.gguf"
          for kind in TYPES for method in ("rtn", "gptq", "awq")),
        *(f"quantize model {options} -o o/{number}{'.gguf' if 'Q4' in options or 'llama' in options else ''}"
          for number, options in enumerate(OPTIONS)),
        *(f"plan model --bits 4 --method {method} --json --tensors" for method in METHODS),
    ]  # fmt: skip
    made = [path for path in sorted(Path("q").glob("*/*")) if not path.name.endswith(".json")]
    targets = sorted({row["to"] for row in rows})
    yield [
        f"export {path} --format {target} --allow-inexact -o e/{target}/{path.parent.name}-{path.name}"
        f"{'.gguf' if target == 'gguf' else ''}"
        for path in made
        for target in targets
        if path.parent.name in {"rtn", "awq+gptq"}
    ]
    yield [
        *(f"inspect {path} --json" for path in made),
        *(f"verify {path} --source model --json" for path in made if path.parent.name == "awq+gptq"),
        *(f"eval model {path} --no-speed --windows 2 --length 64 --threads 1 --json"
          for path in made if path.parent.name == "rtn"),
    ]  # fmt: skip


def compare(before: dict[str, Result], now: dict[str, Result]) -> int:
    """Tell what differs; return the exit code."""
    different = 0
    for key in sorted({*before, *now}):
        if key not in before or key not in now:
            print(f"{'new' if key in now else 'gone'}: {key}")
            different += 1
            continue
        old, new = before[key], now[key]
        changed = [name for name in sorted({*old.files, *new.files})
                   if old.files.get(name) != new.files.get(name)]  # fmt: skip
        if old.code != new.code or changed:
            different += 1
            print(f"{key}\n  exit {old.code}, now {new.code} {new.words}\n  {' '.join(changed)}")
        elif old.words != new.words:
            print(f"{key}\n  words: {old.words}\n  now:   {new.words}")
    print(f"{different} of {len(before)} differ")
    seconds = [sum(one.seconds for one in results.values()) for results in (before, now)]
    print(f"{seconds[0]:.0f} s then, {seconds[1]:.0f} s now")
    return 5 if different else 0


def _name(form: str, scheme: str) -> str:
    return f"{form}-{scheme}".replace(":", ".").replace("+", "_")


def _conversions() -> list[dict[str, str]]:
    answer = _run("formats --json", keep=True)
    return list(json.loads(answer.words)["conversions"])


def _run(line: str, *, keep: bool = False) -> Result:
    """Give one command in a fork; ``keep``: its document is wanted."""
    arguments = line.split()
    if arguments[0] == "quantize" or (arguments[0] == "plan" and "--method" in line):
        arguments += CALIBRATED if arguments[0] == "quantize" else ()
    out = Path(arguments[arguments.index("-o") + 1]) if "-o" in arguments else None
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
        child = os.fork()
        if not child:
            _command(arguments, said.fileno(), told.fileno())
        _, status = os.waitpid(child, 0)
        for file in (said, told):
            file.seek(0)
        document, words = said.read(), told.read().decode("utf-8", "replace")
    result = Result(os.waitstatus_to_exitcode(status), seconds=round(time.monotonic() - start, 2))
    if keep:
        result.words = document.decode()
        return result
    if result.code:
        lines = [text for text in words.splitlines() if text.startswith(("error", "hint", "bug"))]
        result.words = " ".join(lines)[:300]
    if "--json" in arguments and not result.code:
        result.files["stdout"] = _digest(document)
    if out is not None:
        paths = [*out.parent.glob(f"{out.name}*"), *out.parent.glob(f"{out.stem}-*-of-*")]
        for path in sorted({below for top in paths for below in [top, *top.rglob("*")]}):
            if path.is_file():
                result.files[str(path.relative_to(out.parent))] = _digest(path.read_bytes(), path)
        if "e/" in str(out):
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return result


def _digest(data: bytes, path: Path | None = None) -> str:
    if path is None or path.suffix in {".json", ".jsonl"}:
        with suppress(ValueError):
            data = json.dumps(_without(json.loads(data)), sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:24]


def _without(value: Any) -> Any:
    """The same document without what a new version may change."""
    if isinstance(value, dict):
        return {
            key: _without(item)
            for key, item in value.items()
            if key not in {"versions", "seconds", "peak_bytes"}
        }
    return [_without(item) for item in value] if isinstance(value, list) else value


def _command(arguments: Sequence[str], out: int, err: int) -> None:
    """Never returns."""
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.argv = ["quantforge", *arguments]
        from quantforge.cli.app import main as command

        try:
            command()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _warm() -> None:
    """Import what is heavy and nothing that computes: a fork has one thread."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import quantforge.cli.app  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
