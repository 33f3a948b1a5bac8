"""The processor of a model: token ids of a text with images, pixel values, and what else the model takes.

It is transformers' own code, chosen by the names of classes in the model's files; code that comes with a model is never
run. The files are read by our opener and copied into a folder of their own, where a library finds nothing else. Of two
implementations the one on Pillow is taken, which depends on no further library.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge_calibration.image_documents import COPY, PROCESSOR_FILES, check_processor
from quantforge_calibration.source_error import FILES, SourceError
from quantforge_files.roles import CARRIED, CONFIG, SETTINGS

if TYPE_CHECKING:
    from PIL.Image import Image

IDS, MASK = "input_ids", "attention_mask"
VIDEOS = "video_processor"
_KINDS = ("mm_token_type_ids", "token_type_ids")  # of tokens: 0 for text
_TEXT_ALONE = "give rows of text alone"


class RowProcessor:
    """A processor; calls are safe on several threads.

    Attributes:
        placeholder: what stands for an image in a text, "" where its class does not tell.
    """

    def __init__(self, processor: Any) -> None:
        self._processor, self._lock = processor, threading.Lock()
        found = getattr(processor, "image_token", None)
        self.placeholder = found if isinstance(found, str) else ""
        ids = getattr(processor, "image_token_ids", None) or [
            getattr(processor, "image_token_id", None)
        ]
        self._images = torch.tensor([item for item in ids if isinstance(item, int)])

    def check(self, text: str, images: int, where: str) -> None:
        """Refuse a text with more or fewer places for images than it has images."""
        places = text.count(self.placeholder) if self.placeholder else images
        if places != images:
            raise SourceError(
                f"{where}: {images} image(s), and its text has {self.placeholder} {places} time(s)",
                f"write {self.placeholder} where an image belongs, or give `messages` and --chat-template",
            )

    def __call__(self, text: str, images: Sequence[Image], where: str) -> dict[str, Tensor]:
        """Return what the model takes of a text: ``input_ids`` ``[1, tokens]``, and the rest by argument.

        Raises:
            SourceError: the processor refuses it.
        """
        try:
            with self._lock:  # the tokenizer inside is set anew for every call
                values = self._processor(
                    text=[text],
                    images=[[*images]] if images else None,
                    return_tensors="pt",
                    padding=False,
                    truncation=False,
                )
        except Exception as error:  # whatever a processor raises about unexpected values
            raise SourceError(
                f"{where}: the model's processor refuses it: {_shortened(error)}",
                "compare the text with the model's publication, and its processor files too",
            ) from error
        if other := [name for name, value in values.items() if not isinstance(value, Tensor)]:
            raise SourceError(
                f"{where}: the model's processor makes {other[0]}, which is not a tensor",
                _TEXT_ALONE,
            )
        return {name: value for name, value in values.items() if name != MASK}

    def seen(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return which tokens stand for parts of images, bool ``[tokens]``."""
        found = torch.isin(values[IDS][0], self._images)
        for name in _KINDS:
            if name in values:
                found |= values[name][0] != 0
        return found


def load_processor(model: Path, where: str) -> RowProcessor:
    """Load the processor of a model directory; ``where`` is the row that names an image.

    Raises:
        SourceError: its files are missing or malformed, transformers has no such class, or that needs other libraries.
    """
    check_processor(model, where)
    with tempfile.TemporaryDirectory() as folder:
        settings = _copied(model, Path(folder))
        kind = _class(settings, where)
        try:
            return RowProcessor(_loaded(kind, Path(folder)))
        except Exception as error:  # files that transformers does not expect, or a missing library
            raise SourceError(
                f"{where}: the processor of {model} cannot be loaded: {_shortened(error)}",
                f"install what it names; or {COPY}; or {_TEXT_ALONE}",
            ) from error


def _copied(model: Path, place: Path) -> dict[str, Mapping[str, Any]]:
    """Copy the files that a processor consists of; return those that are settings, parsed, by name."""
    path = model / "config.json"
    config = FILES.parse_object(FILES.read(path, CONFIG, model), path, CONFIG, loose=True)
    settings: dict[str, Mapping[str, Any]] = {path.name: {"model_type": config.get("model_type")}}
    (place / path.name).write_text(json.dumps(settings[path.name]))
    for name in FILES.listing(model, model):
        role = next((CARRIED[pattern] for pattern in CARRIED if fnmatchcase(name, pattern)), None)
        if role is None:
            continue
        data = FILES.read(model / name, role, model)
        if name.endswith(".json"):
            FILES.check_json(data, model / name, role)
        (place / name).write_bytes(data)
        if role is SETTINGS:
            settings[name] = FILES.parse_object(data, model / name, role, loose=True)
    return settings


def _class(settings: Mapping[str, Mapping[str, Any]], where: str) -> Any:
    """Return the class of a processor: the one that its files name, else the one of the family."""
    from transformers import ProcessorMixin
    from transformers.models.auto import processing_auto as auto

    files = (*PROCESSOR_FILES, "tokenizer_config.json")
    named = [settings[name].get("processor_class") for name in files if name in settings]
    named.append(auto.PROCESSOR_MAPPING_NAMES.get(settings["config.json"]["model_type"]))
    name = next((name for name in named if isinstance(name, str)), "")
    kind = auto.processor_class_from_name(name) if name else None
    if not isinstance(kind, type) or not issubclass(kind, ProcessorMixin):
        raise SourceError(
            f"{where} names an image: transformers has no processor {name or 'of this model'}",
            f"code that comes with a model is never run; {_TEXT_ALONE}",
        )
    return kind


def _loaded(kind: Any, place: Path) -> Any:
    """Load a processor without its part for videos, whose class needs a library that images do not."""
    import transformers

    class ImagesAlone(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return None if name == VIDEOS else super().check_argument_for_proper_class(name, value)

    loaders = {
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
        "tokenizer": transformers.AutoTokenizer,
    }
    options = {"local_files_only": True, "trust_remote_code": False}
    parts = {
        name: object.__new__(transformers.BaseVideoProcessor)
        if name == VIDEOS
        else loaders[name].from_pretrained(
            place, **({"backend": "pil"} if name == "image_processor" else {}), **options
        )
        for name in kind.get_attributes()
    }
    values, _ = kind.get_processor_dict(place, **options)
    own = (inspect.signature(kind.__init__).parameters.keys() & values.keys()) - parts.keys()
    return ImagesAlone(**parts, **{name: values[name] for name in own})


def _shortened(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
