"""Files that a loader would run or read instead of the model's own.

Every name below the artifact is looked at. It is part of the model (weights, index, configuration), or compared with
the source by `side_files`, or a row of `LOADED` says who would read it, or it is known to be read by nobody (`INERT`).
A file that the source has too, byte for byte, is at most a warning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.index import INDEX
from quantforge.checkpoint.reader import CARD, CONFIG, is_licence
from quantforge.checkpoint.result_place import OF_DIRECTORY
from quantforge.errors import InputError
from quantforge.formats.gguf.modelfile import modelfile
from quantforge.results import manifest
from quantforge.verification.findings import Report, Severity
from quantforge.verification.opening import Artifact, Original
from quantforge_calibration.chat_templates import LAYOUTS, is_template
from quantforge_files.roles import TEMPLATE

GENERATION, TOKENIZER, SETTINGS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
# They say again what tokenizer.json or the configuration says, and have to agree with it.
REPEATED = frozenset({"special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"})
COPIES = frozenset({"quantize_config.json", "quant_config.json", "quantization_config.json"})
MOST_FILES = 10_000


class LoadedFile(NamedTuple):
    """Patterns of names, what a loader does with such a file, and how bad it is if no source is known."""

    patterns: str
    does: str
    alone: Severity | None = Severity.ERROR


_W = Severity.WARNING
LOADED: tuple[LoadedFile, ...] = (
    LoadedFile("adapter_config.json adapter_model.* *adapter*.safetensors",
           "loaders apply an adapter that lies beside a model"),
    LoadedFile("*.py *.pyc *.so *.dll *.dylib *.sh *.cu custom_generate/*",
           "code, which loaders run when they are allowed to", _W),
    LoadedFile("*.bin *.pt *.pth *.pkl *.pickle *.ckpt *.ckpt.* *.joblib *.npz *.npy *.h5 *.msgpack *.ot *.nemo *.dill",
           "pickled or other weights, which some loaders prefer"),
    LoadedFile("consolidated*", "weights that vLLM reads first, in Mistral's format"),
    LoadedFile("params.json tekken.json", "vLLM reads it first, in Mistral's format", _W),
    LoadedFile("*.safetensors *.safetensors.index.json *.index.json", "other weights, or another index of them"),
    LoadedFile("*.gguf *.ggml *.onnx *.onnx_data *.tflite *.mlmodel *.engine *.llamafile", "another model"),
    LoadedFile("hf_quant_config.json", "a description of the quantization that vLLM and TensorRT-LLM read"),
    LoadedFile("modules.json config_sentence_transformers.json sentence_*_config.json [0-9]_*/*",
           "a pipeline of sentence-transformers around the model", _W),
    LoadedFile("config.*.json configuration*.json config_*.json *.config params*.json model_config.json",
           "another configuration, which some loaders read", _W),
    LoadedFile("*processor_config.json", "settings of a processor of images or sounds", None),
    LoadedFile("tokenizer.* tokenizer_*.json *.tiktoken *.model *.model.v* *.spm vocab*.* merges.txt spiece* *.vocab"
           " bpe.codes sentencepiece*", "another tokenizer, which some loaders read", None),
    LoadedFile("chat_template* *.jinja *.jinja2", "a chat template", None),
    LoadedFile("Modelfile *.Modelfile", "settings that Ollama obeys", _W),
)  # fmt: skip
INERT = (
    "*.md *.txt *.rst *.csv *.log *.log.jsonl *.png *.jpg *.jpeg *.gif *.svg *.webp *.pdf *.html *.yaml *.yml *.toml"
    " .gitattributes .gitignore .cache/* .git/* .eval_results/* provenance.intoto.json bom.cdx.json imatrix.dat"
    " *.imatrix"
)


def check_foreign(report: Report, artifact: Artifact, source: Original | None) -> None:
    """Report every file that a loader reads and that belongs neither to the model nor to the source."""
    if not report.path.is_dir():
        _check_modelfile(report)
        return
    checkpoint = artifact.checkpoint
    own = {str(path.relative_to(checkpoint.path)) for path in checkpoint.shards}
    own |= {CONFIG, CARD, INDEX, manifest.NAME, OF_DIRECTORY, *COPIES}
    for name in _names(report):
        row = row_of(name)
        unread = is_licence(name) or (row is None and _fits(name, INERT))
        if name in own or compared(name) or unread:
            continue
        does = row.does if row else "no loader is known to read it"
        if source is None or not source.checkpoint.path.is_dir():
            if severity := row.alone if row else _W:
                report.add("foreign", name, f"{does}; it is not part of this model", severity)
            continue
        there = (source.checkpoint.path / name).is_file()
        if there and _equal(report.path, source.checkpoint.path, name):
            if row and row.alone is Severity.ERROR:
                report.warn("foreign", name, f"{does}; it is the source's, not quantized")
        elif not (there and is_processor(name)):
            what = "it differs from the source's" if there else "the source has no such file"
            report.add("foreign", name, f"{does}; {what}", Severity.ERROR if row else _W)


def compared(name: str) -> bool:
    """Return whether the meaning of a file is compared with the source, even if only one side has it."""
    named = name in {CONFIG, GENERATION, TOKENIZER, SETTINGS, *REPEATED, *LAYOUTS}
    return (named or is_template(name)) and not is_processor(name)


def is_processor(name: str) -> bool:
    """Return whether a file of this name holds settings of a processor of images or sounds."""
    return fnmatchcase(name, "*processor_config.json")


def row_of(name: str) -> LoadedFile | None:
    """Return the first row of `LOADED` with a pattern that fits a name or its last part."""
    return next((row for row in LOADED if _fits(name, row.patterns)), None)


def _fits(name: str, patterns: str) -> bool:
    parts = (name, name.rpartition("/")[2])
    return any(fnmatchcase(part, pattern) for pattern in patterns.split() for part in parts)


def _names(report: Report) -> Iterator[str]:
    """Yield every file below the artifact, sorted; a link to a directory counts as a file."""
    count, root = 0, report.path
    for folder, inner, files in os.walk(root):
        inner.sort()
        links = [name for name in inner if (Path(folder) / name).is_symlink()]
        for name in sorted((*files, *links)):
            if (count := count + 1) > MOST_FILES:
                report.add("foreign", root.name, f"holds more than {MOST_FILES} files")
                return
            yield (Path(folder) / name).relative_to(root).as_posix()


def _equal(own: Path, other: Path, name: str) -> bool:
    """Return whether two directories have the same bytes under a name."""
    try:
        if (own / name).stat().st_size != (other / name).stat().st_size:
            return False
        return manifest.sha256(own / name, own) == manifest.sha256(other / name, other)
    except (InputError, OSError):
        return False


def _check_modelfile(report: Report) -> None:
    """Check that a Modelfile beside a GGUF file is what would be written for it."""
    place = report.path.with_suffix(".Modelfile")
    if not place.is_file():
        return
    try:
        same = FILES.read(place, TEMPLATE, None) == modelfile(report.path).encode()
    except InputError:
        same = False
    if not same:
        report.warn(
            "foreign", place.name, "settings that Ollama obeys; they are not those of the file"
        )
