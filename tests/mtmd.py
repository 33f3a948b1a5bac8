"""The part of llama.cpp that looks at pictures, inside of the ``xllamacpp`` wheel: its C functions, called directly.

Parameters are passed by value in structures whose fields differ between versions: they are taken from the library's own
defaults and handed back as they came, in a buffer that is larger than any version's.

Where a family has a token behind each row of a picture, the library begins it with what lies in memory, times 0. Where
that is no number, neither is the token: so all of this runs in new processes, whose memory nobody has written to.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

IMAGE = 1  # the type of a chunk
Result = TypeVar("Result")
_NEW = multiprocessing.get_context("spawn")


class _Parameters(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * 1024),)


class _Text(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("add_special", ctypes.c_bool),
        ("parse_special", ctypes.c_bool),
        ("more", ctypes.c_uint8 * 64),
    )


def library() -> Any:
    """The wheel's library; its symbols are those of libllama and libmtmd."""
    import xllamacpp

    found = next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
    library = ctypes.CDLL(str(found))
    for name in ("llama_model_load_from_file", "mtmd_init_from_file", "mtmd_bitmap_init", "mtmd_input_chunks_init",
                 "mtmd_input_chunks_get", "mtmd_default_marker"):  # fmt: skip
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("llama_model_default_params", "mtmd_context_params_default"):
        getattr(library, name).restype = _Parameters
    for name in ("mtmd_input_chunks_size", "mtmd_input_chunk_get_n_tokens"):
        getattr(library, name).restype = ctypes.c_size_t
    library.mtmd_default_marker.restype = ctypes.c_char_p
    library.mtmd_get_output_embd.restype = ctypes.POINTER(ctypes.c_float)
    return library


def embeddings(model: Path, projector: Path, picture: np.ndarray, width: int) -> np.ndarray:
    """What llama.cpp computes for a picture, uint8 ``[height, width, 3]``: float32 ``[tokens, width]``."""
    lib, pointer = library(), ctypes.c_void_p
    lib.llama_backend_init()
    text = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
    assert text, model
    context = lib.mtmd_init_from_file(
        str(projector).encode(), pointer(text), lib.mtmd_context_params_default()
    )
    assert context, projector
    height, across, _ = picture.shape
    data = np.ascontiguousarray(picture).tobytes()
    bitmap = pointer(lib.mtmd_bitmap_init(ctypes.c_uint32(across), ctypes.c_uint32(height), data))
    chunks = pointer(lib.mtmd_input_chunks_init())
    marker = lib.mtmd_default_marker()
    prompt = _Text(marker, len(marker), True, True)
    bitmaps = (pointer * 1)(bitmap)
    assert (
        lib.mtmd_tokenize(
            pointer(context), chunks, ctypes.byref(prompt), bitmaps, ctypes.c_size_t(1)
        )
        == 0
    )
    found = []
    for number in range(lib.mtmd_input_chunks_size(chunks)):
        chunk = pointer(lib.mtmd_input_chunks_get(chunks, ctypes.c_size_t(number)))
        if lib.mtmd_input_chunk_get_type(chunk) == IMAGE:
            assert lib.mtmd_encode_chunk(pointer(context), chunk) == 0
            tokens = lib.mtmd_input_chunk_get_n_tokens(chunk)
            values = lib.mtmd_get_output_embd(pointer(context))
            found.append(np.ctypeslib.as_array(values, (tokens, width)).copy())
    lib.mtmd_input_chunks_free(chunks)
    lib.mtmd_bitmap_free(bitmap)
    lib.mtmd_free(pointer(context))
    lib.llama_model_free(pointer(text))
    return np.concatenate(found)


def run_in_new_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """What a function of a module returns in a new process."""
    with ProcessPoolExecutor(1, _NEW) as process:
        return process.submit(work, *arguments).result()


@contextmanager
def llama_cpp_server(model: Path, projector: Path) -> Iterator[str]:
    """Yield the address of llama.cpp's server of a model that looks at pictures."""
    own, other = _NEW.Pipe()
    process = _NEW.Process(target=_serve, args=(model, projector, other), daemon=True)
    process.start()
    other.close()
    try:
        yield own.recv()
    finally:
        own.close()
        process.join()


def _serve(model: Path, projector: Path, caller: Connection) -> None:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.mmproj.path = str(model), str(projector)
    settings.hostnames, settings.port = ["127.0.0.1"], 0
    settings.n_ctx, settings.n_parallel = 256, 1
    settings.cpuparams.n_threads = 1
    settings.warmup, settings.verbosity = False, -1
    server = xllamacpp.Server(settings)
    caller.send(server.listening_address)
    caller.poll(None)  # until the caller has closed its end
