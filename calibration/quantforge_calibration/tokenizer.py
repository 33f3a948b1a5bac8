"""The tokenizer of a model directory, loaded with the ``tokenizers`` library alone.

``transformers``' Auto classes choose a class by name and can run code that comes with the model; ``tokenizer.json`` is
data and contains everything that is needed to encode. It does not always say which id starts a text:

* usually its post-processor adds that id, which is detected by encoding an ordinary word with and without special
  tokens;
* if the post-processor adds nothing, ``add_bos_token`` in ``tokenizer_config.json`` decides.

The file may contain a regular expression that never finishes on some text, or something that makes the library panic.
So each document is encoded on a thread of its own, which is abandoned after a timeout, because the library cannot be
stopped. A panic writes a trace with parts of the text to standard error, which is therefore silenced
(`silence_stderr`), and is not a subclass of ``Exception`` (`is_library_error`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quantforge_calibration.source_error import FILES, SourceError
from quantforge_files.roles import SETTINGS, TOKENIZER

TIMEOUT_SECONDS = 60.0  # for each document, plus the time for its length
_STDERR_LOCK = threading.Lock()
CHARACTERS_PER_SECOND = 20_000  # slow enough: ordinary tokenizers are a hundred times faster


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Encoder and decoder of text.

    Attributes:
        tokenizer: tokenizer of the ``tokenizers`` library.
        bos_id: id that starts a text, if there is one.
        eos_id: id that ends a text, if there is one.
        embedding_rows: rows of the model's embedding; None if unknown, in which case ids are not checked.
    """

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None
    embedding_rows: int | None = None

    def encode(self, text: str, location: str = "") -> list[int]:
        """Return the ids of a document, without special tokens at either end.

        A BOS token in the text itself, as chat templates write it, is dropped, because the sampler adds one to every
        row.

        Args:
            text: the document.
            location: where it comes from, for error messages; by default its beginning is quoted.

        Raises:
            SourceError: the tokenizer fails on the text or does not finish; or as `check`.
        """
        ids = self.encode_with_special_tokens(text, location)
        return ids[1:] if self.bos_id is not None and ids[:1] == [self.bos_id] else ids

    def encode_with_special_tokens(self, text: str, location: str = "") -> list[int]:
        """Return the ids of a text including special tokens that occur in it, as chat templates write them.

        Raises:
            SourceError: as `encode`.
        """
        ids = _encode_with_timeout(self.tokenizer, text, special=False)
        self.check(ids, location or f"the text that begins with {text[:40]!a}")
        return ids

    @property
    def may_exceed_embedding(self) -> bool:
        """Return whether the tokenizer has any token that `check` refuses."""
        ids = self.tokenizer.get_vocab().values()
        return self.embedding_rows is not None and max(ids, default=0) >= self.embedding_rows

    def check(self, ids: Iterable[int], location: str) -> None:
        """Check that all ids have a row in the model's embedding; every id that reaches a model passes this check.

        Raises:
            SourceError: an id exceeds the embedding; the message names the token and its ``location``.
        """
        if self.embedding_rows is None:
            return
        excess_id = next((token_id for token_id in ids if token_id >= self.embedding_rows), None)
        if excess_id is not None:
            text = self.tokenizer.id_to_token(excess_id) if excess_id < 1 << 31 else None
            token_text = (
                f"token id {excess_id}" if text is None else f"token {text!a:.60} (id {excess_id})"
            )
            raise SourceError(
                f"{location}: {token_text} has no row in the model's embedding, which has {self.embedding_rows} rows",
                "the tokenizer has this token and the model does not: leave it out of the text"
                if text is not None
                else "encode the text with the model's own tokenizer",
            )

    def ordinary_ids(self) -> list[int]:
        """Return the ids within the embedding of tokens that are not special, added, or the unknown token."""
        added = self.tokenizer.get_added_tokens_decoder()
        tokens = self.tokenizer.get_vocab(with_added_tokens=False)
        tokens.pop(getattr(self.tokenizer.model, "unk_token", None) or "", None)
        ordinary = sorted(token_id for token_id in set(tokens.values()) if token_id not in added)
        return (
            ordinary
            if self.embedding_rows is None
            else [token_id for token_id in ordinary if token_id < self.embedding_rows]
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens; invalid UTF-8 becomes U+FFFD.

        Raises:
            SourceError: the decoder that tokenizer.json describes fails.
        """
        try:
            text: str = self.tokenizer.decode(list(ids))
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise SourceError(
                f"the model's tokenizer.json cannot decode: {error}",
                "take the file of the original model",
            ) from error
        return text


def load_tokenizer(model: Path, embedding_rows: int | None = None) -> TextTokenizer:
    """Load ``tokenizer.json`` of a model directory.

    Args:
        model: the directory.
        embedding_rows: rows of the model's embedding. An end-of-text token that exceeds them is ignored, because the
            model can neither read nor write it.

    Raises:
        SourceError: ``tokenizer.json`` is missing or malformed, ``tokenizer_config.json`` is malformed, or BOS exceeds
            the embedding.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        raise SourceError(
            f"{model} has no tokenizer.json",
            "copy it from the original model; a slow tokenizer is converted by transformers: "
            f"AutoTokenizer.from_pretrained('{model}').save_pretrained('{model}')",
        )
    data = FILES.read(path, TOKENIZER, model)
    FILES.check_json(data, path, TOKENIZER)
    try:
        with silence_stderr():
            tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise SourceError(
            f"{path} is not a tokenizer: {error}",
            "download the file again, or upgrade: pip install -U tokenizers",
        ) from error
    tokenizer.no_truncation()  # the file may store settings for single prompts
    tokenizer.no_padding()
    config = read_tokenizer_config(model)
    bos_id, eos_id = _bos_id(tokenizer, config), _token_id(tokenizer, config, "eos_token")
    if eos_id is not None and embedding_rows is not None and eos_id >= embedding_rows:
        eos_id = None
    text_tokenizer = TextTokenizer(tokenizer, bos_id, eos_id, embedding_rows)
    text_tokenizer.check(
        [] if bos_id is None else [bos_id], f"{path}, the token that begins every text"
    )
    return text_tokenizer


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Discard what compiled code writes to standard error, because it may contain confidential text."""
    with _STDERR_LOCK:
        saved_stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 2)
            yield
        finally:
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
            os.close(null)


def is_library_error(error: BaseException) -> bool:
    """Return whether the library raised an error on bad data: any ``Exception``, or a panic of compiled code."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def read_tokenizer_config(model: Path) -> Mapping[str, Any]:
    """Return ``tokenizer_config.json`` of a model directory, empty if there is none.

    Raises:
        SourceError: it is not a JSON object.
    """
    path = model / "tokenizer_config.json"
    if not path.is_file():
        return {}
    return FILES.parse_object(FILES.read(path, SETTINGS, model), path, SETTINGS, loose=True)


def token_text(config: Mapping[str, Any], name: str) -> str | None:
    """Return a special token such as ``bos_token``, which may be a string or an object with ``content``."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _encode_with_timeout(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Encode a text on a thread of its own; raise `SourceError` if that fails or does not finish in time."""
    results: list[list[int]] = []
    errors: list[BaseException] = []

    def encode() -> None:
        try:
            # This method releases the GIL and omits the offsets, which saves a third of the time.
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
            results.append(encoding.ids)
        except BaseException as error:  # see `is_library_error`
            errors.append(error)

    timeout = TIMEOUT_SECONDS + len(text) / CHARACTERS_PER_SECOND
    thread = threading.Thread(target=encode, daemon=True)
    with silence_stderr():
        thread.start()
        thread.join(timeout)
    if results:
        return results[0]
    reason = str(errors[0]) if errors else f"not done after {timeout:.0f} s"
    raise SourceError(
        f"the model's tokenizer.json cannot encode a text of {len(text)} characters: {reason}",
        "its pre_tokenizer holds a regular expression that takes for ever; take the file of the original model",
    )


def _bos_id(tokenizer: Tokenizer, config: Mapping[str, Any]) -> int | None:
    """Return the id that the tokenizer puts at the beginning of a text, or None."""
    unprocessed = _encode_with_timeout(tokenizer, "word", special=False)
    processed = _encode_with_timeout(tokenizer, "word", special=True)
    if len(processed) > len(unprocessed):
        return processed[0] if processed[:1] != unprocessed[:1] else None
    return (
        _token_id(tokenizer, config, "bos_token") if config.get("add_bos_token") is True else None
    )


def _token_id(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    """Return the id of a special token named in the tokenizer's configuration, or None."""
    text = token_text(config, name)
    token_id: int | None = tokenizer.token_to_id(text) if text else None
    return token_id
