"""QuantForge: quantize, convert and evaluate large language models offline.

A recipe becomes a plan; the plan is executed one part of the model at a time into quantized tensors; every file
format, and the runtime, is a view of those tensors. ``docs/design.md`` is the map.

The names of `__all__` are those of `quantforge.verbs`, imported at their first use; ``docs/python.md`` shows them:

    import quantforge
    quantforge.quantize("models/demo", method="awq", bits=4, out="demo-awq")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantforge.errors import QuantForgeError
    from quantforge.events import Event, Policy
    from quantforge.execution.progress import Progress
    from quantforge.plans import Plan
    from quantforge.recipe import AwqOptions, CalibrationOptions, GptqOptions, Recipe, Rule
    from quantforge.runtime.generated_text import Generated
    from quantforge.settings import Settings
    from quantforge.verbs.declarations import Declarations, derive_declarations
    from quantforge.verbs.demo import demo
    from quantforge.verbs.diff_models import diff
    from quantforge.verbs.evaluate_models import evaluate
    from quantforge.verbs.export import Exported, export
    from quantforge.verbs.generate_text import generate
    from quantforge.verbs.imatrix import make_imatrix
    from quantforge.verbs.inspect import Inspected, inspect
    from quantforge.verbs.load_model import load
    from quantforge.verbs.plan import plan
    from quantforge.verbs.quantize import Outcome, quantize
    from quantforge.verbs.reproduce import Reproduced, reproduce
    from quantforge.verbs.verify_artifact import verify

__version__ = "0.1.0"
__all__ = [
    "AwqOptions",
    "CalibrationOptions",
    "Declarations",
    "Event",
    "Exported",
    "Generated",
    "GptqOptions",
    "Inspected",
    "Outcome",
    "Plan",
    "Policy",
    "Progress",
    "QuantForgeError",
    "Recipe",
    "Reproduced",
    "Rule",
    "Settings",
    "demo",
    "derive_declarations",
    "diff",
    "evaluate",
    "export",
    "generate",
    "inspect",
    "load",
    "make_imatrix",
    "plan",
    "quantize",
    "reproduce",
    "verify",
]

if not TYPE_CHECKING:  # a checker would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'quantforge' has no attribute '{name}'")
        return getattr(import_module("quantforge.verbs"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
