"""Calibration text: read it from sources, convert it to rows of token ids, and report what was used.

A quantizer measures activations, so its result depends on the text that it is given. This package supplies that text
and accounts for it::

    "a.txt=3,builtin=1" --sources--> documents --tokenizer--> ids --sampler--> Sample(ids, report)

`draw.draw` does all of this in one call. Nothing here imports ``quantforge``; importing this package, parsing a source
and reading documents import neither torch nor tokenizers.

In this folder:

    chat             Render chat messages as text with a model's chat template in jinja's sandbox
    chat_templates   Read the chat templates of a model by name from the file layouts in which models are published
    citation         Cite calibration sources in published files by name and digest instead of local paths
    conversations    Parse the conversation in a row of a dataset: messages, and other variables of the chat template
    draw             Draw calibration rows of token ids from a SOURCE in one call
    image_documents  Read documents of text with images from ``.jsonl``: a text or chat messages, and their image files
    image_rows       Pack documents with images into rows of equal length: whole documents while their images fit
    readers          Read documents from files and hub datasets, never more of them than requested
    row_count        Count the rows that texts yield for a model without drawing them, and without importing torch
    row_processor    The processor of a multimodal model: converts text with images to token ids
    sampler          Sample rows of equal length from tokenized documents, and report what was used
    source_error     The error that this package raises for unusable text, and the file opener that raises it
    sources          Parse a SOURCE of calibration text as typed by the user, and read its documents
    tokenizer        The tokenizer of a model directory, loaded with the ``tokenizers`` library alone
"""

from quantforge_calibration.source_error import SourceError
from quantforge_calibration.sources import Source, documents, parse_sources

__all__ = ["Source", "SourceError", "documents", "parse_sources"]
