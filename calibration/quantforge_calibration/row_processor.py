"""The processor of a multimodal model: converts text with images to token ids, pixel values and other model inputs.

It is transformers' own code, chosen by the class names in the model's files; code that comes with a model is never run.
The files are read by our own bounded reader and copied into a temporary directory, so that the library finds no other
files. Of two implementations the one based on Pillow is used, which needs no other library.
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

from quantforge_calibration.image_documents import COPY_HINT, PROCESSOR_FILES, check_processor
from quantforge_calibration.source_error import FILES, SourceError
from quantforge_files.roles import CARRIED_FILES, CONFIG, SETTINGS

if TYPE_CHECKING:
    from PIL.Image import Image

IDS, MASK = "input_ids", "attention_mask"
VIDEO_PROCESSOR = "video_processor"
_TOKEN_TYPE_KEYS = ("mm_token_type_ids", "token_type_ids")  # value 0 means text
_TEXT_ONLY_HINT = "give rows of text alone"


class RowProcessor:
    """Thread-safe wrapper of a transformers processor.

    Attributes:
        placeholder: text that stands for an image, "" if the processor does not define one.
    """

    def __init__(self, processor: Any) -> None:
        self._processor, self._lock = processor, threading.Lock()
        image_token = getattr(processor, "image_token", None)
        self.placeholder = image_token if isinstance(image_token, str) else ""
        image_token_ids = getattr(processor, "image_token_ids", None) or [
            getattr(processor, "image_token_id", None)
        ]
        self._image_token_ids = torch.tensor(
            [item for item in image_token_ids if isinstance(item, int)]
        )

    def check(self, text: str, image_count: int, where: str) -> None:
        """Check that a text has as many image placeholders as it has images."""
        placeholders = text.count(self.placeholder) if self.placeholder else image_count
        if placeholders != image_count:
            raise SourceError(
                f"{where}: {image_count} image(s), and its text has {self.placeholder} {placeholders} time(s)",
                f"write {self.placeholder} where an image belongs, or give `messages` and --chat-template",
            )

    def __call__(self, text: str, images: Sequence[Image], where: str) -> dict[str, Tensor]:
        """Return the model inputs of a text by argument name; ``input_ids`` is ``[1, tokens]``.

        Raises:
            SourceError: the processor refuses the text.
        """
        try:
            with self._lock:  # a call changes settings of the tokenizer inside
                values = self._processor(
                    text=[text],
                    images=[[*images]] if images else None,
                    return_tensors="pt",
                    padding=False,
                    truncation=False,
                )
        except Exception as error:  # a processor may raise anything on unexpected values
            raise SourceError(
                f"{where}: the model's processor refuses it: {_short_message(error)}",
                "compare the text with the model's publication, and its processor files too",
            ) from error
        if other_names := [name for name, value in values.items() if not isinstance(value, Tensor)]:
            raise SourceError(
                f"{where}: the model's processor makes {other_names[0]}, which is not a tensor",
                _TEXT_ONLY_HINT,
            )
        return {name: value for name, value in values.items() if name != MASK}

    def image_mask(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return which tokens represent parts of images, bool ``[tokens]``."""
        mask = torch.isin(values[IDS][0], self._image_token_ids)
        for name in _TOKEN_TYPE_KEYS:
            if name in values:
                mask |= values[name][0] != 0
        return mask


def load_processor(model: Path, where: str) -> RowProcessor:
    """Load the processor of a model directory; ``where`` is the row that names an image.

    Raises:
        SourceError: files are missing or malformed, transformers has no such class, or the class needs other libraries.
    """
    check_processor(model, where)
    with tempfile.TemporaryDirectory() as folder:
        json_files = _copy_files(model, Path(folder))
        processor_class = _processor_class(json_files, where)
        try:
            return RowProcessor(_create_processor(processor_class, Path(folder)))
        except Exception as error:  # unexpected files, or a missing library
            raise SourceError(
                f"{where}: the processor of {model} cannot be loaded: {_short_message(error)}",
                f"install what it names; or {COPY_HINT}; or {_TEXT_ONLY_HINT}",
            ) from error


def _copy_files(model: Path, destination: Path) -> dict[str, Mapping[str, Any]]:
    """Copy the files of a processor to a directory; return the parsed JSON files by name."""
    path = model / "config.json"
    config = FILES.parse_object(FILES.read(path, CONFIG, model), path, CONFIG, loose=True)
    json_files: dict[str, Mapping[str, Any]] = {path.name: {"model_type": config.get("model_type")}}
    (destination / path.name).write_text(json.dumps(json_files[path.name]))
    for name in FILES.list_names(model, model):
        role = next(
            (CARRIED_FILES[pattern] for pattern in CARRIED_FILES if fnmatchcase(name, pattern)),
            None,
        )
        if role is None:
            continue
        data = FILES.read(model / name, role, model)
        if name.endswith(".json"):
            FILES.check_json(data, model / name, role)
        (destination / name).write_bytes(data)
        if role is SETTINGS:
            json_files[name] = FILES.parse_object(data, model / name, role, loose=True)
    return json_files


def _processor_class(json_files: Mapping[str, Mapping[str, Any]], where: str) -> Any:
    """Return the processor class named in the model's files, else that of its model type."""
    from transformers import ProcessorMixin
    from transformers.models.auto import processing_auto as auto

    files = (*PROCESSOR_FILES, "tokenizer_config.json")
    candidates = [json_files[name].get("processor_class") for name in files if name in json_files]
    candidates.append(auto.PROCESSOR_MAPPING_NAMES.get(json_files["config.json"]["model_type"]))
    name = next((name for name in candidates if isinstance(name, str)), "")
    processor_class = auto.processor_class_from_name(name) if name else None
    if not isinstance(processor_class, type) or not issubclass(processor_class, ProcessorMixin):
        raise SourceError(
            f"{where} names an image: transformers has no processor {name or 'of this model'}",
            f"code that comes with a model is never run; {_TEXT_ONLY_HINT}",
        )
    return processor_class


def _create_processor(processor_class: Any, directory: Path) -> Any:
    """Create a processor without its video part, whose class needs libraries that images do not."""
    import transformers

    class ImageOnlyProcessor(processor_class):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return (
                None
                if name == VIDEO_PROCESSOR
                else super().check_argument_for_proper_class(name, value)
            )

    loaders = {
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
        "tokenizer": transformers.AutoTokenizer,
    }
    options = {"local_files_only": True, "trust_remote_code": False}
    components = {
        name: object.__new__(transformers.BaseVideoProcessor)
        if name == VIDEO_PROCESSOR
        else loaders[name].from_pretrained(
            directory, **({"backend": "pil"} if name == "image_processor" else {}), **options
        )
        for name in processor_class.get_attributes()
    }
    processor_config, _ = processor_class.get_processor_dict(directory, **options)
    argument_names = (
        inspect.signature(processor_class.__init__).parameters.keys() & processor_config.keys()
    ) - components.keys()
    return ImageOnlyProcessor(
        **components, **{name: processor_config[name] for name in argument_names}
    )


def _short_message(error: Exception) -> str:
    """Return the type and message of an error in one line, truncated."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
