"""How well a model predicts a text: loss, perplexity per token and per word, bits per byte.

Documents are read in full, with the model's state carried through each of them, so that no figure depends on where a
window happens to begin; with `window`, as a model of that context would see them.

Bits per byte and perplexity per word are costs of the whole text, so that models with other tokenizers, and gzip, can
stand beside: a document's first token, which no model is asked to predict, is charged as if all were equally likely.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .checkpoint import CheckpointError, load, native
from .data.foreign import adopt, is_tokens
from .data.lanes import Range, document_ranges, lanes
from .data.loader import Batch
from .data.prepare import prepare
from .data.shards import SPLITS, TOKENIZER, TokenStream, is_shards
from .data.tokenize import same_tokenizer
from .device import autocast, choose_device, choose_dtype
from .files import UserError
from .model import MambaLM, State
from .progress import progress

ROWS, LENGTH = 8, 1024  # of a batch
BASELINE_CONTEXT = 2048  # of a foreign model that does not say its own
SAMPLE_TOKENS = 16  # of a document that a sample goes on from


@dataclass(frozen=True)
class Score:
    """The summed loss of the targets, and how many there were."""

    loss_sum: float
    targets: int

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.targets)


def score(
    model: MambaLM,
    batches: Iterable[Batch],
    *,
    dtype: torch.dtype = torch.float32,
    before_batch: Callable[[], None] = lambda: None,
    after_batch: Callable[[int], None] = lambda targets: None,
) -> Score:
    """The loss of `lanes` of documents, with the state carried from batch to batch where a document goes on."""
    device = model.lm_head.weight.device
    was_training = model.training
    model.eval()
    loss_sum, targets = 0.0, 0
    state: State | None = None
    try:
        for batch in batches:
            before_batch()
            batch = batch.to(device)
            with torch.inference_mode(), autocast(device, dtype):
                output = model(
                    batch.tokens,
                    doc_ids=batch.doc_ids,
                    state=None if state is None else state.keep(batch.carries),
                    targets=batch.targets,
                    loss_mask=batch.loss_mask,
                )
            state = output.state
            loss_sum += float(output.loss_sum)  # sync point
            targets += int(output.num_targets)
            after_batch(int(output.num_targets))
    finally:
        model.train(was_training)
    return Score(loss_sum, targets)


@dataclass(frozen=True)
class Result:
    """What one model reaches on a text."""

    model: str
    loss: float | None = None
    perplexity: float | None = None
    word_perplexity: float | None = None
    bits_per_byte: float | None = None
    documents: int = 0
    targets: int | None = None
    words: int = 0
    bytes: int = 0
    window: int | None = None  # None: whole documents


@dataclass(frozen=True)
class Evaluation:
    """What was evaluated, the results, and some samples."""

    checkpoint: str
    data: list[str]
    split: str
    results: list[Result]
    samples: list[dict[str, str]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: str | Path,
    data: Sequence[str | Path],
    *,
    split: str = "val",
    window: int | None = None,
    baselines: Sequence[str] = (),
    samples: int = 0,
    max_tokens: int | None = None,
    batch_rows: int = ROWS,
    device: str = "auto",
    precision: str = "auto",
) -> Evaluation:
    """Evaluate a model folder on a split of a shard folder, or on all of some text files and folders.

    `window` adds a line with documents cut to that many tokens of context. A baseline is `gzip`, a model folder, or a
    Hugging Face name; each sees the same bytes.
    """
    if split not in SPLITS:
        raise UserError(f"split {split!r} does not exist; choose one of {', '.join(SPLITS)}")
    if batch_rows < 1 or (max_tokens is not None and max_tokens < 2) or (window is not None and window < 1):
        raise UserError(
            f"batch_rows={batch_rows}, max_tokens={max_tokens}, window={window}: need at least 1, 2 and 1 of them"
        )
    place = choose_device(device)
    loaded = load(model)
    if loaded.tokenizer is None:
        raise CheckpointError(f"{model} has no tokenizer.json; text cannot be evaluated without one")
    network = loaded.model.to(place)
    dtype = choose_dtype(precision, place)
    with ExitStack() as stack:
        stream = _open_text(data, split, loaded.tokenizer, model, stack)
        ranges = document_ranges(stream, max_tokens)
        if not ranges:
            raise UserError(f"the {split} split of {data[0]} is empty; choose another with --split")
        text = _Text(stream, ranges, loaded.tokenizer)
        results = [
            _evaluate_ours(str(model), network, text, dtype, batch_rows, cut)
            for cut in ([None] if window is None else [None, window])
        ]
        for name in baselines:
            results.append(_evaluate_baseline(name, text, place, dtype, batch_rows, window, stack))
        written = _samples(network, text, loaded.end_tokens, samples)
    return Evaluation(str(model), [str(path) for path in data], split, results, written)


def keep_in_run(run: Path, evaluation: Evaluation) -> None:
    """Note an evaluation in the run it is of, for the run's report. A folder that is no run is left as it is."""
    if not (run / "checkpoints").is_dir():
        return
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    with (run / "evaluations.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": now, **evaluation.to_json()}) + "\n")


class _Text:
    """The documents to be predicted, as tokens and as text."""

    def __init__(self, stream: TokenStream, ranges: list[Range], tokenizer: Tokenizer) -> None:
        self.stream, self.ranges, self.tokenizer = stream, ranges, tokenizer
        counts = stream.counts
        if sum(end - begin for begin, end in ranges) == len(stream) and counts.bytes:
            self.num_bytes, self.num_words = counts.bytes, counts.words
        else:
            self.num_bytes = self.num_words = 0
            for text in self.documents():
                self.num_bytes += len(text.encode())
                self.num_words += len(text.split())

    def documents(self) -> Iterator[str]:
        """Each document's text, without the token that ends it."""
        for begin, end in self.ranges:
            tokens = self.stream.layout.tokens(self.stream.read(begin, end)).tolist()
            if tokens and tokens[-1] == self.stream.index.end_token:
                tokens.pop()
            yield str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def result(self, name: str, found: Score, vocab_size: int, window: int | None) -> Result:
        if found.targets == 0:
            raise UserError("the text has no token to predict: its documents have one token each")
        if not math.isfinite(found.loss_sum):
            raise UserError(f"the loss of {name} is {found.loss_sum}: its weights are not finite, or overflow")
        nats = found.loss_sum + len(self.ranges) * math.log(vocab_size)
        return Result(
            model=name,
            loss=found.loss,
            perplexity=math.exp(min(found.loss, 700.0)),
            word_perplexity=math.exp(min(nats / self.num_words, 700.0)) if self.num_words else None,
            bits_per_byte=nats / math.log(2) / self.num_bytes if self.num_bytes else None,
            documents=len(self.ranges),
            targets=found.targets,
            words=self.num_words,
            bytes=self.num_bytes,
            window=window,
        )


def _open_text(
    data: Sequence[str | Path], split: str, tokenizer: Tokenizer, model: str | Path, stack: ExitStack
) -> TokenStream:
    """Tokens of the model's own tokenizer: from shards made with it, or made now from text."""
    if not data:
        raise UserError("there is nothing to evaluate on; name a folder of shards or of text with --data")
    folder = Path(data[0])
    if all(is_tokens(Path(path)) for path in data):
        return _take_over([Path(path) for path in data], tokenizer, Path(model), stack)
    if not is_shards(folder):
        return _retokenize([str(path) for path in data], tokenizer, stack)
    if len(data) > 1:
        raise UserError("--data names a folder of shards and more; name one such folder, or text alone")
    stream = TokenStream(folder, split)
    if not same_tokenizer((folder / TOKENIZER).read_text(encoding="utf-8"), tokenizer.to_str()):
        raise UserError(
            f"the shards in {folder} were made with another tokenizer than {model} has; "
            "evaluate on the text itself, or prepare it with this model's tokenizer.json"
        )
    return stream


def _retokenize(sources: list[str], tokenizer: Tokenizer, stack: ExitStack) -> TokenStream:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-")))
    tokenizer.save(str(folder / "given.json"))
    prepare(sources, folder / "shards", tokenizer=str(folder / "given.json"), val_fraction=0)
    return TokenStream(folder / "shards", "train")


def _take_over(files: list[Path], tokenizer: Tokenizer, model: Path, stack: ExitStack) -> TokenStream:
    """All of some files of tokens, whatever they are called."""
    given = model / TOKENIZER
    if not given.is_file():
        given = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-"))) / TOKENIZER
        tokenizer.save(str(given))
    return TokenStream(adopt(files, str(given), split="train"), "train")


def _evaluate_ours(name: str, model: MambaLM, text: _Text, dtype: torch.dtype, rows: int, window: int | None) -> Result:
    total = int(sum(end - begin for begin, end in text.ranges))
    with progress(f"evaluating {name}", total, "tokens") as advance:
        batches = lanes(text.stream, text.ranges, rows, LENGTH, window)
        found = score(model, batches, dtype=dtype, after_batch=advance)
    return text.result(name, found, text.stream.index.vocab_size, window)


def _evaluate_baseline(
    name: str,
    text: _Text,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    window: int | None,
    stack: ExitStack,
) -> Result:
    if name == "gzip":
        return _evaluate_gzip(text)
    folder = native.find(Path(name)) if Path(name).is_dir() else _download(name)
    tokenizer_file = folder / TOKENIZER
    if not tokenizer_file.is_file():
        raise CheckpointError(f"the baseline {name} has no tokenizer.json; it cannot be given the same text")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    if not same_tokenizer(tokenizer.to_str(), text.tokenizer.to_str()):
        sources = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-")))
        for number, document in enumerate(text.documents()):
            (sources / f"{number:08d}.txt").write_bytes(document.encode())
        stream = _retokenize([str(sources)], tokenizer, stack)
        text = _Text(stream, document_ranges(stream), tokenizer)
    try:
        model = load(folder).model.to(device)
    except CheckpointError:
        return _evaluate_foreign(name, folder, text, device, dtype, window)
    return _evaluate_ours(name, model, text, dtype, rows, None)


def _evaluate_gzip(text: _Text) -> Result:
    """Each document compressed by itself, as `gzip -9` does with files."""
    packed = sum(len(gzip.compress(document.encode(), 9, mtime=0)) for document in text.documents())
    return Result(
        model="gzip -9",
        bits_per_byte=8 * packed / max(1, text.num_bytes),
        documents=len(text.ranges),
        words=text.num_words,
        bytes=text.num_bytes,
    )


def _download(name: str) -> Path:
    """A model's files from Hugging Face, or from its cache here."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise UserError(f"the baseline {name} is not a folder; give gzip, a model folder, or a Hugging Face name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"the baseline {name!r} is no folder here, and Hugging Face did not give it: {reason}"
        ) from None


def _evaluate_foreign(
    name: str, folder: Path, text: _Text, device: torch.device, dtype: torch.dtype, window: int | None
) -> Result:
    """A model that is not a Mamba, through transformers, in windows of the context it was made for."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UserError(
            f"the baseline {name} is not a Mamba; transformers can open it: pip install 'mambakit[baselines]'"
        ) from None
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"the baseline {name} cannot be opened: {str(error).splitlines()[0]}") from None
    model.to(device).eval()
    context = window or min(getattr(model.config, "max_position_embeddings", BASELINE_CONTEXT), BASELINE_CONTEXT)
    loss_sum, targets = 0.0, 0
    total = int(sum(end - begin for begin, end in text.ranges))
    with progress(f"evaluating {name}", total, "tokens") as advance:
        for begin, end in text.ranges:
            for at in range(begin, end - 1, context):
                packed = text.stream.read(at, min(end, at + context + 1))
                tokens = torch.from_numpy(text.stream.layout.tokens(packed).astype("int64")).to(device)[None]
                with torch.inference_mode(), autocast(device, dtype):
                    logits = model(input_ids=tokens[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits[0].float(), tokens[0, 1:], reduction="sum")
                loss_sum += float(loss)
                targets += tokens.shape[1] - 1
                advance(tokens.shape[1] - 1)
    return text.result(name, Score(loss_sum, targets), text.stream.index.vocab_size, context)


def _samples(model: MambaLM, text: _Text, end_tokens: Sequence[int], count: int) -> list[dict[str, str]]:
    """What the model writes after the beginnings of some of the documents."""
    from .generate import generate_text

    stream = text.stream
    beginnings = [
        stream.layout.tokens(stream.read(begin, min(end - 1, begin + SAMPLE_TOKENS))).tolist()
        for begin, end in text.ranges[: max(0, count)]
    ]
    prompts = [prompt for prompt in (text.tokenizer.decode(tokens) for tokens in beginnings) if prompt]
    texts = [""] * len(prompts)
    if prompts:
        options: dict[str, Any] = {"seed": 0, "temperature": 0.8, "top_p": 0.95}
        for row, piece in generate_text(model, text.tokenizer, prompts, end_tokens=end_tokens, **options):
            texts[row] += piece
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
