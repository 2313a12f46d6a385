"""llama.cpp's own library, by its C functions: tokens of a text, and logits of tokens.

Structs of parameters change from version to version. They are used as they come from llama.cpp's own defaults, in a
block of memory that is larger than any of them; only the first numbers of the context's are set, which are always sizes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FOLDER = "MAMBAKIT_LLAMACPP"  # the environment variable that names the folder of the library
ROOM = 1024  # bytes for a struct of parameters


class _Parameters(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_uint32 * (ROOM // 4)),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("num_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_lines: list[str] = []


@_LOG
def _keep(_level: int, text: bytes, _data: object) -> None:
    _lines.append(text.decode(errors="replace"))
    del _lines[:-200]


def _library() -> ctypes.CDLL:
    folder = Path(os.environ[FOLDER])
    ggml = ctypes.CDLL(str(next(folder.glob("libggml.*so"))), ctypes.RTLD_GLOBAL)
    llama = ctypes.CDLL(str(next(folder.glob("libllama.*so"))), ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    pointers = {
        "llama_model_load_from_file": [ctypes.c_char_p, _Parameters],
        "llama_init_from_model": [ctypes.c_void_p, _Parameters],
        "llama_model_get_vocab": [ctypes.c_void_p],
        "llama_get_memory": [ctypes.c_void_p],
    }
    for name, arguments in pointers.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = ctypes.c_void_p, arguments
    for name in ("llama_model_default_params", "llama_context_default_params"):
        getattr(llama, name).restype = _Parameters
    llama.llama_vocab_n_tokens.argtypes = llama.llama_vocab_eos.argtypes = [ctypes.c_void_p]
    llama.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    llama.llama_vocab_is_eog.restype = ctypes.c_bool
    ids = ctypes.POINTER(ctypes.c_int32)
    flag, number = ctypes.c_bool, ctypes.c_int32
    llama.llama_tokenize.argtypes = [ctypes.c_void_p, ctypes.c_char_p, number, ids, number, flag, flag]
    llama.llama_detokenize.argtypes = [ctypes.c_void_p, ids, number, ctypes.c_char_p, number, flag, flag]
    llama.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    llama.llama_get_logits_ith.argtypes = [ctypes.c_void_p, number]
    llama.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    llama.llama_set_n_threads.argtypes = [ctypes.c_void_p, number, number]
    llama.llama_memory_clear.argtypes = [ctypes.c_void_p, flag]
    llama.llama_free.argtypes = llama.llama_model_free.argtypes = [ctypes.c_void_p]
    llama.llama_log_set(_keep, None)
    ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    return llama


class Llama:
    """A GGUF file in llama.cpp, on the CPU."""

    _shared: ctypes.CDLL | None = None

    def __init__(self, path: Path, *, context: int = 2048) -> None:
        if Llama._shared is None:
            Llama._shared = _library()
        self.c = Llama._shared
        self.model = self.c.llama_model_load_from_file(os.fsencode(path), self.c.llama_model_default_params())
        assert self.model, "llama.cpp does not open the file:\n" + "".join(_lines)
        self.vocab = self.c.llama_model_get_vocab(self.model)
        self.size = self.c.llama_vocab_n_tokens(self.vocab)
        parameters = self.c.llama_context_default_params()
        parameters.numbers[0] = parameters.numbers[1] = context  # n_ctx, n_batch
        self.context = self.c.llama_init_from_model(self.model, parameters)
        assert self.context, "llama.cpp makes no context:\n" + "".join(_lines)
        self.c.llama_set_n_threads(self.context, 1, 1)  # several wait for each other in a loop, on busy cores for long

    def close(self) -> None:
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """As for a prompt; text that looks like a special token stays text unless `special`."""
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 8))()
        found = self.c.llama_tokenize(self.vocab, data, len(data), room, len(room), True, special)
        assert found >= 0
        return list(room[:found])

    def text(self, tokens: Sequence[int]) -> str:
        room = ctypes.create_string_buffer(64 * len(tokens) + 64)
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        found = self.c.llama_detokenize(self.vocab, ids, len(tokens), room, len(room), False, False)
        assert found >= 0
        return room.raw[:found].decode()

    def logits(self, tokens: Sequence[int], *, begin: bool = True) -> np.ndarray:
        """(L, V) after each token. Without `begin`, the tokens go on where the last call ended."""
        if begin:
            self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        length = len(tokens)
        every = (ctypes.c_int8 * length)(*[1] * length)
        batch = _Batch(length, (ctypes.c_int32 * length)(*tokens), None, None, None, None, every)
        status = self.c.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode gave {status}:\n" + "".join(_lines)
        rows = [self.c.llama_get_logits_ith(self.context, i) for i in range(length)]
        return np.stack([np.ctypeslib.as_array(row, (self.size,)).copy() for row in rows])

    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most probable tokens, one after the other."""
        found: list[int] = []
        logits = self.logits(prompt)[-1]
        for _ in range(count):
            found.append(int(logits.argmax()))
            logits = self.logits(found[-1:], begin=False)[-1]
        return found
