"""What becomes of every tensor of a model, before its files are laid out."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.events import Event
from quantforge.files.writer import file_plans, plan_shards
from quantforge.plans import EngineVerdict, FilePlan, TensorPlan
from quantforge.recipe import Recipe

SHARD_BYTES = 5_000_000_000  # of a safetensors file, unless the recipe says otherwise


@dataclass(frozen=True, slots=True)
class Draft:
    """Actions on all tensors of a model, before its files are laid out; fields as of `Plan`.

    Attributes:
        label: what the format calls the whole: the mixture of a GGUF file, else its key.
    """

    tensors: tuple[TensorPlan, ...]
    engines: tuple[EngineVerdict, ...]
    substitutions: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    untie: bool = False
    label: str = ""

    def files(self, recipe: Recipe) -> tuple[FilePlan, ...]:
        """Return the files of the result, which state the recipe where the format does."""
        outputs = [item for tensor in self.tensors for item in tensor.outputs]
        return file_plans(plan_shards(outputs, recipe.max_shard_bytes or SHARD_BYTES))
