"""Models measured on a text: ours, and beside it gzip, other Mambas, and other models through transformers."""

from __future__ import annotations

import difflib
import re
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ..checkpoint import CheckpointError, load, native
from ..checkpoint.files import read_json, stored_weights
from ..checkpoint.fitting import fit
from ..checkpoint.formats import format_of, open_model
from ..data.lanes import document_ranges, lanes
from ..data.shards import TOKENIZER
from ..data.tokenize import open_tokenizer, same_tokenizer
from ..device import autocast, without_gradients
from ..files import UserError, pip_command
from ..model import MambaLM
from ..progress import progress
from .scoring import ModelResult, Score, score, shape_of_batches, tokens_at_once, total, without_padding
from .text import EvaluatedText, check_ids, encode_again

BASELINE_CONTEXT = 2048  # of a foreign model that does not say its own
GZIP = "gzip"


def evaluate_model(
    name: str, model: MambaLM, text: EvaluatedText, dtype: torch.dtype, rows: int, window: int | None
) -> ModelResult:
    shape = shape_of_batches(text.ranges, rows, tokens_at_once(model, dtype))
    with progress(f"evaluating {name}", text.num_tokens, "tokens") as advance:
        batches = lanes(text.stream, text.ranges, *shape, window)
        found = score(model, without_padding(batches), dtype=dtype, after_batch=advance)
    return text.result(name, found, window)


@dataclass(frozen=True)
class Baseline:
    """What the model is compared with: gzip, or a folder that has all that its model needs."""

    name: str
    folder: Path = Path()
    tokenizer: Tokenizer | None = None  # None: gzip
    is_mamba: bool = False
    num_ids: int | None = None


def open_baseline(name: str) -> Baseline:
    """Open a baseline without its weights. Its problems are reported before anything is evaluated."""
    if name == GZIP:
        return Baseline(name)
    if not Path(name).exists() and difflib.get_close_matches(name.lower(), [GZIP], cutoff=0.7):
        raise UserError(f"the baseline {name!r} is no folder; did you mean {GZIP}?")
    is_here = bool(name) and Path(name).is_dir()
    folder = native.find(Path(name)) if is_here else _download(name)
    try:
        return _open_folder(str(folder) if is_here else name, folder)
    except UserError as error:
        raise CheckpointError(f"the baseline {name} cannot be used: {error}") from None


def _open_folder(name: str, folder: Path) -> Baseline:
    values = read_json(folder / "config.json")
    is_mamba = format_of(folder) is not None
    num_ids = None
    if is_mamba:
        num_ids = fit(open_model(folder), folder).config.padded_vocab_size
    else:
        stored_weights(folder)  # finds files that are missing or cut short
        _check_foreign(folder, values)
    if not (folder / TOKENIZER).is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; it cannot be given the same text")
    return Baseline(name, folder, open_tokenizer(str(folder / TOKENIZER)), is_mamba, num_ids)


def in_tokens_of(baseline: Baseline, text: EvaluatedText, stack: ExitStack) -> EvaluatedText:
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
            stream = encode_again(text, baseline.tokenizer, stack)
        _check_bytes(baseline.name, stream.counts.bytes, text.all_bytes)
        same = EvaluatedText(stream, document_ranges(stream), baseline.tokenizer)
        # Figures are of the same bytes and words.
        same.all_bytes, same.num_bytes, same.num_words = text.all_bytes, text.num_bytes, text.num_words
    if baseline.num_ids is not None:
        check_ids(baseline.name, same.stream, baseline.num_ids)
    return same


def _check_bytes(name: str, given: int, measured: int) -> None:
    if given != measured:
        raise UserError(
            f"the baseline {name} was given {given:,} bytes, but the model was measured on {measured:,}; "
            "did the text change meanwhile?"
        )


def evaluate_baseline(
    baseline: Baseline, text: EvaluatedText, device: torch.device, dtype: torch.dtype, rows: int, window: int | None
) -> ModelResult:
    if baseline.tokenizer is None:
        return _evaluate_gzip(text)
    if not baseline.is_mamba:
        return _evaluate_foreign(baseline.name, baseline.folder, text, device, dtype, window)
    return evaluate_model(baseline.name, load(baseline.folder).model.to(device), text, dtype, rows, None)


def _evaluate_gzip(text: EvaluatedText) -> ModelResult:
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
    return ModelResult(
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


def open_foreign_with_tokenizer(name: str, folder: Path) -> tuple[Any, Any]:
    """A model that is not a Mamba, and its tokenizer, as transformers has them."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model = _open_foreign(name, folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # of many kinds, where tokenizer.json is all there is
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER))  # type: ignore[no-untyped-call]
    end = model.config.eos_token_id
    if tokenizer.eos_token_id is None and end is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end[0] if isinstance(end, list) else end)
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"the baseline {name} names no eos_token, which stands before texts without a context")
    return model, tokenizer


def _evaluate_foreign(
    name: str, folder: Path, text: EvaluatedText, device: torch.device, dtype: torch.dtype, window: int | None
) -> ModelResult:
    """A model that is not a Mamba, through transformers, in windows of the context it was made for."""
    model = _open_foreign(name, folder)
    model.to(device).eval()
    check_ids(name, text.stream, model.get_input_embeddings().num_embeddings)
    context = min(
        window or BASELINE_CONTEXT, getattr(model.config, "max_position_embeddings", None) or BASELINE_CONTEXT
    )
    losses, targets = [], 0
    with progress(f"evaluating {name}", text.num_tokens, "tokens") as advance:
        for begin, end in text.ranges:
            for at in range(begin, end - 1, context):
                packed = text.stream.read(at, min(end, at + context + 1))
                tokens = torch.from_numpy(text.stream.layout.tokens(packed).astype("int64")).to(device)[None]
                is_target = torch.from_numpy(text.stream.layout.is_target(packed))[1:]
                targets += int(is_target.sum())
                with without_gradients(device), autocast(device, dtype):
                    logits = model(input_ids=tokens[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits[0].float(), tokens[0, 1:], reduction="none")
                losses.append(loss.where(is_target.to(device), 0).sum())
                advance(tokens.shape[1] - 1)
    return text.result(name, Score(total(losses), targets), context)
