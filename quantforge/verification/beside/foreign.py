"""Files beside a model that some loader reads, or reads first, and that the source does not have.

Every name in the directory is looked at, whatever it is called: it is part of the model (weights, index, configuration,
what `quantforge.verification.beside` compares key by key), or a row of `LOADED` says who would read it, or it is known
to be read by nobody (`INERT`), or it is unknown, which is said. What the source has, byte for byte, is the source's
business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.index import INDEX
from quantforge.checkpoint.reader import CARD, CONFIG, is_licence
from quantforge.checkpoint.result_place import OF_DIRECTORY
from quantforge.errors import InputError
from quantforge.formats.gguf.modelfile import modelfile
from quantforge.results import manifest
from quantforge.verification.beside.trees import plain
from quantforge.verification.findings import Report, Severity
from quantforge.verification.opening import Artifact, Original
from quantforge_files.roles import TEMPLATE

MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A row: patterns of names, what a loader does with the file, and how bad it is when no source is known."""

    patterns: str
    does: str
    alone: Severity | None = Severity.ERROR


_W, _E = Severity.WARNING, Severity.ERROR
LOADED: tuple[LoadedFile, ...] = (
    LoadedFile("adapter_config.json adapter_model.* *adapter*.safetensors",
           "loaders put an adapter that lies beside a model on it"),
    LoadedFile("*.py *.pyc *.so *.dll *.dylib *.sh *.cu custom_generate/*",
           "code, which loaders run when they are allowed to", _W),
    LoadedFile("*.bin *.pt *.pth *.pkl *.pickle *.ckpt *.ckpt.* *.joblib *.npz *.npy *.h5 *.msgpack *.ot *.nemo *.dill",
           "pickled or other weights, which some loaders prefer"),
    LoadedFile("consolidated*", "weights that vLLM reads first, in Mistral's format"),
    LoadedFile("params.json tekken.json", "what vLLM reads first, in Mistral's format", _W),
    LoadedFile("*.safetensors *.safetensors.index.json *.index.json", "other weights, or another index of them"),
    LoadedFile("*.gguf *.ggml *.onnx *.onnx_data *.tflite *.mlmodel *.engine *.llamafile",
               "another model beside this one"),
    LoadedFile("hf_quant_config.json", "a description of the quantization that vLLM and TensorRT-LLM read"),
    LoadedFile("modules.json config_sentence_transformers.json sentence_*_config.json [0-9]_*/*",
           "a pipeline of sentence-transformers around the model", _W),
    LoadedFile("config.*.json configuration*.json config_*.json *.config params*.json model_config.json",
           "another configuration, which some loaders take", _W),
    LoadedFile("*processor_config.json", "settings of a processor of images or sounds", None),
    LoadedFile("tokenizer.* tokenizer_*.json *.tiktoken *.model *.model.v* *.spm vocab*.* merges.txt spiece* *.vocab"
           " bpe.codes sentencepiece* special_tokens_map.json added_tokens.json",
           "another tokenizer, which some loaders take", None),
    LoadedFile("chat_template* *.jinja *.jinja2 additional_chat_templates/*", "a chat template", None),
    LoadedFile("Modelfile *.Modelfile", "settings that Ollama obeys", _W),
)  # fmt: skip
# Read by people or by nobody.
INERT = (
    "*.md", "*.txt", "*.rst", "*.csv", "*.log", "*.log.jsonl", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp",
    "*.pdf", "*.html", "*.yaml", "*.yml", "*.toml", ".gitattributes", ".gitignore", ".cache/*", ".git/*",
    ".eval_results/*", "provenance.intoto.json", "bom.cdx.json", "imatrix.dat", "*.imatrix",
)  # fmt: skip
# Said in the configuration too, and compared with it by `quantforge.verification.beside.within`.
COPIES = frozenset({"quantize_config.json", "quant_config.json", "quantization_config.json"})


def check_foreign(report: Report, artifact: Artifact, source: Original | None) -> None:
    """Report every file that a loader reads and that neither belongs to the model nor to the source."""
    if not report.path.is_dir():
        _check_modelfile(report)
        return
    own = _own(artifact)
    for name in _names(report):
        if name not in own:
            row = row_of(name)
            if row is not None or not inert(name):
                _tell(report, name, row, source)


def row_of(name: str) -> LoadedFile | None:
    """Return the first row of `LOADED` with a pattern that fits a name or its last part."""
    last = name.rpartition("/")[2]
    for row in LOADED:
        if any(
            fnmatchcase(part, pattern) for pattern in row.patterns.split() for part in (name, last)
        ):
            return row
    return None


def inert(name: str) -> bool:
    """Return whether no program loads a file of this name."""
    return is_licence(name) or any(fnmatchcase(name, pattern) for pattern in INERT)


def _tell(report: Report, name: str, row: LoadedFile | None, source: Original | None) -> None:
    shown = plain(name)
    does = row.does if row else "no loader that is known reads it"
    if source is None or not source.checkpoint.path.is_dir():
        severity = row.alone if row else _W
        if severity is not None:
            report.add("foreign", shown, f"{does}; it is no part of this model", severity)
        return
    original = source.checkpoint.path / name
    if _equal(report, source, name):
        if row is not None and row.alone is _E:
            report.warn("foreign", shown, f"{does}; it is the source's, not quantized")
        return
    what = "is not the source's" if original.is_file() else "the source has no such file"
    report.add("foreign", shown, f"{does}; {what}", _E if row else _W)


def _own(artifact: Artifact) -> set[str]:
    """Return names that belong to the model: what is read, and what is compared elsewhere."""
    checkpoint = artifact.checkpoint
    root = checkpoint.path
    shards = {str(path.relative_to(root)) for path in checkpoint.shards}
    index = {INDEX} if (root / INDEX).is_file() else set()
    ours = {CONFIG, CARD, manifest.NAME, OF_DIRECTORY}
    compared = {str(path.relative_to(root)) for path in checkpoint.side_files}
    return shards | index | ours | compared | COPIES


def _names(report: Report) -> Iterator[str]:
    """Yield every file below the artifact, sorted; a link to a directory counts as a file."""
    count = 0
    root = report.path
    for folder, inner, files in os.walk(root):
        inner.sort()
        links = [name for name in inner if (Path(folder) / name).is_symlink()]
        for name in sorted((*files, *links)):
            count += 1
            if count > MAX_FILES:
                report.add("foreign", root.name, f"holds more than {MAX_FILES} files")
                return
            yield str((Path(folder) / name).relative_to(root))


def _equal(report: Report, source: Original, name: str) -> bool:
    """Return whether the source has a file of that name with the same bytes."""
    places = [(root / name, root) for root in (report.path, source.checkpoint.path)]
    try:
        if len({path.stat().st_size for path, _ in places}) > 1:
            return False
        (first, second) = (manifest.sha256(path, root) for path, root in places)
    except (InputError, OSError):
        return False
    return first == second


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
            "foreign", plain(place.name), "settings that Ollama obeys; not those of the file"
        )
