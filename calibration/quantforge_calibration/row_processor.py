"""The processor of a model: token ids of a text with images, pixel values, and what else the model takes.

It is transformers' own code, chosen by the names of classes in the model's files; code that comes with a model is never
run. The files are read by our opener and laid into a folder of their own, where nothing else lies that a library could
come upon. Of two implementations the one on Pillow is taken, which depends on no further library.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge_calibration.image_documents import COPY, PROCESSOR_FILES, check_processor
from quantforge_calibration.opening import FILES
from quantforge_calibration.source_error import SourceError
from quantforge_files.roles import CARRIED, CONFIG, SETTINGS, FileRole

if TYPE_CHECKING:
    from PIL.Image import Image

IDS, MASK = "input_ids", "attention_mask"
VIDEOS = "video_processor"
_KINDS = ("mm_token_type_ids", "token_type_ids")  # of tokens: 0 for text


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
                found = self._processor(
                    text=[text], images=[[*images]] if images else None, return_tensors="pt",
                    padding=False, truncation=False,
                )  # fmt: skip
        except (
            Exception
        ) as error:  # whatever a processor raises about values that it does not expect
            raise SourceError(
                f"{where}: the model's processor refuses it: {' '.join(str(error).split())[:300]}",
                "compare the text with the model's publication, and its processor files too",
            ) from error
        values = {name: value for name, value in found.items() if name != MASK}
        other = [name for name, value in values.items() if not isinstance(value, Tensor)]
        if other or IDS not in values:
            raise SourceError(
                f"{where}: the model's processor makes {', '.join(other) or 'no token ids'}, and no tensor of it",
                "give rows of text alone",
            )
        return values

    def seen(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return which tokens stand for parts of images, bool ``[tokens]``."""
        found = torch.isin(values[IDS][0], self._images)
        for name in _KINDS:
            if name in values:
                found |= values[name][0] != 0
        return found


def load_processor(model: Path, where: str) -> RowProcessor:
    """Load the processor of a model directory; ``where`` a row names an image.

    Raises:
        SourceError: its files are missing or malformed, transformers has no such class, or that needs other libraries.
    """
    check_processor(model, where)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        settings = dict(_copied(model, place))
        try:
            return RowProcessor(_loaded(place, settings, where))
        except ImportError as error:
            said = " ".join(str(error).split())[:300]
            raise SourceError(
                f"{where}: the model's processor needs more: {said}", "install it"
            ) from error
        except SourceError:
            raise
        except Exception as error:  # of files that transformers does not expect
            said = " ".join(str(error).split())[:300]
            raise SourceError(
                f"{where}: {model}: its processor cannot be loaded: {said}", COPY
            ) from error


def _copied(model: Path, place: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Copy the files that a processor consists of; yield those that are settings, read."""
    config = FILES.parse_object(
        FILES.read(model / "config.json", CONFIG, model), model / "config.json", CONFIG, loose=True
    )
    least = {"model_type": config.get("model_type")}
    (place / "config.json").write_text(json.dumps(least))
    yield "config.json", least
    for name in FILES.listing(model, model):
        role = _role(name)
        if role is None:
            continue
        data = FILES.read(model / name, role, model)
        if name.endswith(".json"):
            FILES.check_json(data, model / name, role)
        (place / name).write_bytes(data)
        if role is SETTINGS:
            yield name, FILES.parse_object(data, model / name, role, loose=True)


def _role(name: str) -> FileRole | None:
    return next((role for pattern, role in CARRIED.items() if fnmatchcase(name, pattern)), None)


def _class(settings: Mapping[str, Mapping[str, Any]], where: str) -> Any:
    """Return the class of a processor: that which its files name, else the one of the family."""
    from transformers import ProcessorMixin
    from transformers.models.auto import processing_auto as auto

    files = (*PROCESSOR_FILES, "tokenizer_config.json")
    named = [settings[name].get("processor_class") for name in files if name in settings]
    named.append(auto.PROCESSOR_MAPPING_NAMES.get(settings["config.json"]["model_type"]))
    names = [name for name in named if isinstance(name, str)]
    kind = auto.processor_class_from_name(names[0]) if names else None
    if not isinstance(kind, type) or not issubclass(kind, ProcessorMixin):
        raise SourceError(
            f"{where} names an image: transformers has no processor {names[0] if names else 'of this model'}",
            "code that comes with a model is never run; give rows of text alone",
        )
    return kind


def _loaded(place: Path, settings: Mapping[str, Mapping[str, Any]], where: str) -> Any:
    import transformers

    kind = _class(settings, where)
    options = {"local_files_only": True, "trust_remote_code": False}
    loaders: dict[str, Callable[[], Any]] = {
        "image_processor": lambda: transformers.AutoImageProcessor.from_pretrained(
            place, backend="pil", **options
        ),
        "feature_extractor": lambda: transformers.AutoFeatureExtractor.from_pretrained(
            place, **options
        ),
        "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(place, **options),
        # Videos are not read, and its class needs a library that images do not.
        VIDEOS: lambda: object.__new__(transformers.BaseVideoProcessor),
    }
    parts = kind.get_attributes()
    if unknown := [name for name in parts if name not in loaders]:
        raise SourceError(
            f"{where} names an image: {kind.__name__} has a part that is not known: {unknown[0]}",
            "give rows of text alone",
        )
    values, _ = kind.get_processor_dict(place, **options)
    taken = inspect.signature(kind.__init__).parameters
    own = {name: value for name, value in values.items() if name in taken and name not in parts}
    return _unchecked(kind)(**{name: loaders[name]() for name in parts}, **own)


def _unchecked(kind: Any) -> Any:
    """Return the class, which takes what stands for its part of videos without looking for that part's class."""

    class Images(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return None if name == VIDEOS else super().check_argument_for_proper_class(name, value)

    return Images
