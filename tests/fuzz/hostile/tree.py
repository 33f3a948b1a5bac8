"""Build the sound files that cases begin with, and run commands on them.

All is small: models of a few layers of 64 columns, so that a whole quantization takes less than a second.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

from tests.fuzz.hostile.roles import CALIBRATED, KEY, PUBLIC, SCORED
from tests.fuzz.hostile.sources import build_sources

TEXT = "the weights of the model are rounded to the nearest point of the grid, row by row\n"


def run(arguments: Sequence[str]) -> int:
    """Run a command of the program in this process and return its exit code."""
    import sys

    from quantforge.cli.app import main

    sys.argv = ["quantforge", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def build(root: Path, make: Callable[[str, Path], object]) -> None:
    """Make every sound file below ``root``; ``make(family, place)`` saves a model with its tokenizer."""
    model = root / "model"
    make("llama-tied", model)
    build_sources(root, make)
    (model / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\n---\n# A model\n")
    (model / "LICENSE").write_text("Terms.\n")
    (model / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (root / "text.txt").write_text(TEXT * 40)
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text(TEXT * 40)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": TEXT}]
    lines = [json.dumps({"text": TEXT, "other": n, "messages": messages}) for n in range(40)]
    (root / "text.jsonl").write_text("\n".join(lines))
    (root / "prompts.txt").write_text("Explain the weights.\n\nRound to the grid.\n")
    (root / "prompts.jsonl").write_text(
        '{"prompt": "Explain.", "text": "Round."}\n{"prompt": "b", "text": "c"}\n'
    )
    (root / "recipe.toml").write_text(
        'method = "gptq"\nbits = 4\n[[rule]]\nmatch = "re:.*"\nscheme = "int4:g32"\n'
        "[calibration]\nsamples = 4\nlength = 16\n[gptq]\nrefine = 0\n"
    )
    with suppress(ImportError):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": [TEXT] * 40, "other": list(range(40))})
        parquet.write_table(table, root / "text.parquet")
    _write_keys(root)
    _write_sharded(model, root / "sharded")
    _build_artifacts(root)


def _write_keys(root: Path) -> None:
    """Write a private key and its public one."""
    with suppress(ImportError):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        private_format = serialization.PrivateFormat.PKCS8
        key = ec.generate_private_key(ec.SECP256R1())
        pem = serialization.Encoding.PEM
        (root / KEY).write_bytes(
            key.private_bytes(pem, private_format, serialization.NoEncryption())
        )
        public = serialization.PublicFormat.SubjectPublicKeyInfo
        (root / PUBLIC).write_bytes(key.public_key().public_bytes(pem, public))


def _write_sharded(model: Path, output: Path) -> None:
    """The same model over two files."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, output)
    (output / "model.safetensors").unlink()
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    index: dict[str, str] = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, output / file, {"format": "pt"})
        index |= dict.fromkeys(half, file)
    (output / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def _build_artifacts(root: Path) -> None:
    """Quantize, export, observe; and leave one run in the middle."""
    plain = "quantize model --bits 4 --scales absmax --rule re:.*=int4:g32 -o"
    os.chdir(root)
    for line in (
        f"{plain} ct",
        "export model --format gguf --type Q8_0 -o m.gguf",
        "quantize model --format gguf --type Q4_0 --imatrix imatrix.gguf --calibration text.txt --samples 4 --length 16"
        " -o w.gguf",
        "quantize model --format gguf --type Q4_0 --imatrix imatrix.dat --calibration text.txt --samples 4 --length 16"
        " -o v.gguf",
        f"{plain} signed --sign {KEY}",
        "generate model hello --max-tokens 2",
        f"eval model ct {' '.join(SCORED)}",
        "verify ct --source model",
        f"quantize model --bits 4 --rule re:.*=int4:g32 --calibration text.txt {' '.join(CALIBRATED)} -o g",
    ):
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as stderr:
            code = run(line.split())
        if code:
            raise RuntimeError(f"{line}: {code}\n{stderr.getvalue()}")
    shutil.copytree(root / "ct", root / "ct-same")
    for left in ("g", *(f"{n}.gguf{end}" for n in "vw" for end in ("", ".quantforge.json"))):
        path = root / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    _leave_interrupted_run(plain)


def _leave_interrupted_run(plain: str) -> None:
    """End a run after its second unit, as a kill would; what it leaves is found by the name of its output."""
    child = os.fork()
    if child == 0:
        from quantforge.execution.journal import Journal

        commit, done = Journal.commit, []

        def twice(work: Journal, unit: str, record: Mapping[str, object]) -> None:
            commit(work, unit, record)
            done.append(unit)
            if len(done) == 2:
                os._exit(77)

        Journal.commit = twice  # type: ignore[method-assign]
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            run([*plain.split(), "resumed"])
        os._exit(3)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 77:
        raise RuntimeError("the run to be interrupted was not")
