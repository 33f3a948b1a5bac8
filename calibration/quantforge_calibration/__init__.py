"""Calibration text: where it comes from, how it becomes rows of token ids, and what was used.

A quantizer measures activations, and what it measures depends on the text it is shown. This package
supplies that text and accounts for it. The path is short::

    "a.txt=3,builtin=1" --sources--> documents --tokenizer--> ids --sampler--> Sample(ids, report)

`draw.draw` walks all of it in one call. Nothing here imports ``quantforge``; importing this
package, parsing a source and reading documents import neither torch nor tokenizers.

In this folder:

    chat             Chat messages as a text, written by a model's chat template in jinja's sandbox
    chat_templates   Chat templates of a model by name, from each of the file layouts in which models are published
    citation         Names and digests under which a SOURCE is cited in a file that is published: never where it lies
    conversations    The conversation in a row of a data set: messages, and the other variables of its chat template
    draw             Rows of token ids from a SOURCE, in one call
    image_documents  Documents of text with images, out of ``.jsonl``: a text or chat messages
    image_rows       Rows of one length from documents with images: whole documents as long as their images fit
    readers          Reading documents out of files and datasets of the hub, never more of them than asked for
    row_count        Rows that texts give a model, counted without drawing them, and so without torch
    row_processor    The processor of a model: token ids of a text with images, pixel values
    sampler          Rows of one length from documents of token ids, with an account of what was used
    source_error     The one error of this package, a source of text that cannot be used
    sources          A SOURCE, as it is typed, and the documents that it names
    tokenizer        The tokenizer of a model directory, read with the ``tokenizers`` library alone
"""

from quantforge_calibration.source_error import SourceError
from quantforge_calibration.sources import Source, documents, parse_sources

__all__ = ["Source", "SourceError", "documents", "parse_sources"]
