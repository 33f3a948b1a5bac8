"""Find a model: a directory, or ``org/name[@revision]`` in the cache of huggingface_hub.

An existing path takes precedence over a name of the hub, and ``./`` (or ``/``, ``../``, ``~``) always means a path.
Only files that a conversion reads or copies are fetched: no pickles, no code, no second copy of the weights. Offline
(``--offline`` or HF_HUB_OFFLINE) the network is not used: what is not in the cache is an error that says what to type.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from quantforge.errors import InputError
from quantforge.files.disk import run_folder

# Both parts begin with a letter or a digit: no path that begins with ., / or ~ is a name.
_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<name>[\w.-]+/[\w.-]+).*", re.ASCII
)
_MAX_LISTED = 4  # models inside of a directory
_MAX_REPOSITORY_NAME = 96  # characters
_FETCHED_PATTERNS = [
    "*.safetensors", "*.json", "*.txt", "*.jinja", "*.tiktoken", "tokenizer.model*", "*.model",
    "README.md", "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*",
]  # fmt: skip
_FILE_SUFFIXES = (".gguf", ".safetensors", ".toml", ".json")  # endings of what is no directory
_SKIPPED_PATTERNS = ["consolidated*.safetensors", "*/*.safetensors"]


def resolve_model(model: str, offline: bool = False, cache_dir: Path | None = None) -> Path:
    """Return the directory of a model, downloading it from the hub if needed.

    Args:
        model: a path, or ``org/name`` with an optional ``@revision`` (branch, tag or commit).
        offline: use only the cache.
        cache_dir: the cache of the hub; None: HF_HUB_CACHE.

    Raises:
        InputError: no such path or model, not cached while offline, gated, or not reachable.
    """
    try:
        path = Path(model).expanduser()
        if model and path.exists():
            path.resolve().name.encode()
            return path
    except UnicodeEncodeError as error:
        raise InputError(
            f"{str(path.resolve())!a}: the name is not UTF-8, no manifest could hold it",
            "rename it",
        ) from error
    except (OSError, RuntimeError, ValueError):
        pass  # a name too long for a file, no such home, or a null
    if url := _URL.fullmatch(model):
        raise InputError(
            f"{model}: an address, not the name of a model",
            f"{url['name']}, or {_download_hint(url['name'])}",
        )
    match = _HUB_NAME.fullmatch(model)
    if match is None:
        if model and _is_unfinished_output(Path(model)):
            raise InputError(
                f"{model}: no such directory; a run that makes it has not ended",
                "type the command that was interrupted again: it goes on",
            )
        raise InputError(
            f"{model}: {_missing_message(model)}", _similar_name_hint(model) or _MODEL_HINT
        )
    return _download_snapshot(match["name"], match["revision"], offline, cache_dir)


def _download_hint(name: str) -> str:
    """Return the command that downloads a model to a local directory."""
    local_name = name.partition("/")[2]
    return f"where there is a network, type: hf download {name} --local-dir {local_name}, and give ./{local_name}"


_MODEL_HINT = "give a directory, or org/name[@revision] of the hub"


def _missing_message(name: str) -> str:
    """Return "no such file" or "no such directory", depending on the suffix of the name."""
    return f"no such {'file' if Path(name).suffix.lower() in _FILE_SUFFIXES else 'directory'}"


def _similar_name_hint(model: str) -> str:
    """Return "did you mean ...?" with the most similar name in the same directory; "" without one."""
    path = Path(model)
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    matches = get_close_matches(path.name, names, 1, cutoff=0.7)
    return f"did you mean '{path.with_name(matches[0])}'?" if matches else ""


def hint_for_directory(path: Path) -> str:
    """Return a hint for a directory that is an adapter or contains models; "" otherwise."""
    if (path / "adapter_config.json").is_file():
        return f"it is an adapter: quantforge quantize BASE --adapter {path}"
    try:
        models = [
            str(entry)
            for entry in sorted(path.iterdir())
            if entry.suffix == ".gguf" or (entry / "config.json").is_file()
        ]
    except OSError:
        return ""
    more_suffix = f" (and {len(models) - _MAX_LISTED} more)" if len(models) > _MAX_LISTED else ""
    return f"a model is inside: {' or '.join(models[:_MAX_LISTED])}{more_suffix}" if models else ""


def _is_unfinished_output(path: Path) -> bool:
    try:
        return run_folder(path).exists()
    except (OSError, ValueError):  # no name, or one that is too long for a file
        return False


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form ``org/name``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text, re.ASCII) is not None


def repository_name(text: str) -> str:
    """Convert a name to one that the hub accepts for a repository: without ``+``, ``--`` and ``..``."""
    safe_text = re.sub(r"([-.])\1+", r"\1", re.sub(r"[^\w.-]", "-", text, flags=re.ASCII))
    return safe_text[:_MAX_REPOSITORY_NAME].strip("-.") or "model"


def source_name(path: Path) -> tuple[str, str]:
    """Return the name of a model without its local path, and its revision if it came from the hub."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        repository = path.parent.parent.name.removeprefix("models--")
        return repository.replace("--", "/", 1), path.name
    return path.name, ""


def _download_snapshot(
    name: str, revision: str | None, offline: bool, cache_dir: Path | None
) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    offline = offline or constants.HF_HUB_OFFLINE
    label = f"{name}@{revision}" if revision else name
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=offline,
                allow_patterns=_FETCHED_PATTERNS,
                ignore_patterns=_SKIPPED_PATTERNS,
            )
        )
    except errors.GatedRepoError as error:
        raise InputError(
            f"{label}: access has to be granted by its publisher",
            f"accept its terms at https://huggingface.co/{name}, then type: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{label}: no such revision", f"try {name} without @{revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{label}: {_missing_message(name)}, and no such model on the hub",
            "check the name; for a private model type: hf auth login; for a directory write ./...",
        ) from error
    except (errors.HFValidationError, *errors.HfHubHTTPError.__bases__) as error:
        # The bases: OSError, and the root of what the HTTP library of this version raises.
        if offline:
            raise InputError(
                f"{label}: {_missing_message(name)}, and not (or not whole) in the cache while offline",
                f"where there is a network, type: hf download {name}"
                + (f" --revision {revision}" if revision else ""),
            ) from error
        raise InputError(
            f"{label}: cannot be fetched: {str(error).splitlines()[0]}",
            f"check the name and the network; with --offline only the cache is used; or {_download_hint(name)}",
        ) from error
