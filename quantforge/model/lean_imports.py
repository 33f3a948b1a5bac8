"""transformers' modelling code without what a command never runs: half of the imports, most of their time.

The modules that define a model also import a compiler, distributed training, and through losses and loaders that we
never call scipy and accelerate where these are installed: two thirds of the seconds before the first weight is read.
Inside of `lean` they find none of that:

- optional packages count as not installed, as in most environments they are not;
- ``torch.distributed`` counts as not built in, as on some systems it is not;
- ``torch._dynamo``, which is asked for decorators alone, is a stand-in; asked for more it steps aside for the real one;
- the table of all models' names is not made a second time: models are asked for by their module.

What was imported so stays without these parts, so that it is only done in a process that is ours alone: the command
line says so (`allow`). Elsewhere `lean` does nothing, and what is loaded already stays.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

OPTIONAL = ("accelerate", "kernels", "scipy", "sklearn")  # of transformers, and none of ours
DYNAMO = "torch._dynamo"
DECORATORS = ("disable", "allow_in_graph", "assume_constant_result")
_alone = Event()


def allow() -> None:
    """Declare that nobody else uses transformers in this process."""
    _alone.set()


def forbid() -> None:
    """Declare that others will use it, from now on."""
    _alone.clear()


@contextmanager
def lean() -> Iterator[None]:
    """Import only what inference needs, inside a ``with`` block around imports of transformers."""
    if not _alone.is_set():
        yield
        return
    import torch.distributed

    with ExitStack() as stack:
        absent: dict[str, Any] = {name: None for name in OPTIONAL if name not in sys.modules}
        if DYNAMO not in sys.modules:
            absent[DYNAMO] = _StandIn()
        stack.enter_context(_modules(absent))
        stack.enter_context(_instead(torch.distributed, "is_available", lambda: False))
        from transformers.utils import import_utils

        define = getattr(import_utils, "define_import_structure", None)
        if define is not None and "transformers.models" not in sys.modules:
            shorter = _without_models(define)
            stack.enter_context(_instead(import_utils, "define_import_structure", shorter))
        yield


class _StandIn(ModuleType):
    """Stand-in for ``torch._dynamo`` while decorators are applied: functions stay what they are."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        import torch

        # Its submodules are found, and are the real ones.
        self.__path__ = [str(Path(folder) / "_dynamo") for folder in torch.__path__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in DECORATORS:
            return _same
        if sys.modules.get(DYNAMO) is self:
            del sys.modules[DYNAMO]
        return getattr(importlib.import_module(DYNAMO), name)


def _same(function: Any = None, *_args: Any, **_settings: Any) -> Any:
    return _same if function is None else function


@contextmanager
def _modules(entries: Mapping[str, Any]) -> Iterator[None]:
    """Put these modules in place for a while; None makes an import fail, and finds no package."""
    sys.modules.update(entries)
    try:
        yield
    finally:
        for name, entry in entries.items():
            if name in sys.modules and sys.modules[name] is entry:
                del sys.modules[name]


@contextmanager
def _instead(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Let a module hold another value, for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _without_models(define: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out the names of all models; those of one model's own module are few."""

    def found(path: str, *args: Any, **settings: Any) -> Any:
        return {} if Path(path).parent.name == "models" else define(path, *args, **settings)

    return found
