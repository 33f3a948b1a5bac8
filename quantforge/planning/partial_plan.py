"""A plan before its files are laid out: what becomes of every tensor of a model."""

from __future__ import annotations

from dataclasses import dataclass

from quantforge.events import Event
from quantforge.files.writer import plan_files, plan_shards
from quantforge.plans import EngineVerdict, FilePlan, TensorPlan
from quantforge.recipe import Recipe

SHARD_BYTES = 5_000_000_000  # maximum size of a safetensors file by default


@dataclass(frozen=True, slots=True)
class PartialPlan:
    """The actions on all tensors of a model, before the result's files are laid out; fields as in `Plan`.

    Attributes:
        label: what the format calls the whole model: the mixture of a GGUF file, else the key of the format.
    """

    tensors: tuple[TensorPlan, ...]
    engines: tuple[EngineVerdict, ...]
    substitutions: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    tensors_after_blocks: tuple[str, ...] = ()
    unties_head: bool = False
    label: str = ""

    def files(self, recipe: Recipe) -> tuple[FilePlan, ...]:
        """Return the files of the result; formats that store the recipe get it from here."""
        outputs = [item for tensor in self.tensors for item in tensor.outputs]
        return plan_files(plan_shards(outputs, recipe.max_shard_bytes or SHARD_BYTES))
