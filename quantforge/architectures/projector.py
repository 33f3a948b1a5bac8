"""Vision towers and projectors as llama.cpp reads them from a separate file: names, shapes and keys.

Each family's file declares its own with a function that returns a `Projector` for a configuration;
`quantforge.formats.gguf.projector_file` writes files according to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quantforge.errors import InputError, RefusedError

_MAX_COUNTS = {"depth": 1000, "num_hidden_layers": 1000}
_MAX_SIZE = 1 << 20
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the three color channels
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_SAME_DEFAULT = object()  # the default of transformers is the value that llama.cpp supports
# llama.cpp decides from the width of `down` whether an old converter has swapped up and down.
SWAPPED_MLP_HINT = (
    "another intermediate_size than hidden_size; of equal ones it exchanges up and down"
)
KeyValue = bool | int | float | tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class TowerTensor:
    """One tensor of a tower or of its projector.

    Attributes:
        name: name in checkpoints, after `Projector.renamed_prefixes`.
        gguf_names: name in the file; if there are several, the tensor is split into as many equal parts along ``axis``,
            and a dimension of size one is removed there.
        shape: shape in checkpoints.
        axis: see ``gguf_names``.
        float32: whether it is always float32; norms and biases always are.
        plus_one: whether it is stored plus one.
        rotary_heads: number of heads whose rows are reordered from halves to pairs, as llama.cpp rotates them; 0 for
            none.
        patch_size: for a matrix over flattened patches, the side of a patch in pixels; it is stored as a convolution.
    """

    name: str
    gguf_names: tuple[str, ...]
    shape: tuple[int, ...]
    axis: int = 0
    float32: bool = False
    plus_one: bool = False
    rotary_heads: int = 0
    patch_size: int = 0


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row of the decoder's token embedding that is stored with a tower.

    Attributes:
        token: text of the token.
        gguf_name: name in the file.
        width: width of the decoder.
    """

    token: str
    gguf_name: str
    width: int


@dataclass(frozen=True, slots=True)
class Projector:
    """Declaration of the vision tower and projector of one model.

    Attributes:
        projector_type: ``clip.projector_type``.
        keys: metadata keys after ``clip.``; integers are written as unsigned.
        tensors: all tensors.
        renamed_prefixes: prefixes of names in checkpoints and their replacements, applied in order.
        unused_tensors: regular expressions of (renamed) tensors that nothing computes with.
        token_row: the token embedding that is stored with them.
        mean, std: mean and standard deviation of the three color channels, if the processor's settings have none.
        normalizes_by_default: whether images are normalized if the processor's settings do not say.
        omitted_towers: regular expressions of (renamed) tensors of towers that no file contains.
        known_difference: a known difference in how llama.cpp processes images; "" for none.
    """

    projector_type: str
    keys: Mapping[str, KeyValue]
    tensors: tuple[TowerTensor, ...]
    renamed_prefixes: tuple[tuple[str, str], ...] = (("model.", ""),)
    unused_tensors: tuple[str, ...] = ()
    token_row: TokenRow | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    normalizes_by_default: bool = True
    omitted_towers: tuple[str, ...] = ()
    known_difference: str = ""

    def canonical_name(self, name: str) -> str:
        """Return the declared name of a stored tensor."""
        for prefix, replacement in self.renamed_prefixes:
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
        return name


class TowerSizes(NamedTuple):
    """Sizes of a vision transformer: width, MLP width, numbers of blocks and heads, patch side in pixels."""

    width: int
    ffn: int
    blocks: int
    heads: int
    patch: int

    def keys(self, image_size: int, epsilon: float, projection_dim: int) -> dict[str, KeyValue]:
        """Return the metadata keys that all towers have.

        Args:
            image_size: side of an image in pixels.
            epsilon: epsilon of the norms.
            projection_dim: width of the decoder.
        """
        return {
            "vision.image_size": image_size,
            "vision.patch_size": self.patch,
            "vision.embedding_length": self.width,
            "vision.feed_forward_length": self.ffn,
            "vision.block_count": self.blocks,
            "vision.attention.head_count": self.heads,
            "vision.attention.layer_norm_epsilon": epsilon,
            "vision.projection_dim": projection_dim,
        }


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Checked access to the configuration of a tower.

    Attributes:
        values: the configuration.
        section: its key in ``config.json``, for messages; "" for the top level.
    """

    values: Mapping[str, Any]
    section: str = "vision_config"

    def size(self, key: str, default: int | None = None) -> int:
        """Return a size.

        Raises:
            InputError: it is missing, not a positive integer, or implausibly large.
        """
        value = self.values.get(key, default)
        maximum = _MAX_COUNTS.get(key, _MAX_SIZE)
        if type(value) is not int or not 0 < value <= maximum:
            raise InputError(
                f"{self._full_key(key)} = {str(value)[:40]!r}",
                f"an integer from 1 to {maximum}",
                subject="config.json",
            )
        return value

    def fraction(self, key: str, default: float) -> float:
        """Return a number from 0 to 1; errors as `size`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(
                f"{self._full_key(key)} = {str(value)[:40]!r}",
                "a number from 0 to 1",
                subject="config.json",
            )
        return float(value)

    def require(self, key: str, supported: object, default: object = _SAME_DEFAULT) -> None:
        """Refuse a value that llama.cpp does not support.

        Args:
            key: the configuration key.
            supported: the only value that llama.cpp supports.
            default: transformers' value if the key is missing; ``supported`` if not given.

        Raises:
            RefusedError: naming both values.
        """
        defaults = supported if default is _SAME_DEFAULT else default
        if (value := self.values.get(key, defaults)) != supported:
            raise unsupported_setting_error(
                f"{self._full_key(key)} = {str(value)[:40]}", f"{key} = {supported}"
            )

    def require_rope_theta(self, base: float) -> None:
        """Refuse a rotary base other than the one that llama.cpp uses; errors as `require`."""
        rope = self.values.get("rope_parameters")
        theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
        theta = self.values.get("rope_theta", theta)
        if theta not in (None, base):
            raise unsupported_setting_error(
                f"{self._full_key('rope_theta')} = {str(theta)[:40]}", f"{base}"
            )

    def sizes(
        self,
        defaults: TowerSizes,
        count_keys: tuple[str, str] = ("num_hidden_layers", "num_attention_heads"),
    ) -> TowerSizes:
        """Return the sizes of a tower.

        Args:
            defaults: transformers' defaults.
            count_keys: the keys of the numbers of blocks and of heads.

        Raises:
            InputError: as `size`.
            RefusedError: heads do not fill the width, or cannot be divided between rows and columns of patches.
        """
        keys = ("hidden_size", "intermediate_size", *count_keys, "patch_size")
        sizes = TowerSizes(*map(self.size, keys, defaults))
        if sizes.width % (4 * sizes.heads):
            raise unsupported_setting_error(
                f"{sizes.heads} heads of {sizes.width} columns", "heads of a multiple of 4 columns"
            )
        return sizes

    def _full_key(self, key: str) -> str:
        return f"{self.section}.{key}" if self.section else key


def unsupported_setting_error(setting: str, supported: str) -> RefusedError:
    """Return the error for a setting that a projector file cannot express, with what llama.cpp supports."""
    return RefusedError(
        f"{setting} cannot be carried by a projector file (llama.cpp computes: {supported})",
        "leave --mmproj out: the language model alone is written",
        subject="config.json",
    )


def weight_tensor(
    name: str, gguf_module: str, shape: tuple[int, ...], **options: Any
) -> TowerTensor:
    """Declare the weight of a module; ``options`` are fields of `TowerTensor`."""
    return TowerTensor(f"{name}.weight", (f"{gguf_module}.weight",), shape, **options)


def module_tensors(
    name: str, gguf_module: str, shape: tuple[int, ...], *, bias: bool = True, **options: Any
) -> Iterator[TowerTensor]:
    """Yield the weight of a linear ``[out, in]``, convolution or norm and, with ``bias``, its bias."""
    yield weight_tensor(name, gguf_module, shape, **options)
    if bias:
        yield TowerTensor(f"{name}.bias", (f"{gguf_module}.bias",), shape[:1])


def block_tensors(
    name: str,
    sizes: TowerSizes,
    modules: Mapping[str, str],
    *,
    norm_bias: bool = True,
    bias: bool = True,
) -> Iterator[TowerTensor]:
    """Yield the tensors of all blocks of a tower.

    Args:
        name: name of the list of blocks in checkpoints.
        sizes: sizes of the tower.
        modules: names of a block's modules in checkpoints, mapped to names in the file, which determine their shapes.
        norm_bias: whether norms have biases.
        bias: whether linears have biases.
    """
    width, ffn = sizes.width, sizes.ffn
    shapes = {
        "attn_q_norm": (width // sizes.heads,), "attn_k_norm": (width // sizes.heads,), "attn_qkv": (3 * width, width),
        "attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width), "attn_out": (width, width),
        "ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn),
    }  # fmt: skip
    for index in range(sizes.blocks):
        for module, gguf_module in modules.items():
            shape = shapes.get(gguf_module, (width,))  # that of a norm
            yield from module_tensors(
                f"{name}.{index}.{module}",
                f"v.blk.{index}.{gguf_module}",
                shape,
                bias=norm_bias if len(shape) == 1 else bias,
            )
