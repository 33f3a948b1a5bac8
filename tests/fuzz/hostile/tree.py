"""Build the sound files that cases begin with, and state the commands that read each of them.

A *role* is a kind of file that somebody else may have made. Its commands are those that read it, with ``{out}`` for
a place to write to. All is small: a llama of two layers, so that a whole quantization takes less than a second.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

CALIBRATED = ("--method", "gptq", "--samples", "4", "--length", "16", "--refine", "0")
SCORED = ("--no-speed", "--windows", "1", "--length", "16", "--text", "text.txt")
KEY = "key.pem"
TEXT = "the weights of the model are rounded to the nearest point of the grid, row by row\n"


@dataclass(frozen=True, slots=True)
class Role:
    """A file of the tree and the commands that read it."""

    path: str
    commands: tuple[tuple[str, ...], ...]


def _commands(*texts: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(text.split()) for text in texts)


_MODEL = _commands(
    "plan model --bits 4",
    "inspect model",
    "quantize model --bits 4 --scales absmax --rule re:.*=int4:g32 -o {out}",
    f"quantize model --bits 4 --rule re:.*=int4:g32 --calibration text.txt {' '.join(CALIBRATED)} -o {{out}}",
    "export model --format gguf --type Q8_0 -o {out}.gguf",
    f"eval model {' '.join(SCORED)}",
    "diff model ct",
    "verify ct --source model --no-forward",
)
_ARTIFACT = _commands(
    "inspect ct",
    "verify ct --no-forward",
    "verify ct --source model",
    "diff ct ct-same",
    "reproduce ct --source model",
    "export ct --format gguf -o {out}.gguf",
    "export ct --format gptq --allow-inexact -o {out}",
    f"eval model ct {' '.join(SCORED)}",
    "plan ct --bits 4",
)
_GGUF = _commands(
    "inspect m.gguf",
    "verify m.gguf --no-forward",
    "verify m.gguf --source model",
    "diff m.gguf model",
    "export m.gguf --format mlx --allow-inexact -o {out}",
    "export m.gguf --format plain -o {out}",
    f"eval model m.gguf {' '.join(SCORED)}",
    "quantize m.gguf --bits 4 --scales absmax -o {out}",
)
_TEXT = (
    "quantize model --rule re:.*=int4:g32 {options} --calibration {file} -o {{out}}",
    "eval model --no-speed --windows 1 --length 16 --text {file}",
)


def _text(file: str) -> tuple[tuple[str, ...], ...]:
    return _commands(*(text.format(options=" ".join(CALIBRATED), file=file) for text in _TEXT))


ROLES: Mapping[str, Role] = {
    **{
        f"model {name}": Role(f"model/{name}", _MODEL)
        for name in (
            "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
            "chat_template.jinja", "LICENSE", "README.md", "special_tokens_map.json",
        )
    },
    "index": Role("sharded/model.safetensors.index.json", _commands(
        "plan sharded --bits 4", "inspect sharded", "quantize sharded --bits 4 --scales absmax -o {out}",
        "export sharded --format gguf --type Q8_0 -o {out}.gguf", "diff sharded model")),
    **{
        f"artifact {name}": Role(f"ct/{name}", _ARTIFACT)
        for name in ("config.json", "quantforge.manifest.json", "model.safetensors", "README.md", "tokenizer.json")
    },
    "gguf": Role("m.gguf", _GGUF),
    "gguf manifest": Role("m.gguf.quantforge.json", _GGUF),
    "imatrix": Role("imatrix.gguf", _commands(
        "quantize model --format gguf --type Q4_0 --imatrix imatrix.gguf -o {out}.gguf",
        "plan model --format gguf --type Q4_K_M")),
    "recipe": Role("recipe.toml", _commands(
        "plan model --recipe recipe.toml", "quantize model --recipe recipe.toml --calibration text.txt -o {out}")),
    "text": Role("text.txt", _text("text.txt")),
    "jsonl": Role("text.jsonl", (*_text("text.jsonl"), *_text("text.jsonl:other"))),
    "parquet": Role("text.parquet", (*_text("text.parquet"), *_text("text.parquet:other"))),
    "folder of texts": Role("texts/a.txt", (*_text("texts"), *_text("texts:a"))),
    "key": Role(KEY, _commands(
        f"quantize model --bits 4 --scales absmax --sign {KEY} -o {{out}}", f"verify ct --key {KEY} --no-forward")),
    "interrupted run": Role(".*resumed*", _commands(  # a pattern: all that such a run leaves
        "quantize model --bits 4 --scales absmax --rule re:.*=int4:g32 -o resumed",
        "quantize model --bits 4 --scales absmax --rule re:.*=int4:g32 -o resumed --overwrite",
        "quantize model --bits 8 --scales absmax -o resumed")),
}  # fmt: skip


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


def build(root: Path, make_model: Callable[[Path], object]) -> None:
    """Make every sound file below ``root``; ``make_model`` saves a model with its tokenizer into a directory."""
    make_model(root / "model")
    model = root / "model"
    (model / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\n---\n# A model\n")
    (model / "LICENSE").write_text("Terms.\n")
    (model / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (root / "text.txt").write_text(TEXT * 40)
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text(TEXT * 40)
    lines = [json.dumps({"text": TEXT, "other": n}) for n in range(40)]
    (root / "text.jsonl").write_text("\n".join(lines))
    (root / "recipe.toml").write_text(
        'method = "gptq"\nbits = 4\n[[rule]]\nmatch = "re:.*"\nscheme = "int4:g32"\n'
        "[calibration]\nsamples = 4\nlength = 16\n[gptq]\nrefine = 0\n"
    )
    with suppress(ImportError):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": [TEXT] * 40, "other": list(range(40))})
        parquet.write_table(table, root / "text.parquet")
    _key(root / KEY)
    _sharded(model, root / "sharded")
    _artifacts(root)


def _key(path: Path) -> None:
    with suppress(ImportError):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        form = serialization.PrivateFormat.PKCS8
        key = ec.generate_private_key(ec.SECP256R1())
        path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        )


def _sharded(model: Path, place: Path) -> None:
    """The same model over two files."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, place)
    (place / "model.safetensors").unlink()
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    index: dict[str, str] = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, place / file, {"format": "pt"})
        index |= dict.fromkeys(half, file)
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def _artifacts(root: Path) -> None:
    """Quantize, export, observe; and leave one run in the middle."""
    plain = "quantize model --bits 4 --scales absmax --rule re:.*=int4:g32 -o"
    os.chdir(root)
    for line in (
        f"{plain} ct",
        "export model --format gguf --type Q8_0 -o m.gguf",
        "quantize model --format gguf --type Q4_0 --imatrix imatrix.gguf --calibration text.txt --samples 4 --length 16"
        " -o w.gguf",
        f"eval model ct {' '.join(SCORED)}",
        "verify ct --source model",
        f"quantize model --bits 4 --rule re:.*=int4:g32 --calibration text.txt {' '.join(CALIBRATED)} -o g",
    ):
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as told:
            code = run(line.split())
        if code:
            raise RuntimeError(f"{line}: {code}\n{told.getvalue()}")
    shutil.copytree(root / "ct", root / "ct-same")
    for left in ("g", "w.gguf", "w.gguf.quantforge.json"):
        path = root / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    _interrupted(plain)


def _interrupted(plain: str) -> None:
    """End a run after its second unit, as a kill would; what it leaves is found by the name of its output."""
    child = os.fork()
    if child == 0:
        from quantforge.execution.journal import Workspace

        commit, done = Workspace.commit, []

        def twice(work: Workspace, unit: str, record: Mapping[str, object]) -> None:
            commit(work, unit, record)
            done.append(unit)
            if len(done) == 2:
                os._exit(77)

        Workspace.commit = twice  # type: ignore[method-assign]
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            run([*plain.split(), "resumed"])
        os._exit(3)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 77:
        raise RuntimeError("the run to be interrupted was not")
