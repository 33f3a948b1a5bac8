"""Location of a model: a directory, or ``org/name[@revision]`` in the cache of huggingface_hub.

A path that exists wins over a name of the hub, and ``./`` (or ``/``, ``../``, ``~``) always means a
path. Only files that a conversion reads or carries are fetched: no pickles, no code, no second copy
of the weights. Offline (``--offline`` or HF_HUB_OFFLINE) nothing is asked of the network: what is
not in the cache is an error that says what to type, never an empty result.
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
_NAMED = 4  # models inside of a directory
_LONGEST_REPOSITORY = 96  # characters
_WANTED = [
    "*.safetensors", "*.json", "*.txt", "*.jinja", "*.tiktoken", "tokenizer.model*", "*.model",
    "README.md", "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*",
]  # fmt: skip
_FILES = (".gguf", ".safetensors", ".toml", ".json")  # endings of what is no directory
_UNWANTED = ["consolidated*.safetensors", "*/*.safetensors"]


def resolve(model: str, offline: bool = False, cache_dir: Path | None = None) -> Path:
    """Return the directory of a model, fetching it from the hub if need be.

    Args:
        model: a path, or ``org/name`` with an optional ``@revision`` (branch, tag or commit).
        offline: use only what is in the cache.
        cache_dir: the cache of the hub; HF_HUB_CACHE when left out.

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
            f"{url['name']}, or {_fetch(url['name'])}",
        )
    match = _HUB_NAME.fullmatch(model)
    if match is None:
        if model and _unfinished(Path(model)):
            raise InputError(
                f"{model}: no such directory; a run that makes it has not ended",
                "type the command that was interrupted again: it goes on",
            )
        raise InputError(f"{model}: {_missing(model)}", _near(model) or _GIVE)
    return _snapshot(match["name"], match["revision"], offline, cache_dir)


def _fetch(name: str) -> str:
    """Return the command that downloads a model to a local directory."""
    local = name.partition("/")[2]
    return f"where there is a network, type: hf download {name} --local-dir {local}, and give ./{local}"


_GIVE = "give a directory, or org/name[@revision] of the hub"


def _missing(name: str) -> str:
    """Return "no such file" or "no such directory", by the suffix of the name."""
    return f"no such {'file' if Path(name).suffix.lower() in _FILES else 'directory'}"


def _near(model: str) -> str:
    """Return "did you mean ...?" with the most similar name in the same directory; "" without one."""
    place = Path(model)
    try:
        there = [one.name for one in place.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    close = get_close_matches(place.name, there, 1, cutoff=0.7)
    return f"did you mean '{place.with_name(close[0])}'?" if close else ""


def models_within(path: Path) -> str:
    """Return a hint for a directory that is an adapter or contains models; "" otherwise."""
    if (path / "adapter_config.json").is_file():
        return f"it is an adapter: quantforge quantize BASE --adapter {path}"
    try:
        found = [
            str(one)
            for one in sorted(path.iterdir())
            if one.suffix == ".gguf" or (one / "config.json").is_file()
        ]
    except OSError:
        return ""
    more = f" (and {len(found) - _NAMED} more)" if len(found) > _NAMED else ""
    return f"a model is inside: {' or '.join(found[:_NAMED])}{more}" if found else ""


def _unfinished(path: Path) -> bool:
    try:
        return run_folder(path).exists()
    except (OSError, ValueError):  # no name, or one that is too long for a file
        return False


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form ``org/name``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text, re.ASCII) is not None


def repository_name(text: str) -> str:
    """Return the name under which the hub would keep a result: it takes no ``+``, no ``--`` and no ``..``."""
    plain = re.sub(r"([-.])\1+", r"\1", re.sub(r"[^\w.-]", "-", text, flags=re.ASCII))
    return plain[:_LONGEST_REPOSITORY].strip("-.") or "model"


def source_name(path: Path) -> tuple[str, str]:
    """Return the name of a model without its local path, and its revision if it came from the hub."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        repository = path.parent.parent.name.removeprefix("models--")
        return repository.replace("--", "/", 1), path.name
    return path.name, ""


def _snapshot(name: str, revision: str | None, offline: bool, cache_dir: Path | None) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    offline = offline or constants.HF_HUB_OFFLINE
    where = f"{name}@{revision}" if revision else name
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=offline,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except errors.GatedRepoError as error:
        raise InputError(
            f"{where}: access has to be granted by its publisher",
            f"accept its terms at https://huggingface.co/{name}, then type: hf auth login",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{where}: no such revision", f"try {name} without @{revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{where}: {_missing(name)}, and no such model on the hub",
            "check the name; for a private model type: hf auth login; for a directory write ./...",
        ) from error
    except (errors.HFValidationError, *errors.HfHubHTTPError.__bases__) as error:
        # The bases: OSError, and the root of what the HTTP library of this version raises.
        if offline:
            raise InputError(
                f"{where}: {_missing(name)}, and not (or not whole) in the cache while offline",
                f"where there is a network, type: hf download {name}"
                + (f" --revision {revision}" if revision else ""),
            ) from error
        raise InputError(
            f"{where}: cannot be fetched: {str(error).splitlines()[0]}",
            f"check the name and the network; with --offline only the cache is used; or {_fetch(name)}",
        ) from error
