"""How well a model predicts a text: loss, perplexity per token and per word, bits per byte.

Documents are read in full, with the model's state carried through each of them, so that no figure depends on where a
window happens to begin; with `window`, as a model of that context would see them.

Bits per byte and perplexity per word are costs of the whole text, so that models with other tokenizers, and gzip, can
stand beside: a document's first token, which no model is asked to predict, is charged as if all were equally likely.
Where parts of a text are not learned (prompts, what a user says), all figures are of the parts that are.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from .checkpoint import CheckpointError, huggingface, load, native, state_spaces
from .checkpoint.files import check_fit, read_json, read_shapes
from .checkpoint.loading import read_config
from .data import datasets
from .data.foreign import adopt, is_tokens
from .data.lanes import Range, document_ranges, lanes
from .data.loader import Batch
from .data.prepare import SHARD_TOKENS, documents, prepare, write_index
from .data.shards import LAYOUTS, SPLITS, TOKENIZER, ShardWriter, SplitCounts, TokenStream, is_shards, read_tokenizer
from .data.tokenize import Encoder, end_of, open_tokenizer, same_tokenizer, vocab_size
from .device import autocast, choose_device, choose_dtype
from .files import UserError, path_of, paths_of, pip_command
from .generate import generate_text, whole_texts
from .model import MambaLM, State
from .progress import progress, say

ROWS, LENGTH = 8, 1024  # of a batch
BASELINE_CONTEXT = 2048  # of a foreign model that does not say its own
SAMPLE_TOKENS = 16  # of a document that a sample goes on from
SAMPLE_ROWS = 32  # samples that are written side by side
BLOCK = 2**20  # tokens that are looked at in one go
LARGEST_EXPONENT = 700.0  # a perplexity beyond exp(700) is none that can be written
GZIP = "gzip"
ALL = "all"  # what is evaluated of text, or of files of tokens, which have no splits
LETTERS = "Aa Éé ﬁ"  # a tokenizer that changes these does not give back the text that it was given


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
    max_tokens: int | None  # of the data; None for all of it
    results: list[Result]
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
) -> Evaluation:
    """Evaluate a model folder, or the best checkpoint of a run, on a split of a shard folder, or on all of some text
    files and folders. That of a run is noted there, for its report.

    `window` adds a line with documents cut to that many tokens of context. A baseline is `gzip`, a model folder, or a
    Hugging Face name; each sees the same bytes. `text_column` and `separator` say how text is read, as for `prepare`.
    """
    model, data = path_of(model), paths_of(data)
    baselines = paths_of(baselines)
    _check_arguments(data, split, window, samples, max_tokens, batch_rows)
    place = choose_device(device)
    dtype = choose_dtype(precision, place)
    opened = [_open_baseline(name) for name in baselines]
    folder = native.find(model)
    loaded = load(folder)
    if loaded.tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json; text cannot be evaluated without one")
    tokenizer = whole_texts(loaded.tokenizer)
    network = loaded.model.to(place)
    with ExitStack() as stack:
        sources = _Sources(data, text_column, separator)
        text = _open_text(sources, split, tokenizer, folder, stack, max_tokens)
        _check_ids(str(folder), text.stream, network.config.padded_vocab_size)
        texts = [_in_tokens_of(baseline, text, stack) for baseline in opened]
        results = [
            _evaluate_ours(str(folder), network, text, dtype, batch_rows, cut)
            for cut in ([None] if window is None else [None, window])
        ]
        for baseline, same_text in zip(opened, texts, strict=True):
            results.append(_evaluate_baseline(baseline, same_text, place, dtype, batch_rows, window))
        written = _samples(network, text, loaded.end_tokens, samples)
    found = Evaluation(
        str(folder), sources.names, split if is_shards(Path(data[0])) else ALL, max_tokens, results, written
    )
    try:
        keep_in_run(model, found)
    except OSError as error:
        say(f"the evaluation could not be noted in {model}: {error.strerror}")
    return found


def _check_arguments(
    data: Sequence[str | Path], split: str, window: int | None, samples: int, max_tokens: int | None, batch_rows: int
) -> None:
    """What can be known to be wrong before anything is opened."""
    if split not in SPLITS:
        raise UserError(f"split {split!r} does not exist; choose one of {', '.join(SPLITS)}")
    if not data:
        raise UserError("there is nothing to evaluate on; name a folder of shards or of text with --data")
    problems = {
        f"window={window}: need at least 1": window is not None and window < 1,
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


def keep_in_run(model: Path, evaluation: Evaluation) -> None:
    """Note an evaluation in the run it is of, or of whose checkpoint, for the run's report. A folder that is neither is
    left as it is."""
    above = model.absolute().parent.parent
    if model.absolute() in native.checkpoints(above):
        run = above
    elif (model / "checkpoints").is_dir():
        run = model
    else:
        return
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    path = run / "evaluations.jsonl"
    was_cut = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a process that was killed
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if was_cut else "") + json.dumps({"time": now, **evaluation.to_json()}) + "\n")


@dataclass(frozen=True)
class _Document:
    """A document's text, in parts that are learned and not learned, without the token that ends it."""

    parts: list[tuple[bool, str]]
    ends: bool  # whether it has such a token: one that is cut short has not


@dataclass(frozen=True)
class _Sources:
    """Where text is, and how it is read."""

    names: list[str]
    text_column: str | None
    separator: str | None

    def tokenized(self, tokenizer: Tokenizer, stack: ExitStack) -> TokenStream:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-")))
        tokenizer.save(str(folder / "given.json"))
        prepare(
            self.names, folder / "shards", tokenizer=str(folder / "given.json"), val_fraction=0,
            text_column=self.text_column, separator=self.separator,
        )  # fmt: skip
        return TokenStream(folder / "shards", "train")

    def documents(self) -> Iterator[str]:
        found = documents(self.names, text_column=self.text_column, separator=self.separator)
        return (document for _, document in found)

    def check_unused(self) -> None:
        """Tokens are as they are, however text would be read."""
        for name in ("text_column", "separator"):
            if getattr(self, name) is not None:
                raise UserError(f"{name} says how text is read, but {self.names[0]} holds tokens; leave it out")


class _Text:
    """The documents to be predicted, as tokens and as text."""

    def __init__(
        self, stream: TokenStream, ranges: list[Range], tokenizer: Tokenizer, sources: _Sources | None = None
    ) -> None:
        """`sources` is where the text was read that all of the stream was made of, if it was."""
        self.stream, self.ranges, self.tokenizer = stream, ranges, tokenizer
        counts = stream.counts
        self.is_whole = sum(end - begin for begin, end in ranges) == len(stream)
        self.sources = sources if self.is_whole else None
        self.is_learned = counts.targets == counts.tokens - counts.documents  # all of it
        # Bytes of all of it; bytes, words and first tokens of what is learned, which is what figures are of.
        self.all_bytes = self.num_bytes = counts.bytes
        self.num_words, self.num_firsts = counts.words, len(ranges)
        if not (self.is_whole and self.is_learned and counts.bytes):
            self._count()

    def _count(self) -> None:
        self.all_bytes = self.num_bytes = self.num_words = self.num_firsts = 0
        for document in self.documents():
            self.num_firsts += document.parts[0][0] if document.parts else 1
            for is_learned, part in document.parts:
                self.all_bytes += len(part.encode())
                if is_learned:
                    self.num_bytes += len(part.encode())
                    self.num_words += len(part.split())

    def documents(self) -> Iterator[_Document]:
        """What the tokens decode to."""
        layout, end_token = self.stream.layout, self.stream.index.end_token
        for begin, end in self.ranges:
            packed = self.stream.read(begin, end)
            tokens, is_learned = layout.tokens(packed), layout.is_target(packed)
            is_learned[0] = len(packed) == 1 or is_learned[1]  # a document's first token is no target in any case
            if ends := bool(tokens[-1] == end_token):
                tokens, is_learned = tokens[:-1], is_learned[:-1]
            cuts = np.flatnonzero(is_learned[1:] != is_learned[:-1]) + 1
            parts = [
                (bool(learned[0]), str(self.tokenizer.decode(piece.tolist(), skip_special_tokens=False)))
                for piece, learned in zip(np.split(tokens, cuts), np.split(is_learned, cuts), strict=True)
                if len(piece)
            ]
            if parts and not ends:  # cut short, perhaps inside a character
                parts[-1] = parts[-1][0], parts[-1][1].rstrip("\ufffd")
            yield _Document(parts, ends)

    @cached_property
    def why_not_exact(self) -> str | None:
        """Why what the tokens decode to is not the text that they were made of; None where it is, or nobody knows."""
        normalizer = self.tokenizer.normalizer
        if normalizer is not None and normalizer.normalize_str(LETTERS).replace("▁", " ").strip() != LETTERS:
            return "the model's tokenizer changes letters before it reads them"
        counts = self.stream.counts
        if self.is_whole and counts.bytes:
            num_bytes = num_words = 0
            for document in self.documents():
                for _, part in document.parts:
                    num_bytes += len(part.encode())
                    num_words += len(part.split())
            if (num_bytes, num_words) != (counts.bytes, counts.words):
                return (
                    f"the model's tokenizer loses some of it: the tokens decode to {num_bytes:,} bytes and "
                    f"{num_words:,} words, but were made of {counts.bytes:,} and {counts.words:,}"
                )
        return None

    def same_as(self, other: _Text) -> _Text:
        """This text, which is the other one in other tokens: its figures are of the same bytes and words."""
        self.all_bytes, self.num_bytes, self.num_words = other.all_bytes, other.num_bytes, other.num_words
        return self

    def result(self, name: str, found: Score, window: int | None) -> Result:
        if found.targets == 0:
            raise UserError("the text has no token to predict: its documents have one token each")
        if not math.isfinite(found.loss_sum):
            raise UserError(f"the loss of {name} is {found.loss_sum}: its weights are not finite, or overflow")
        nats = found.loss_sum + self.num_firsts * math.log(self.stream.index.vocab_size)
        per_word = nats / self.num_words if self.num_words else None
        return Result(
            model=name,
            loss=found.loss,
            perplexity=math.exp(found.loss) if found.loss < LARGEST_EXPONENT else None,
            word_perplexity=math.exp(per_word) if per_word is not None and per_word < LARGEST_EXPONENT else None,
            bits_per_byte=nats / math.log(2) / self.num_bytes if self.num_bytes else None,
            documents=len(self.ranges),
            targets=found.targets,
            words=self.num_words,
            bytes=self.num_bytes,
            window=window,
        )


def _open_text(
    sources: _Sources, split: str, tokenizer: Tokenizer, model: Path, stack: ExitStack, max_tokens: int | None
) -> _Text:
    """Tokens of the model's own tokenizer: from shards made with it, or made now from text."""
    paths = [Path(name) for name in sources.names]
    folder, has_tokens = paths[0], all(is_tokens(path) for path in paths)
    if not has_tokens and not is_shards(folder):
        stream = sources.tokenized(tokenizer, stack)
        return _Text(stream, _ranges(stream, folder, split, max_tokens), tokenizer, sources)
    sources.check_unused()
    if has_tokens:
        stream = _take_over(paths, tokenizer, model, stack)
    else:
        if len(paths) > 1:
            raise UserError("--data names a folder of shards and more; name one such folder, or text alone")
        stream = TokenStream(folder, split)
        if not same_tokenizer(read_tokenizer(folder), tokenizer.to_str()):
            raise UserError(
                f"the shards in {folder} were made with another tokenizer than {model} has; "
                "evaluate on the text itself, or prepare it with this model's tokenizer.json"
            )
    return _Text(stream, _ranges(stream, folder, split, max_tokens), tokenizer)


def _ranges(stream: TokenStream, folder: Path, split: str, max_tokens: int | None) -> list[Range]:
    ranges = document_ranges(stream, max_tokens)
    if not ranges:
        raise UserError(f"the {split} split of {folder} is empty; choose another with --split")
    if max_tokens is not None and len(ranges) < stream.counts.documents:
        say(f"evaluating {len(ranges):,} of {stream.counts.documents:,} documents, which have {max_tokens:,} tokens")
    return ranges


def _check_ids(name: str, stream: TokenStream, num_ids: int) -> None:
    """A GPU would not say which token it was."""
    for begin in range(0, len(stream), BLOCK):
        largest = int(stream.layout.tokens(stream.read(begin, begin + BLOCK)).max())
        if largest >= num_ids:
            raise CheckpointError(
                f"{name} has {num_ids} tokens, but its tokenizer.json gives number {largest}: they are not of one model"
            )


def _take_over(files: list[Path], tokenizer: Tokenizer, model: Path, stack: ExitStack) -> TokenStream:
    """All of some files of tokens, whatever they are called."""
    given = model / TOKENIZER
    if not given.is_file():
        given = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-"))) / TOKENIZER
        tokenizer.save(str(given))
    return TokenStream(adopt(files, str(given), split="train"), "train")


def _encode_again(text: _Text, tokenizer: Tokenizer, stack: ExitStack) -> TokenStream:
    """The documents of a text in the tokens of another tokenizer."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mambakit-")))
    layout = LAYOUTS["packed32" if vocab_size(tokenizer) <= LAYOUTS["packed32"].largest_vocabulary else "wide64"]
    encoder, found = Encoder(tokenizer), Counter[str]()
    with (
        ShardWriter(folder, "train", layout, SHARD_TOKENS) as writer,
        progress("tokenizing", text.all_bytes, "MB", 1e6) as advance,
    ):
        for document in text.documents():
            position = 0
            for number, (is_learned, part) in enumerate(document.parts, 1):
                encoded = encoder.encode(part.encode())
                tokens = encoded.tokens
                if document.ends and number == len(document.parts) and position + len(tokens):
                    tokens = np.append(tokens, end_of(tokenizer))
                packed = layout.pack(tokens, position, starts_document=position == 0, learn=is_learned)
                writer.write(packed)
                found["documents"] += position == 0 and len(packed) > 0
                found["tokens"] += len(packed)
                found["targets"] += int(layout.is_target(packed).sum())
                found["bytes"] += encoded.num_bytes
                found["words"] += encoded.num_words
                position += len(packed)
                advance(encoded.num_bytes)
        written = writer.close()
    counts = {"train": SplitCounts(**found), "val": SplitCounts()}
    write_index(folder, layout, "given", tokenizer, {"train": written, "val": []}, counts, {})
    return TokenStream(folder, "train")


def _evaluate_ours(name: str, model: MambaLM, text: _Text, dtype: torch.dtype, rows: int, window: int | None) -> Result:
    total = int(sum(end - begin for begin, end in text.ranges))
    with progress(f"evaluating {name}", total, "tokens") as advance:
        batches = lanes(text.stream, text.ranges, rows, LENGTH, window)
        found = score(model, batches, dtype=dtype, after_batch=advance)
    return text.result(name, found, window)


@dataclass(frozen=True)
class _Baseline:
    """Something to stand beside the model: gzip, or a folder that has all that its model needs."""

    name: str
    folder: Path = Path()
    tokenizer: Tokenizer | None = None  # None: gzip
    is_mamba: bool = False
    num_ids: int | None = None


def _open_baseline(name: str) -> _Baseline:
    """All that can be wrong with a baseline is told before anything is evaluated. Its weights are not read yet."""
    if name == GZIP:
        return _Baseline(name)
    if not Path(name).exists() and difflib.get_close_matches(name.lower(), [GZIP], cutoff=0.7):
        raise UserError(f"the baseline {name!r} is no folder; did you mean {GZIP}?")
    is_here = bool(name) and Path(name).is_dir()
    folder = native.find(Path(name)) if is_here else _download(name)
    try:
        return _open_folder(str(folder) if is_here else name, folder)
    except UserError as error:
        raise CheckpointError(f"the baseline {name} cannot be used: {error}") from None


def _open_folder(name: str, folder: Path) -> _Baseline:
    values = read_json(folder / "config.json")
    is_mamba = state_spaces.is_state_spaces(values) or values.get("model_type") in huggingface.MODEL_TYPES
    shapes = read_shapes(folder)
    num_ids = None
    if is_mamba:
        config = read_config(folder)
        check_fit(config, {huggingface.our_name(part): shape for part, shape in shapes.items()}, folder)
        num_ids = config.padded_vocab_size
    else:
        _check_foreign(folder, values)
    if not (folder / TOKENIZER).is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; it cannot be given the same text")
    return _Baseline(name, folder, open_tokenizer(str(folder / TOKENIZER)), is_mamba, num_ids)


def _in_tokens_of(baseline: _Baseline, text: _Text, stack: ExitStack) -> _Text:
    """The same text, byte for byte, in the baseline's tokens; gzip takes it as it is."""
    if baseline.tokenizer is not None and same_tokenizer(baseline.tokenizer.to_str(), text.tokenizer.to_str()):
        same = text
    else:
        if not text.sources and text.why_not_exact is not None:
            raise UserError(
                f"the baseline {baseline.name} cannot be given the same text: {text.why_not_exact}. "
                "Evaluate on the text itself: name its files or folders with --data"
            )
        if baseline.tokenizer is None:
            return text
        if text.sources:
            stream = text.sources.tokenized(baseline.tokenizer, stack)
        else:
            stream = _encode_again(text, baseline.tokenizer, stack)
        _check_bytes(baseline.name, stream.counts.bytes, text.all_bytes)
        same = _Text(stream, document_ranges(stream), baseline.tokenizer).same_as(text)
    if baseline.num_ids is not None:
        _check_ids(baseline.name, same.stream, baseline.num_ids)
    return same


def _check_bytes(name: str, given: int, measured: int) -> None:
    if given != measured:
        raise UserError(
            f"the baseline {name} was given {given:,} bytes, but the model was measured on {measured:,}; "
            "did the text change meanwhile?"
        )


def _evaluate_baseline(
    baseline: _Baseline, text: _Text, device: torch.device, dtype: torch.dtype, rows: int, window: int | None
) -> Result:
    if baseline.tokenizer is None:
        return _evaluate_gzip(text)
    if not baseline.is_mamba:
        return _evaluate_foreign(baseline.name, baseline.folder, text, device, dtype, window)
    return _evaluate_ours(baseline.name, load(baseline.folder).model.to(device), text, dtype, rows, None)


def _evaluate_gzip(text: _Text) -> Result:
    """All documents one after another, as one stream: `cat FILES | gzip -9`."""
    if text.sources and text.is_learned and text.why_not_exact is not None:
        parts: Iterable[str] = text.sources.documents()
    else:
        parts = (part for document in text.documents() for is_learned, part in document.parts if is_learned)
    stream = zlib.compressobj(9, wbits=31)  # gzip's own form
    given = packed = 0
    for part in parts:
        data = part.encode("utf-8", "replace")
        given += len(data)
        packed += len(stream.compress(data))
    packed += len(stream.flush())
    _check_bytes(GZIP, given, text.num_bytes)
    return Result(
        model="gzip -9, one stream",
        bits_per_byte=8 * packed / max(1, text.num_bytes),
        documents=len(text.ranges),
        words=text.num_words,
        bytes=text.num_bytes,
    )


def _download(name: str) -> Path:
    """A model's files from Hugging Face, or from its cache here."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise UserError(f"the baseline {name!r} is not a folder; give gzip, a model folder, or a Hugging Face name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"the baseline {name!r} is no folder here, and Hugging Face did not give it: {reason}"
        ) from None


def _check_foreign(folder: Path, values: dict[str, Any]) -> None:
    """Whether transformers knows a model of this kind."""
    if not isinstance(values.get("model_type"), str):
        raise CheckpointError(f"{folder / 'config.json'} names no model_type, and is not of state-spaces' form")
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    except ImportError:
        raise UserError(
            f"it is a {values['model_type']}, and no Mamba; transformers can open it: {pip_command('baselines')}"
        ) from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds
        raise CheckpointError(f"transformers cannot open it: {_first_line(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(f"it is a {config.model_type}, which does not predict the next token")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _open_foreign(name: str, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        opened: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # of many kinds
        raise CheckpointError(f"the baseline {name} cannot be opened: {_first_line(error)}") from None
    model, loading = opened
    if absent := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
        raise CheckpointError(  # transformers has filled them with random numbers
            f"the weights in {folder} do not fit its config.json: {absent[0]} is missing or has another shape"
            + (f"; and {len(absent) - 1} more" if len(absent) > 1 else "")
        )
    return model


def _evaluate_foreign(
    name: str, folder: Path, text: _Text, device: torch.device, dtype: torch.dtype, window: int | None
) -> Result:
    """A model that is not a Mamba, through transformers, in windows of the context it was made for."""
    model = _open_foreign(name, folder)
    model.to(device).eval()
    _check_ids(name, text.stream, model.get_input_embeddings().num_embeddings)
    context = min(
        window or BASELINE_CONTEXT, getattr(model.config, "max_position_embeddings", None) or BASELINE_CONTEXT
    )
    loss_sum, targets = 0.0, 0
    total = int(sum(end - begin for begin, end in text.ranges))
    with progress(f"evaluating {name}", total, "tokens") as advance:
        for begin, end in text.ranges:
            for at in range(begin, end - 1, context):
                packed = text.stream.read(at, min(end, at + context + 1))
                tokens = torch.from_numpy(text.stream.layout.tokens(packed).astype("int64")).to(device)[None]
                is_target = torch.from_numpy(text.stream.layout.is_target(packed)).to(device)[1:]
                with torch.inference_mode(), autocast(device, dtype):
                    logits = model(input_ids=tokens[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits[0].float(), tokens[0, 1:], reduction="none")
                loss_sum += float(loss[is_target].sum())
                targets += int(is_target.sum())
                advance(tokens.shape[1] - 1)
    return text.result(name, Score(loss_sum, targets), context)


def _samples(model: MambaLM, text: _Text, end_tokens: Sequence[int], count: int) -> list[dict[str, str]]:
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
