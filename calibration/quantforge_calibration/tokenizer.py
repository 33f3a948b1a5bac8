"""The tokenizer of a model directory, read with the ``tokenizers`` library alone.

``transformers``' Auto classes choose a class by name and can run code that ships with the model;
``tokenizer.json`` is data and says everything that is needed to encode. What it does not always say
is which id begins a text:

* usually its post-processor adds that id, and we see it by encoding an ordinary word with and
  without;
* where the post-processor adds nothing, ``add_bos_token`` of ``tokenizer_config.json`` decides.

The file can also hold a regular expression that takes for ever on some text, or what the library panics on. So a
document is encoded on a thread of its own, which is abandoned when its time is over: the library cannot be stopped.
A panic writes a trace with parts of the text to standard error by itself, which is closed to it (`quiet`), and is no
``Exception`` (`raised`).
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

SECONDS = 60.0  # for any document
_QUIET = threading.Lock()
SPEED = 20_000  # and one more for so many characters; ordinary tokenizers take a hundredth of that


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Encoder of text.

    Attributes:
        tokenizer: of the library.
        bos_id: begins a text, where there is such a token.
        eos_id: ends a text, where there is such a token.
        rows: of the model's embedding; None where they are not known, and ids are not checked.
    """

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None
    rows: int | None = None

    def encode(self, text: str, place: str = "") -> list[int]:
        """Return the ids of a document, without a special token at either end.

        A beginning-of-text token in the text itself, as chat templates write it, is dropped: the
        sampler puts one at the beginning of every row.

        Args:
            text: the document.
            place: where it comes from, for errors; the beginning of the text where left out.

        Raises:
            SourceError: the tokenizer fails on the text, or does not come to an end; or as `check`.
        """
        ids = self.encode_all(text, place)
        return ids[1:] if self.bos_id is not None and ids[:1] == [self.bos_id] else ids

    def encode_all(self, text: str, place: str = "") -> list[int]:
        """Return the ids of a text with every token that it names, as of one that a chat template wrote.

        Raises:
            SourceError: as `encode`.
        """
        ids = _encoded(self.tokenizer, text, special=False)
        self.check(ids, place or f"the text that begins with {text[:40]!a}")
        return ids

    @property
    def exceeds_rows(self) -> bool:
        """Return whether some text could have a token that `check` refuses."""
        ids = self.tokenizer.get_vocab().values()
        return self.rows is not None and max(ids, default=0) >= self.rows

    def check(self, ids: Iterable[int], place: str) -> None:
        """Refuse ids for which the model's embedding has no row; whatever reaches a model passes here.

        Raises:
            SourceError: naming the token, the rows, and the ``place`` where the ids come from.
        """
        if self.rows is None:
            return
        past = next((number for number in ids if number >= self.rows), None)
        if past is not None:
            text = self.tokenizer.id_to_token(past) if past < 1 << 31 else None
            named = f"token id {past}" if text is None else f"token {text!a:.60} (id {past})"
            raise SourceError(
                f"{place}: {named} has no row in the model's embedding, which has {self.rows} rows",
                "the tokenizer has this token and the model does not: leave it out of the text"
                if text is not None
                else "encode the text with the model's own tokenizer",
            )

    def ordinary_ids(self) -> list[int]:
        """Return the ids that the model has of tokens that are neither special nor added, nor mean unknown text."""
        added = self.tokenizer.get_added_tokens_decoder()
        tokens = self.tokenizer.get_vocab(with_added_tokens=False)
        tokens.pop(getattr(self.tokenizer.model, "unk_token", None) or "", None)
        found = sorted(one for one in set(tokens.values()) if one not in added)
        return found if self.rows is None else [one for one in found if one < self.rows]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens; bytes that are no UTF-8 become U+FFFD.

        Raises:
            SourceError: the decoder that tokenizer.json describes fails.
        """
        try:
            text: str = self.tokenizer.decode(list(ids))
        except BaseException as error:
            if not raised(error):
                raise
            raise SourceError(
                f"the model's tokenizer.json cannot decode: {error}",
                "take the file of the original model",
            ) from error
        return text


def load_tokenizer(model: Path, rows: int | None = None) -> TextTokenizer:
    """Load ``tokenizer.json`` of a model directory.

    Args:
        model: the directory.
        rows: of the model's embedding. An end-of-text token past them is ignored: the model can neither read nor write
            it.

    Raises:
        SourceError: the file is missing or malformed, or ``tokenizer_config.json`` is; or the token that begins every
            text is past the embedding.
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
        with quiet():
            tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:
        if not raised(error):
            raise
        raise SourceError(
            f"{path} is not a tokenizer: {error}",
            "download the file again, or upgrade: pip install -U tokenizers",
        ) from error
    tokenizer.no_truncation()  # the file may store both, for single prompts
    tokenizer.no_padding()
    config = read_tokenizer_config(model)
    bos, eos = _bos_id(tokenizer, config), _token_id(tokenizer, config, "eos_token")
    if eos is not None and rows is not None and eos >= rows:
        eos = None
    found = TextTokenizer(tokenizer, bos, eos, rows)
    found.check([] if bos is None else [bos], f"{path}, the token that begins every text")
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what the library itself writes to standard error from the terminal: it may hold text of strangers."""
    with _QUIET:
        kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nothing)


def raised(error: BaseException) -> bool:
    """Return whether a library raised this on bad data: any ``Exception``, or a panic of compiled code."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def read_tokenizer_config(model: Path) -> Mapping[str, Any]:
    """Return ``tokenizer_config.json`` of a model directory, empty when there is none.

    Raises:
        SourceError: it is not a JSON object.
    """
    path = model / "tokenizer_config.json"
    if not path.is_file():
        return {}
    return FILES.parse_object(FILES.read(path, SETTINGS, model), path, SETTINGS, loose=True)


def token_text(config: Mapping[str, Any], name: str) -> str | None:
    """Return a special token such as ``bos_token``: a string, or an object with ``content``."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _encoded(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    found: list[list[int]] = []
    errors: list[BaseException] = []

    def encode() -> None:
        try:
            # It gives up the interpreter's lock, and leaves out the offsets, a third of the time.
            (one,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
            found.append(one.ids)
        except BaseException as error:  # see `raised`
            errors.append(error)

    limit = SECONDS + len(text) / SPEED
    thread = threading.Thread(target=encode, daemon=True)
    with quiet():
        thread.start()
        thread.join(limit)
    if found:
        return found[0]
    what = str(errors[0]) if errors else f"not done after {limit:.0f} s"
    raise SourceError(
        f"the model's tokenizer.json cannot encode a text of {len(text)} characters: {what}",
        "its pre_tokenizer holds a regular expression that takes for ever; take the file of the original model",
    )


def _bos_id(tokenizer: Tokenizer, config: Mapping[str, Any]) -> int | None:
    plain = _encoded(tokenizer, "word", special=False)
    processed = _encoded(tokenizer, "word", special=True)
    if len(processed) > len(plain):
        return processed[0] if processed[:1] != plain[:1] else None
    return (
        _token_id(tokenizer, config, "bos_token") if config.get("add_bos_token") is True else None
    )


def _token_id(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    text = token_text(config, name)
    found: int | None = tokenizer.token_to_id(text) if text else None
    return found
