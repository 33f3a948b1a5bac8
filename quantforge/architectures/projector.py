"""Vision towers as llama.cpp reads them from a file of their own: names, shapes and keys, with the projector's.

A family's file says this of its own family, by a function that returns a `Projector` for a configuration;
`quantforge.formats.gguf.projector_file` writes files by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quantforge.errors import InputError, RefusedError

_MOST = {"depth": 1000, "num_hidden_layers": 1000}
_LIMIT = 1 << 20
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the three colours
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
_ALIKE = object()  # transformers takes what llama.cpp takes
# It tells by the width of `down` whether an old converter has exchanged the two.
SWAPPED = "another intermediate_size than hidden_size; of equal ones it exchanges up and down"
Value = bool | int | float | tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class TowerTensor:
    """One tensor of a tower or of its projector.

    Attributes:
        name: in checkpoints, after `Projector.renamed`.
        held: its name in the file; of several, it is cut into as many equal parts along ``axis``, which vanishes where
            a part has a size of one there.
        shape: in checkpoints.
        axis: see ``held``.
        wide: always float32; norms and biases are anyway.
        plus_one: stored plus one.
        heads: of so many heads rows are reordered from halves to pairs, as llama.cpp rotates them; 0: they are not.
        pixels: a matrix of patches of so many pixels a side, of each its colours, which is stored as a convolution is.
    """

    name: str
    held: tuple[str, ...]
    shape: tuple[int, ...]
    axis: int = 0
    wide: bool = False
    plus_one: bool = False
    heads: int = 0
    pixels: int = 0


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The embedding of a token of the decoder that is stored with a tower.

    Attributes:
        token: its text.
        held: the name in the file.
        size: columns of the decoder.
    """

    token: str
    held: str
    size: int


@dataclass(frozen=True, slots=True)
class Projector:
    """Tower and projector of one model.

    Attributes:
        kind: ``clip.projector_type``.
        keys: the keys of ``clip.``, after that word; integers are counts.
        tensors: all of them.
        renamed: beginnings of names in checkpoints that stand for others, tried one after the other.
        unread: regular expressions of (renamed) tensors that nothing computes with.
        row: the embedding of a token that is stored beside them.
        mean, deviation: of the three colours, by which pictures are shifted and divided where no settings say so.
        normalizes: whether they are where settings do not say.
        left_out: regular expressions of (renamed) tensors of towers that are in no file.
        differs: what llama.cpp is known to make of pictures otherwise; "" for nothing.
    """

    kind: str
    keys: Mapping[str, Value]
    tensors: tuple[TowerTensor, ...]
    renamed: tuple[tuple[str, str], ...] = (("model.", ""),)
    unread: tuple[str, ...] = ()
    row: TokenRow | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)
    normalizes: bool = True
    left_out: tuple[str, ...] = ()
    differs: str = ""

    def canonical(self, name: str) -> str:
        """Return the declared name of a stored tensor."""
        for beginning, other in self.renamed:
            if name.startswith(beginning):
                name = other + name.removeprefix(beginning)
        return name


class TowerSizes(NamedTuple):
    """Sizes of a vision transformer: columns, columns within its MLP, counts, pixels of the side of a patch."""

    width: int
    ffn: int
    blocks: int
    heads: int
    patch: int

    def keys(self, image: int, epsilon: float, out: int) -> dict[str, Value]:
        """Return the keys that all towers have.

        Args:
            image: pixels of the side of a picture.
            epsilon: of the norms.
            out: columns of the decoder.
        """
        return {
            "vision.image_size": image,
            "vision.patch_size": self.patch,
            "vision.embedding_length": self.width,
            "vision.feed_forward_length": self.ffn,
            "vision.block_count": self.blocks,
            "vision.attention.head_count": self.heads,
            "vision.attention.layer_norm_epsilon": epsilon,
            "vision.projection_dim": out,
        }


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Checked access to the configuration of a tower; ``place`` is its name in messages, "" for the top level."""

    values: Mapping[str, Any]
    place: str = "vision_config"

    def size(self, key: str, otherwise: int | None = None) -> int:
        """Return a size.

        Raises:
            InputError: it is missing, no positive integer, or beyond what any model has.
        """
        value = self.values.get(key, otherwise)
        most = _MOST.get(key, _LIMIT)
        if type(value) is not int or not 0 < value <= most:
            raise InputError(
                f"config.json: {self._called(key)} = {str(value)[:40]!r}",
                f"an integer from 1 to {most}",
            )
        return value

    def real(self, key: str, otherwise: float) -> float:
        """Return a number from 0 to 1; errors as `size`."""
        value = self.values.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(
                f"config.json: {self._called(key)} = {str(value)[:40]!r}", "a number from 0 to 1"
            )
        return float(value)

    def require(self, key: str, computed: object, otherwise: object = _ALIKE) -> None:
        """Refuse values of a key other than the one that llama.cpp implements.

        Args:
            key: of the configuration.
            computed: its value in llama.cpp.
            otherwise: in transformers where the key is missing; left out: the same.

        Raises:
            RefusedError: naming both.
        """
        usual = computed if otherwise is _ALIKE else otherwise
        if (value := self.values.get(key, usual)) != computed:
            raise not_carried(f"{self._called(key)} = {str(value)[:40]}", f"{key} = {computed}")

    def require_theta(self, base: float) -> None:
        """Refuse a base of rotary positions other than the one that llama.cpp implements; errors as `require`."""
        rope = self.values.get("rope_parameters")
        theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
        theta = self.values.get("rope_theta", theta)
        if theta not in (None, base):
            raise not_carried(f"{self._called('rope_theta')} = {str(theta)[:40]}", f"{base}")

    def sizes(
        self,
        usual: TowerSizes,
        names: tuple[str, str] = ("num_hidden_layers", "num_attention_heads"),
    ) -> TowerSizes:
        """Return the sizes of a tower.

        Args:
            usual: what transformers assumes where the configuration does not say.
            names: the keys of the number of blocks and of heads.

        Raises:
            InputError: as `size`.
            RefusedError: heads do not fill the width, or their halves cannot be shared by rows and columns of patches.
        """
        keys = ("hidden_size", "intermediate_size", *names, "patch_size")
        found = TowerSizes(*map(self.size, keys, usual))
        if found.width % (4 * found.heads):
            raise not_carried(
                f"{found.heads} heads of {found.width} columns", "heads of a multiple of 4 columns"
            )
        return found

    def _called(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def not_carried(what: str, instead: str) -> RefusedError:
    """Return the error for a setting that a projector file cannot express, with what llama.cpp computes instead."""
    return RefusedError(
        f"config.json: {what} cannot be carried by a projector file (llama.cpp computes: {instead})",
        "leave --mmproj out: the language model alone is written",
    )


def weight(name: str, held: str, shape: tuple[int, ...], **options: Any) -> TowerTensor:
    """Return the weight of a module; ``options`` are as of `TowerTensor`."""
    return TowerTensor(f"{name}.weight", (f"{held}.weight",), shape, **options)


def module(
    name: str, held: str, shape: tuple[int, ...], *, bias: bool = True, **options: Any
) -> Iterator[TowerTensor]:
    """Yield the weight of a linear ``[out, in]``, convolution or norm and, unless it has none, its bias."""
    yield weight(name, held, shape, **options)
    if bias:
        yield TowerTensor(f"{name}.bias", (f"{held}.bias",), shape[:1])


def stack(
    name: str,
    sizes: TowerSizes,
    modules: Mapping[str, str],
    *,
    norm_bias: bool = True,
    bias: bool = True,
) -> Iterator[TowerTensor]:
    """Yield the tensors of all blocks of a tower.

    Args:
        name: of the list of blocks in checkpoints.
        sizes: of the tower.
        modules: names of a block's modules in checkpoints, and in the file, which tell the shapes of their weights.
        norm_bias: whether norms have biases.
        bias: whether linears have.
    """
    width, ffn = sizes.width, sizes.ffn
    shapes = {
        "attn_q_norm": (width // sizes.heads,), "attn_k_norm": (width // sizes.heads,), "attn_qkv": (3 * width, width),
        "attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width), "attn_out": (width, width),
        "ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn),
    }  # fmt: skip
    for number in range(sizes.blocks):
        for inner, held in modules.items():
            shape = shapes.get(held, (width,))  # that of a norm
            yield from module(
                f"{name}.{number}.{inner}",
                f"v.blk.{number}.{held}",
                shape,
                bias=norm_bias if len(shape) == 1 else bias,
            )
