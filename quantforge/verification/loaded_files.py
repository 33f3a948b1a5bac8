"""Files that a loader would run or read instead of the model's own.

Every name below the artifact is looked at. It is part of the model (weights, index, configuration), or compared with
the source by `side_files`, or a row of `LOADED` says who would read it; nobody is known to read anything else. A file
that the source has too, byte for byte, is at most a warning.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from quantforge.checkpoint.reader import CONFIG, INDEX
from quantforge.errors import InputError
from quantforge.results import manifest
from quantforge.verification.findings import Report, Severity
from quantforge.verification.opening import Artifact, Original
from quantforge_calibration.chat_templates import is_template

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
SETTINGS = "tokenizer_config.json"
# They say again what tokenizer.json or the configuration says, and have to agree with it.
REPEATED = frozenset({"special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"})
COPIES = frozenset({"quantize_config.json", "quant_config.json", "quantization_config.json"})


class LoadedFile(NamedTuple):
    """What a loader does with files of some names, and how bad that is if no source is known."""

    does: str
    alone: Severity | None
    patterns: str


LOADED: tuple[LoadedFile, ...] = (
    LoadedFile("loaders apply an adapter that lies beside a model", Severity.ERROR,
        "adapter_config.json adapter_model.* *adapter*.safetensors"),
    LoadedFile("code, which loaders run when they are allowed to", Severity.WARNING,
        "*.py *.pyc *.so *.dll *.dylib *.sh *.cu custom_generate*"),
    LoadedFile("pickled or other weights, or an index of them, which some loaders prefer", Severity.ERROR,
        "*.bin *.pt *.pth *.pkl *.pickle *.ckpt *.ckpt.* *.joblib *.npz *.npy *.h5 *.msgpack *.ot *.nemo *.dill"
        " *.safetensors *.index.json consolidated* *.gguf *.ggml *.onnx *.onnx_data *.tflite *.mlmodel *.engine"
        " *.llamafile *.pt2 openvino*"),
    LoadedFile("a description of the quantization that vLLM and TensorRT-LLM read", Severity.ERROR,
        "hf_quant_config.json"),
    LoadedFile("another tokenizer, template or processor, which some loaders read", None,
        "tokenizer.* tokenizer_*.json *.tiktoken *.model *.model.v* *.spm vocab*.* merges.txt spiece* *.vocab bpe.codes"
        " sentencepiece* chat_template* *.jinja *.jinja2 *processor_config.json"),
    LoadedFile("another configuration, which some loaders read", Severity.WARNING,
        "config.*.json configuration*.json config_*.json *_config.json *-config.json *.config config.y*ml params*.json"
        " tekken.json modelfile *.modelfile modules.json model_index.json *cache*.json *_description.json [0-9]_*/*"),
)  # fmt: skip


def check_foreign(report: Report, artifact: Artifact, source: Original | None) -> None:
    """Report every file that a loader reads and that belongs neither to the model nor to the source."""
    root = report.path
    if not root.is_dir():
        report.skip("only in directories", "foreign")
        return
    other = source.checkpoint.path if source and source.checkpoint.path.is_dir() else None
    own = {str(path.relative_to(root)) for path in artifact.checkpoint.shards}
    own |= {CONFIG, INDEX, GENERATION, TOKENIZER, SETTINGS, *REPEATED, *COPIES}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        row = row_of(name)
        directory = path.is_dir() and not path.is_symlink()
        if row is None or directory or name in own or is_template(name):
            continue
        if other is None:
            if row.alone:
                report.add("foreign", name, f"{row.does}; it is not part of this model", row.alone)
        elif not (other / name).is_file():
            report.add("foreign", name, f"{row.does}; the source has no such file")
        elif name.endswith("processor_config.json") or name == "chat_template.json":
            continue  # compared by `side_files`
        elif not _equal(root, other, name):
            report.add("foreign", name, f"{row.does}; it differs from the source's")
        elif row.alone is Severity.ERROR:
            report.warn("foreign", name, f"{row.does}; it is the source's, not quantized")


def row_of(name: str) -> LoadedFile | None:
    """Return the first row of `LOADED` with a pattern that fits a name or its last part."""
    parts = (name.lower(), name.lower().rpartition("/")[2])
    fits = ((row, pattern) for row in LOADED for pattern in row.patterns.split())
    return next((row for row, pat in fits if any(fnmatchcase(part, pat) for part in parts)), None)


def _equal(own: Path, other: Path, name: str) -> bool:
    """Return whether two directories have the same bytes under a name."""
    try:
        return manifest.sha256(own / name, own) == manifest.sha256(other / name, other)
    except (InputError, OSError):
        return False
