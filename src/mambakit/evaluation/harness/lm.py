"""A model as lm-evaluation-harness asks for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from tokenizers import Tokenizer

from ...decoding import generate_text
from ...model import MambaLM
from ...progress import progress
from ..continuations import Continuations, Request

MAX_NEW_TOKENS = 256  # the harness' own, for tasks that do not say
GENERATED_ROWS = 32  # texts that are continued side by side
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


class HarnessModel(LM):  # type: ignore[misc]
    """One of our models. Texts are cut into tokens as the harness' Hugging Face backend does it, but never truncated:
    a context may have any length."""

    def __init__(
        self, model: MambaLM, tokenizer: Tokenizer, first_token: int, end_tokens: Sequence[int], dtype: torch.dtype
    ) -> None:
        """`first_token` stands before texts that have no context."""
        super().__init__()
        self.model, self.tokenizer, self.first_token, self.end_tokens = model, tokenizer, first_token, end_tokens
        self._first_text = tokenizer.decode([first_token], skip_special_tokens=False)
        self._continuations = Continuations(model, dtype)
        self._device = model.device

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        pairs = [_with_spaces_after(*request.args) for request in requests]
        wholes = self._encode([context + continuation for context, continuation in pairs])
        contexts = self._encode([context for context, _ in pairs])
        asked = []
        for (context, _), whole, before in zip(pairs, wholes, contexts, strict=True):
            if context:
                asked.append(Request(before, whole[len(before) :]))
            elif whole[:1] == [self.first_token]:
                asked.append(Request(whole[:1], whole[1:]))
            else:
                asked.append(Request([self.first_token], whole))
        return self._likelihoods(asked)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of whole texts, with the state carried through them: there are no windows."""
        texts = self._encode([request.args[0] for request in requests])
        return [found[0] for found in self._likelihoods([Request([self.first_token], text) for text in texts])]

    def _likelihoods(self, asked: Sequence[Request]) -> list[tuple[float, bool]]:
        with progress("answering", len(asked), "requests") as advance:
            return [(each.log_probability, each.is_greedy) for each in self._continuations.likelihoods(asked, advance)]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """With the special tokens that the tokenizer adds, unless a text begins with the first token by itself."""
        given = {text: not text.startswith(self._first_text) for text in texts}
        found: dict[str, list[int]] = {"": []}
        for adds in (False, True):
            some = [text for text, is_added in given.items() if text and is_added == adds]
            encoded = self.tokenizer.encode_batch(some, add_special_tokens=adds)
            found |= {text: one.ids for text, one in zip(some, encoded, strict=True)}
        return [found[text] for text in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        texts = [""] * len(requests)
        by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        with progress("generating", len(requests), "texts") as advance:
            for numbers in by_options.values():
                options = _options(requests[numbers[0]].args[1])
                numbers.sort(key=lambda number: len(requests[number].args[0]))
                for first in range(0, len(numbers), GENERATED_ROWS):
                    some = numbers[first : first + GENERATED_ROWS]
                    prompts = [requests[number].args[0] for number in some]
                    ends = self.end_tokens or (self.first_token,)
                    for row, piece in generate_text(self.model, self.tokenizer, prompts, end_tokens=ends, **options):
                        texts[some[row]] += piece
                    advance(len(some))
        return texts


def _with_spaces_after(context: str, continuation: str) -> tuple[str, str]:
    """White space at the end of a context belongs to the word after it."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """How the harness wants a text to be generated, in our words."""
    normal = normalize_gen_kwargs(given, MAX_NEW_TOKENS)
    sampling = {name: normal[name] for name in SAMPLING if normal.get(name) is not None}
    return {
        "max_new_tokens": normal["max_gen_toks"],
        "stop_strings": [text for text in normal["until"] if text],
        "temperature": float(normal.get("temperature") or 0.0) if normal["do_sample"] else 0.0,
        "seed": 0,
        **(sampling if normal["do_sample"] else {}),
    }


def foreign_model(model: Any, tokenizer: Any, dtype: torch.dtype) -> LM:
    """A model of transformers, through the harness' own backend."""
    from lm_eval.models.huggingface import HFLM

    on_gpu = model.device.type == "cuda"
    return HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=64 if on_gpu else 8,
        mixed_precision_dtype=None if dtype == torch.float32 else dtype,
        trust_remote_code=False,
    )
