"""Text windows: the text to score, cut into windows of tokens, and the protocol of an evaluation.

Perplexities under different protocols are not comparable (the same model has 5.1, 5.5 or 8.7 on "wikitext"), so every
result includes its `EvaluationProtocol`. The text is tokenized as one document and cut into windows of ``length``
tokens without overlap; the remainder is dropped. If the tokenizer adds a BOS token, every window starts with it,
followed by ``length - 1`` tokens of text. The first token of a window is not scored, because nothing precedes it.
Models are scored on the windows of their reference; a model whose tokenizer yields other tokens is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.configuration import max_positions
from quantforge.errors import InputError
from quantforge.files.opener import FILES
from quantforge.files.reader import Checkpoint
from quantforge.runtime.text_processing import as_input_errors, load_model_tokenizer
from quantforge_calibration.tokenizer import TextTokenizer
from quantforge_files.roles import SETTINGS, TOKENIZER

DEFAULT_LENGTH = 512  # tokens per window


@dataclass(frozen=True, slots=True)
class EvaluationProtocol:
    """Evaluation protocol: everything besides the models that the results depend on.

    Attributes:
        text: name of the text.
        tokens_sha256: SHA-256 of the scored windows as little-endian 32-bit token ids.
        windows: number of windows.
        length: tokens of a window, BOS included.
        bos: id of the BOS token that starts every window, or None.
        tokens_scored: ``windows * (length - 1)``.
        dtype: type in which perplexity and divergence are computed.
        speed_dtype: type in which speed and memory are measured; "" if they are not.
        device: device of the computation.
        threads: number of CPU threads of torch.
        windows_requested: requested number of windows; the text may yield fewer.
        adapter: name and digest of the adapter merged into the reference; "" for none.
        correction: name and digest of the adapter applied to the other model; "" for none.
        input_bits: bits to which packed layers round activations, except in the reference; 16 disables rounding.
    """

    text: str
    tokens_sha256: str
    windows: int
    length: int
    bos: int | None
    tokens_scored: int
    dtype: str
    speed_dtype: str
    device: str
    threads: int
    windows_requested: int = 0
    adapter: str = ""
    correction: str = ""
    input_bits: int = 16

    def to_json(self) -> dict[str, Any]:
        """Return the protocol as plain data, including the parts that are the same for every evaluation."""
        return {
            **asdict(self),
            "overlap": 0,
            "scored": "every token of a window but the first",
            "kl": "exact, reference against model, whole vocabulary, nats per token",
            "standard_error": "over windows; of differences paired by window",
        }

    def __str__(self) -> str:
        of_requested = (
            f" of {self.windows_requested}" if self.windows_requested > self.windows else ""
        )
        bos_text = "no BOS" if self.bos is None else f"BOS {self.bos} per window"
        adapter_text = (
            f", the adapter {self.adapter} merged into the reference" if self.adapter else ""
        )
        correction_text = (
            f", the adapter {self.correction} put on the model" if self.correction else ""
        )
        rounding_text = (
            f", inputs of packed weights in {self.input_bits} bits but for the reference's"
        )
        return (
            f"{self.text}, {self.windows}{of_requested} windows of {self.length} tokens, no overlap, {bos_text}, "
            f"{self.tokens_scored} tokens scored, {self.dtype} on {self.device}{adapter_text}{correction_text}"
            f"{rounding_text if self.input_bits < 16 else ''}"
        )


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of token ids, ``[windows, length]`` int64, and the id of the BOS token that starts each, or None."""

    ids: Tensor
    bos: int | None

    @property
    def targets(self) -> Tensor:
        """Return the tokens that are scored, ``[windows, length - 1]``."""
        return self.ids[:, 1:]

    @property
    def sha256(self) -> str:
        """Return the SHA-256 digest of the ids."""
        return hashlib.sha256(self.ids.to(torch.int32).numpy().astype("<i4").tobytes()).hexdigest()


def cut_windows(tokenizer: TextTokenizer, text: str, max_windows: int, length: int) -> Windows:
    """Tokenize a text and cut at most ``max_windows`` windows of ``length`` tokens from its beginning.

    Raises:
        InputError: the text has fewer tokens than one window, ``length`` is less than 2, the text cannot be encoded, or
            a token has no embedding in the model.
    """
    bos = tokenizer.bos_id
    with as_input_errors():
        ids = tokenizer.encode(text, "the text that is scored")
    text_tokens = length if bos is None else length - 1
    count = min(max_windows, len(ids) // text_tokens)
    if length < 2 or count < 1:
        raise InputError(
            f"nothing to score: the text has {len(ids)} tokens, one window takes {max(text_tokens, 2)}",
            "give a longer text (text), or fewer tokens in a window (length)",
        )
    rows = torch.tensor(ids[: count * text_tokens]).view(count, text_tokens)
    if bos is not None:
        rows = torch.cat((torch.full((count, 1), bos), rows), dim=1)
    return Windows(rows, bos)


def check_comparable(model: Checkpoint, reference: Checkpoint, text: str, windows: Windows) -> None:
    """Check that a model can be scored on the windows of its reference.

    Raises:
        InputError: its context length is shorter than a window, or its tokenizer yields other tokens.
    """
    count, length = windows.ids.shape
    positions = max_positions(model.config)
    if positions < length:
        raise InputError(
            f"{model.path}: windows of {length} tokens, the model has {positions} positions",
            f"--length {positions}",
        )
    if model is reference or _tokenizer_files(model.path) == _tokenizer_files(reference.path):
        return
    if cut_windows(load_model_tokenizer(model), text, count, length).sha256 != windows.sha256:
        raise InputError(
            f"{model.path}: its tokenizer makes other tokens of the text than that of {reference.path}",
            "compare a model with the one that it was made from",
        )


def _tokenizer_files(path: Path) -> list[bytes]:
    """Return the contents of the tokenizer files of a model directory; [] for a single file."""
    if path.is_file():
        return []
    files = ((path / "tokenizer.json", TOKENIZER), (path / "tokenizer_config.json", SETTINGS))
    return [FILES.read(file, role, path) if file.is_file() else b"" for file, role in files]
