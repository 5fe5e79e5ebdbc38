"""ik_llama.cpp (wheel ik-llama-cpp-python) in a race: one row, plain decoding, GGUF files alone.

Its Python interface has no speculation and no batches of rows. Tokens are chosen greedily from its logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._internals import make_batch_range

from .protocol import (
    PLAIN,
    STORED,
    Chosen,
    Decode,
    DecodedRows,
    Entry,
    EntrySettings,
    common_options,
    instruction_sets,
    serve,
    stored_file,
)

CONTEXT = 4096


class IkLlama:
    """Contexts on one file."""

    def __init__(self, path: Path, threads: int) -> None:
        self._path = path
        self._threads = threads

    def plain(self, chosen: Chosen) -> list[EntrySettings]:
        """With and without weights in its own order, and flash attention, which it is built around."""
        settings = [{"repacked": repacked, "flash": flash} for repacked in (False, True) for flash in (True, False)]
        return [EntrySettings(one, partial(self._decode, one)) for one in settings]

    def _decode(self, settings: Mapping[str, Any]) -> Decode:
        loaded = Context(self._path, self._threads, **settings)

        def run(prompts: list[list[int]], max_new_tokens: int) -> DecodedRows:
            started = perf_counter()
            loaded.clear()
            token, tokens = loaded.read(prompts[0], 0), []
            entered = perf_counter()
            while True:
                tokens.append(token)
                if len(tokens) == max_new_tokens or loaded.is_end(token):
                    break
                token = loaded.read([token], len(prompts[0]) + len(tokens) - 1)
            return DecodedRows([tokens], 1, entered - started, perf_counter() - entered)

        return run


class Context:
    """A model and its keys and values; both are freed with this object.

    Raises: RuntimeError where the file cannot be read.
    """

    def __init__(self, path: Path, threads: int, *, repacked: bool, flash: bool) -> None:
        self._model = self._context = None
        model_params = api.llama_model_default_params()
        model_params.repack_tensors, model_params.use_mmap = repacked, not repacked
        self._model = api.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"ik_llama.cpp does not load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = flash
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"ik_llama.cpp makes no context for {path}")
        self._num_tokens = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._most = api.llama_n_ubatch(self._context)

    def __del__(self) -> None:
        if self._context:
            api.llama_free(self._context)
        if self._model:
            api.llama_free_model(self._model)

    def clear(self) -> None:
        api.llama_kv_cache_clear(self._context)

    def is_end(self, token: int) -> bool:
        return bool(api.llama_token_is_eog(self._model, token))

    def read(self, ids: list[int], position: int) -> int:
        """Return the most probable token after some tokens, of which the first has this position.

        Raises: RuntimeError.
        """
        for place in range(0, len(ids), self._most):
            some = ids[place : place + self._most]
            batch = make_batch_range(some, pos_start=position + place, logits_last=place + self._most >= len(ids))
            code = api.llama_decode(self._context, batch)
            api.llama_batch_free(batch)
            if code:
                raise RuntimeError(f"llama_decode ended with {code}")
        logits = ctypes.cast(api.llama_get_logits_ith(self._context, -1), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(logits, (self._num_tokens,)).argmax())


def main() -> None:
    options = common_options(__doc__).parse_args()

    def start() -> tuple[str, list[Entry]]:
        path = stored_file(options.folder, "target")
        if path is None:
            raise RuntimeError("it takes part where --model is a GGUF file")
        if options.batch_sizes:
            raise RuntimeError("its Python interface decodes one row at a time")
        api.llama_backend_init()
        api._lib.llama_print_system_info.restype = ctypes.c_char_p
        info = instruction_sets(api._lib.llama_print_system_info().decode())
        engine = IkLlama(path, options.threads)
        entry = Entry(PLAIN, PLAIN, f"{STORED} weights, keys and values f16", engine.plain)
        return f"ik_llama.cpp, ik-llama-cpp-python {version('ik-llama-cpp-python')}{info}", [entry]

    serve(start)


if __name__ == "__main__":
    main()
