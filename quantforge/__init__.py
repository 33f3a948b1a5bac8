"""QuantForge: quantize, convert and evaluate large language models offline.

A recipe becomes a plan; the plan is executed one block of the model at a time and yields quantized tensors; every file
format, and the runtime, is a view of those tensors. ``docs/design.md`` is the map.

All other names are those of `quantforge.api`, imported at their first use; ``docs/python.md`` shows them:

    import quantforge
    quantforge.quantize("models/demo", method="awq", bits=4, out="demo-awq")
"""

TYPE_CHECKING = False  # as in `typing`, which takes too long to import

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quantforge.api import *  # noqa: F403
else:  # hidden from type checkers, which would accept any name

    def __getattr__(name: str) -> object:
        from importlib import import_module
        from importlib.util import find_spec

        of_modules = name.startswith("_") or find_spec(f"quantforge.{name}") is not None
        if name == "__all__" or not of_modules:  # `from quantforge import errors` asks here first
            api = import_module("quantforge.api")
            if name == "__all__" or name in api.__all__:
                return getattr(api, name)
        raise AttributeError(f"module 'quantforge' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return sorted({"__version__", *__getattr__("__all__")})
