"""What a run trains and evaluates on: the folder of shards, its two splits, and the batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..checkpoint import CheckpointError
from ..checkpoint.loading import tokenizer_file
from ..checkpoint.state import Progress, TrainingState
from ..config import ConfigError, RunConfig, resolve
from ..data.foreign import import_tokens, is_tokens
from ..data.lanes import Range, document_ranges, num_targets
from ..data.loader import Batch, Loader
from ..data.prepare import prepare_once
from ..data.shards import INDEX, ShardError, TokenStream, is_shards, read_index, read_tokenizer
from ..data.tokenize import end_token, same_tokenizer, vocab_size
from ..files import UserError
from ..parallel import Ranks, World
from ..progress import say
from .own_batches import own_batches

# Settings of the data: those that decide the order of its rows, and those that have an effect on text alone.
ORDER_SETTINGS = ("sequence_length", "seed", "carry_state", "join", "mix", "temperature")
TEXT_SETTINGS = ("tokenizer", "val_fraction", "text_column", "separator")


@dataclass(frozen=True)
class TrainingData:
    batches: Iterator[Batch]
    loader: Loader | None = None  # None for batches of a person's own
    val: TokenStream | None = None
    val_ranges: tuple[Range, ...] = ()  # the documents that are evaluated on
    tokenizer: Tokenizer | None = None
    end_tokens: tuple[int, ...] = ()

    @property
    def train(self) -> TokenStream | None:
        return self.loader.stream if self.loader else None

    @property
    def epoch_rows(self) -> int | None:
        return self.loader.epoch_rows if self.loader else None


def find_shards(config: RunConfig, run: Path) -> Path | None:
    """The folder of shards to train on. Text is prepared now, without the run's own files."""
    paths = [Path(path) for path in config.data.path]
    if not paths:
        return None
    if any(is_shards(path) for path in paths):
        if len(paths) > 1:
            raise UserError("data.path names a folder of shards and more; name one such folder, or text alone")
        return paths[0]
    if all(is_tokens(path) for path in paths):
        return import_tokens(paths, config.data.tokenizer, config.data.tokens)
    if config.data.tokens != "auto":
        raise ConfigError(
            f"data.tokens={config.data.tokens} is for files of tokens (.bin, .npy), and not all of data.path are such; "
            "remove it"
        )
    return prepare_once(config.data.path, leave_out=run, **config.data.model_dump(include=set(TEXT_SETTINGS)))


def open_data(
    config: RunConfig,
    shards: Path | None,
    batches: Iterable[Any] | None,
    progress: Progress,
    world: World,
    ranks: Ranks,
) -> TrainingData:
    """The data of a run that has come so far, and of each batch this rank's rows. Without `shards` there are
    batches."""
    if shards is None:
        return TrainingData(own_batches(batches, progress.step, config, world, ranks))
    val = TokenStream(shards, "val")
    loader = None
    if batches is None:
        stream = TokenStream(shards, "train")
        loader = Loader(
            stream,
            config.data,
            config.batch_rows,
            next_row=progress.next_row,
            own=ranks.rows_of(config.batch_rows),
            skipped_rows=progress.skipped_rows,
            growth=config.growth,
        )
    rows = iter(loader) if loader else own_batches(batches, progress.step, config, world, ranks)
    ranges = tuple(_val_ranges(val, config.train.eval_tokens))
    return TrainingData(rows, loader, val, ranges, tokenizer_of(shards), (read_index(shards).end_token,))


def _val_ranges(val: TokenStream, eval_tokens: int | None) -> list[Range]:
    """The documents that are evaluated on. A split with no token to predict would have the best loss, 0."""
    if not len(val):
        return []
    ranges = document_ranges(val, eval_tokens)
    if num_targets(val, ranges):
        return ranges
    if val.counts.targets:
        raise ConfigError(
            f"train.eval_tokens={eval_tokens} of the validation split have no token to predict; raise it, or set null"
        )
    say("the validation split has no token to predict, so that nothing is evaluated")
    return []


def tokenizer_of(shards: Path) -> Tokenizer:
    index = read_index(shards)
    tokenizer = Tokenizer.from_str(read_tokenizer(shards, index))
    if (vocab_size(tokenizer), end_token(tokenizer)) != (index.vocab_size, index.end_token):
        raise ShardError(
            f"{shards / INDEX} is damaged: it says {index.vocab_size} ids, of which {index.end_token} ends a text, but "
            f"the tokenizer has {vocab_size(tokenizer)}, and {end_token(tokenizer)} does; prepare the data again"
        )
    return tokenizer


def check_tokenizer_spec(config: RunConfig, model: Path) -> None:
    """Text for a model that was trained before is never tokenized by a tokenizer that is learned now."""
    path = config.data.path[0] if config.data.path else None
    if path is None or is_shards(Path(path)) or is_tokens(Path(path)) or not config.data.tokenizer.startswith("train:"):
        return
    has_own = tokenizer_file(model) is not None
    mend = "remove data.tokenizer" if has_own else "it has no tokenizer.json: name its tokenizer with --data.tokenizer"
    raise ConfigError(f"data.tokenizer={config.data.tokenizer} gives other tokens than the model in {model}; {mend}")


def check_tokenizer(shards: Path, model: Path | None) -> None:
    """Check that the tokenizer of the shards is intact, and that it is the model's."""
    ours, theirs = tokenizer_of(shards).to_str(), tokenizer_file(model) if model else None
    if theirs is not None and not same_tokenizer(theirs.read_text(encoding="utf-8"), ours):
        raise CheckpointError(
            f"the data was made with another tokenizer than the model in {model}; prepare it with --tokenizer {theirs}"
        )


def check_same_rows(state: TrainingState | None, loader: Loader | None, checkpoint: Path | None) -> None:
    """A resumed run reads the rows that it would have read."""
    if state is None or state.fingerprint is None or loader is None or state.fingerprint == loader.fingerprint:
        return
    then, now = resolve(state.config), loader.config
    changed = [f"data.{name}" for name in ORDER_SETTINGS if getattr(then.data, name) != getattr(now, name)]
    if now.carry_state and then.batch_rows != loader.batch_rows:
        changed.append("train.batch_tokens (with data.carry_state)")
    raise CheckpointError(
        f"the rows of {checkpoint} came from other data, or in another order: {' and '.join(changed) or 'the shards'} "
        "changed since; put that back, or start a new run with --init-from"
    )
