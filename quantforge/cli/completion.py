"""Words that a shell offers for the values of options; names of files are offered by the shell itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from quantforge.formats import FORMATS
from quantforge.formats.gguf.mixture import MIXTURES
from quantforge.formats.targets import TARGETS
from quantforge.grids import GRIDS
from quantforge.notation import ALIASES
from quantforge.planning.recipe_options import builtin_recipes
from quantforge.quantizers import METHODS
from quantforge.recipe import VALUES

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
    "recipe": among(builtin_recipes()),
}
