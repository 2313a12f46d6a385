"""How well a model predicts a text: loss, perplexity per token and per word, bits per byte.

Documents are read in full, with the model's state carried through each of them, so that no figure depends on where a
window happens to begin; with `window`, as a model of that context would see them.

Bits per byte and perplexity per word are costs of the whole text, so that models with other tokenizers, and gzip, can
stand beside: a document's first token, which no model is asked to predict, is charged as if all were equally likely.
Where parts of a text are not learned (prompts, what a user says), all figures are of the parts that are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CheckpointError, load, native
from ..data import datasets
from ..data.shards import SPLITS, is_shards
from ..decoding import generate_text, whole_texts
from ..device import DTYPES, choose_device, choose_dtype
from ..files import UserError, path_of, paths_of
from ..model import MambaLM
from ..model.int8 import quantize_
from ..progress import say
from .baselines import evaluate_baseline, evaluate_model, in_tokens_of, open_baseline
from .keeping import keep_in_run
from .scoring import ModelResult
from .text import EvaluatedText, Sources, check_ids, open_text

ROWS = 8  # of a batch
SAMPLE_TOKENS = 16  # of a document that a sample goes on from
SAMPLE_ROWS = 32  # samples that are written side by side
ALL = "all"  # what is evaluated of text, or of files of tokens, which have no splits


@dataclass(frozen=True)
class Evaluation:
    """What was evaluated, the results, and some samples."""

    checkpoint: str
    data: list[str]
    split: str
    max_tokens: int | None  # of the data; None for all of it
    results: list[ModelResult]
    samples: list[dict[str, str]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    split: str = "val",
    window: int | None = None,
    baselines: Sequence[str] = (),
    samples: int = 0,
    max_tokens: int | None = None,
    batch_rows: int = ROWS,
    text_column: str | None = None,
    separator: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    int8: bool = False,
) -> Evaluation:
    """Evaluate a model folder, or the best checkpoint of a run, on a split of a shard folder, or on all of some text
    files and folders. That of a run is noted there, for its report.

    `window` adds a line with documents cut to that many tokens of context, `int8` one with weights of 8 bits, as for
    `generate`. A baseline is `gzip`, a model folder, or a
    Hugging Face name; each sees the same bytes. `text_column` and `separator` say how text is read, as for `prepare`.
    """
    model, data = path_of(model), paths_of(data)
    baselines = paths_of(baselines)
    _check_arguments(data, split, window, samples, max_tokens, batch_rows)
    place, dtype = place_and_dtype(device, precision)
    if samples and place.type == "xla":
        raise UserError("text is not generated on xla; leave out --samples, or use another device")
    opened = [open_baseline(name) for name in baselines]
    folder = native.find(model)
    loaded = load(folder)
    if loaded.tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json; text cannot be evaluated without one")
    tokenizer = whole_texts(loaded.tokenizer)
    network = loaded.model.to(place)
    with ExitStack() as stack:
        sources = Sources(data, {"text_column": text_column, "separator": separator})
        text = open_text(sources, split, tokenizer, folder, stack, max_tokens)
        check_ids(str(folder), text.stream, network.config.padded_vocab_size)
        texts = [in_tokens_of(baseline, text, stack) for baseline in opened]
        results = [
            evaluate_model(str(folder), network, text, dtype, batch_rows, cut)
            for cut in ([None] if window is None else [None, window])
        ]
        for baseline, same_text in zip(opened, texts, strict=True):
            results.append(evaluate_baseline(baseline, same_text, place, dtype, batch_rows, window))
        written = _samples(network, text, loaded.end_tokens, samples)
        if int8:
            narrow = evaluate_model(f"{folder}, int8", quantize_(network), text, dtype, batch_rows, None)
            results.insert(1, narrow)
    found = Evaluation(
        str(folder), sources.names, split if is_shards(Path(data[0])) else ALL, max_tokens, results, written
    )
    keep_in_run(model, found)
    return found


def place_and_dtype(device: str, precision: str) -> tuple[torch.device, torch.dtype]:
    """Where to compute, and the dtype of matrix products there."""
    place = choose_device(device)
    if precision not in ("auto", *DTYPES):
        raise UserError(f"precision={precision!r} does not exist; choose one of auto, {', '.join(DTYPES)}")
    if precision == "fp16" and place.type != "cuda":
        raise UserError(f"precision=fp16 needs a CUDA GPU, but the device is {place.type}; use fp32 or bf16")
    return place, choose_dtype(precision, place)


def _check_arguments(
    data: Sequence[str | Path], split: str, window: int | None, samples: int, max_tokens: int | None, batch_rows: int
) -> None:
    """What can be known to be wrong before anything is opened."""
    if split not in SPLITS:
        raise UserError(f"split {split!r} does not exist; choose one of {', '.join(SPLITS)}")
    if not data:
        raise UserError("there is nothing to evaluate on; name a folder of shards or of text with --data")
    problems = {
        f"window={window}: need a number from 1 to 2^31": window is not None and not 1 <= window <= 2**31,
        f"samples={samples}: need at least 0": samples < 0,
        f"max_tokens={max_tokens}: need at least 2": max_tokens is not None and max_tokens < 2,
        f"batch_rows={batch_rows}: need at least 1": batch_rows < 1,
        **{
            f"{path} does not exist; give a file or folder of text, or a folder of shards": True
            for path in data
            if not Path(path).exists() and not datasets.is_dataset(str(path))
        },
    }
    if wrong := [problem for problem, is_wrong in problems.items() if is_wrong]:
        raise UserError("; ".join(wrong))


def _samples(model: MambaLM, text: EvaluatedText, end_tokens: Sequence[int], count: int) -> list[dict[str, str]]:
    """What the model writes after the beginnings of some of the documents."""
    stream, prompts = text.stream, []
    for begin, end in text.ranges[:count]:
        tokens = stream.layout.tokens(stream.read(begin, min(end - 1, begin + SAMPLE_TOKENS))).tolist()
        prompts.append(text.tokenizer.decode(tokens).rstrip("\ufffd"))  # which ends inside a character
    prompts = [prompt for prompt in prompts if prompt]
    if len(prompts) < count:
        say(f"{len(prompts)} samples in place of {count}: the text has no more documents to go on from")
    texts = [""] * len(prompts)
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "end_tokens": end_tokens}
    for first in range(0, len(prompts), SAMPLE_ROWS):
        some = prompts[first : first + SAMPLE_ROWS]
        for row, piece in generate_text(model, text.tokenizer, some, seed=first, **options):
            texts[first + row] += piece
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
