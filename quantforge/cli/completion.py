"""Words that a shell offers while somebody types: of a recipe's options, and models that lie where the word points.

Each list has its home elsewhere; nothing here opens more of a model than its directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from quantforge.checkpoint.recipe_fields import VALUES
from quantforge.events import KINDS
from quantforge.formats import FORMATS
from quantforge.formats.gguf.mixture import MIXTURES
from quantforge.formats.targets import TARGETS
from quantforge.grids import GRIDS
from quantforge.notation import ALIASES
from quantforge.planning.recipe_options import builtin_recipes
from quantforge.quantizers import METHODS

GGUF = ".gguf"
SCHEMES = (
    "int4:g128:sym",
    "int8:g128:sym",
    "int3:g64:asym",
    *GRIDS,
    *ALIASES,
)
Completer = Callable[[str], list[str]]


def among(*lists: Iterable[str]) -> Completer:
    """Return a completer for words of some lists; of a sum such as ``awq+gptq`` the last part is completed."""
    known = [word for words in lists for word in words]

    def complete(incomplete: str) -> list[str]:
        head, plus, last = incomplete.rpartition("+")
        return [
            f"{head}{plus}{word}" for word in known if word.startswith(last) and word not in head
        ]

    return complete


def models(incomplete: str) -> list[str]:
    """Return local models that a word may become, and the directories on the way to them."""
    folder, _, name = incomplete.rpartition("/")
    place = Path(f"{folder}/" if incomplete.startswith("/") else folder or ".").expanduser()
    found = []
    try:
        for path in sorted(place.iterdir()):
            if not path.name.startswith(name) or (path.name[0] == "." and not name):
                continue
            word = f"{folder}/{path.name}" if "/" in incomplete else path.name
            if path.is_dir():
                model = (path / "config.json").is_file() or any(path.glob("*.safetensors"))
                found.append(word if model else f"{word}/")
            elif path.suffix in {GGUF, ".safetensors"}:
                found.append(word)
    except OSError:
        return []
    return found


def recipes(incomplete: str) -> list[str]:
    """Return the built-in recipes, and recipe files."""
    folder, _, _ = incomplete.rpartition("/")
    try:
        files = [str(path) for path in sorted(Path(folder or ".").glob("*.toml"))]
    except OSError:
        files = []
    return [word for word in (*builtin_recipes(), *files) if word.startswith(incomplete)]


# By the names of choices of a recipe: all values of those that take few, what is offered for the others.
WORDS: Mapping[str, Iterable[str]] = {
    "method": METHODS,
    "format": FORMATS,
    "engine": TARGETS,
    "type": MIXTURES,
    **{name.rpartition(".")[2]: words for name, words in VALUES.items()},
}
OF_CHOICES: Mapping[str, Completer] = {
    **{name: among(words) for name, words in WORDS.items()},
    **dict.fromkeys(("scheme", "head", "embedding"), among(SCHEMES)),
    "calibration": among(("builtin", "self", "none")),
    "recipe": recipes,
    "adapter": models,
}


def events(incomplete: str) -> list[str]:
    """Return the kinds of events, as ``--allow`` takes them."""
    return [f"{kind}=" for kind in KINDS if kind.startswith(incomplete)]
