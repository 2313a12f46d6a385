"""Lengthening: a short training that makes a model work far beyond the length that it was trained at.

A Mamba model fails beyond its training length because its state has never been so old, and a few hundred steps with
carried states are enough against that (arXiv 2507.02782). So this is a run like any other, from the weights of another
one, with `data.carry_state` and `data.join`: each row reads on through the data, and its state is never reset. Before
and after it, perplexity by position is measured on the same text and written to positions.json, for the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import CheckpointError, load, native
from ..config import ConfigError, RunConfig, resolve
from ..data.shards import TokenStream, read_index
from ..device import choose_device, choose_dtype
from ..evaluation.positions import Bin, loss_by_position, starts_in
from ..evaluation.text import Sources, check_ids
from ..files import UserError, path_of, paths_of, read_json, replace_json
from ..parallel import World
from ..progress import progress, say
from .data import check_tokenizer, check_tokenizer_spec, find_shards
from .run import Layers, train_layers
from .start import POSITIONS, Start

STEPS = 300
ROW_GROWTH = 4  # rows are so many times as long as those that the model was trained on
RATE = 0.3  # of the peak learning rate that the model was trained with
USUAL_LENGTH, USUAL_LR = 2048, 1e-4  # of a model without its run
MEASURED_TOKENS = 2**20
AT_THE_END = 2**40  # steps between evaluations


@dataclass(frozen=True)
class Lengthened:
    """Perplexity by position, before and after; `after` is empty where the run was stopped before its end."""

    folder: Path
    to: int
    trained_length: int
    source: str
    text: list[str]  # what was measured on; nothing for the validation split
    before: list[Bin]
    after: list[Bin]
    stopped_by: str | None = None

    def to_json(self) -> dict[str, Any]:
        values = {**dataclasses.asdict(self), "folder": str(self.folder)}
        for name, bins in (("before", self.before), ("after", self.after)):
            values[name] = [{**dataclasses.asdict(each), "perplexity": each.perplexity} for each in bins]
        return values


def lengthen(
    model: str | Path,
    to: int,
    *,
    out: str | Path | None = None,
    text: Sequence[str | Path] = (),
    layers: Layers = (),
) -> Lengthened:
    """Train the model of a run, or of a folder, on texts of `to` tokens, in the new run `out`. The same call goes on
    where it was stopped. `text` is what perplexity is measured on, else the validation split; `layers` are settings."""
    if not World.join().is_one:
        raise ConfigError("lengthen works in one process so far; start it without ranks")
    place, names = path_of(model), paths_of(text)
    folder = path_of(out) if out is not None else place.with_name(f"{place.resolve().name}-{to}")
    begun = _begun(folder, to, names)
    start = Start.of_model(begun["source"] if begun else place)
    source = start.init_from
    assert source is not None
    stored = _settings_of_run(source)
    trained_length = resolve(stored).data.sequence_length if stored else USUAL_LENGTH
    if to <= trained_length:
        raise ConfigError(f"--to {to} is not beyond the {trained_length} tokens that {source} was trained at; raise it")
    length = _row_length(layers, to, trained_length)
    base = _settings(stored, length)
    config = resolve(*start.settings, base, *layers)
    if not config.data.path:
        raise ConfigError(f"{source} does not say what it was trained on; name a folder of shards or text with --data")
    check_tokenizer_spec(config, source)
    shards = find_shards(config, folder)
    assert shards is not None
    check_tokenizer(shards, source)
    with _measured_text(source, shards, names) as stream:
        starts = starts_in(stream, to, MEASURED_TOKENS)

        def measured(checkpoint: Path, what: str) -> list[Bin]:
            return _measure(checkpoint, stream, starts, to, config, what)

        before = begun["before"] if begun else measured(source, "before")
        found = Lengthened(folder, to, trained_length, str(source), names, before, [])
        if not begun:
            folder.mkdir(parents=True, exist_ok=True)
            replace_json(folder / POSITIONS, found.to_json())
        if not (folder / "config.json").exists():  # else the run has its settings
            tokens = _batch_tokens(stored, length, to, read_index(shards).counts["train"].tokens)
            layers = [base, {"train": {"batch_tokens": tokens}}, *layers]
        result = train_layers(layers, out=folder, resume=True, init_from=source)
        if result.stopped_by is not None:
            say("the same lengthen command goes on, and measures the result")
            return dataclasses.replace(found, stopped_by=result.stopped_by)
        found = dataclasses.replace(found, after=measured(native.find(folder), "after"))
    replace_json(folder / POSITIONS, found.to_json())
    return found


def _begun(folder: Path, to: int, text: list[str]) -> dict[str, Any] | None:
    """What an earlier start has written, where it was the same: its `source`, and what it measured `before`."""
    if not (folder / POSITIONS).is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} exists, and was not made by lengthen; choose another --out")
        return None
    found = read_json(folder / POSITIONS)
    if (found.get("to"), found.get("text")) != (to, text):
        raise UserError(f"{folder} was begun with --to {found.get('to')}, or on another --text; choose another --out")
    fields = [field.name for field in dataclasses.fields(Bin)]
    try:
        before = [Bin(*(each[name] for name in fields)) for each in found["before"]]
        return {"source": str(found["source"]), "before": before}
    except (KeyError, TypeError):
        raise UserError(f"{folder / POSITIONS} is damaged; remove {folder} to begin anew") from None


def _settings_of_run(source: Path) -> Mapping[str, Any]:
    """The settings of the run that a checkpoint belongs to; nothing for another model folder."""
    return read_json(source / native.CONFIG, CheckpointError) if (source / native.CONFIG).is_file() else {}


def _settings(stored: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Settings for what nobody gives: those of the run, but a short training at a low rate with carried states, on
    rows of `length` tokens."""
    optim, train, parallel = (dict(stored.get(name, {})) for name in ("optim", "train", "parallel"))
    lr = RATE * optim["lr"] if "lr" in optim else USUAL_LR
    optim |= {"lr": lr, "min_lr": lr / 10, "schedule": "cosine", "warmup_steps": None, "decay_steps": None}
    train |= {"tokens": None, "epochs": None, "steps": STEPS, "batch_tokens": length, "micro_batch_rows": None}
    train |= {"early_stop": None, "eval_every": AT_THE_END}
    path = stored.get("data", {}).get("path", ())
    return {
        "data": {"path": path, "sequence_length": length, "carry_state": True, "join": True},
        "optim": optim,
        "train": train,
        "checkpoint": {"every": 100},
        "track": {"sample_every": AT_THE_END},
        "parallel": {name: parallel[name] for name in ("device", "threads") if name in parallel},
    }


def _row_length(layers: Layers, to: int, trained_length: int) -> int:
    given = [layer["data"]["sequence_length"] for layer in layers if "sequence_length" in (layer.get("data") or {})]
    return given[-1] if given and isinstance(given[-1], int) else min(to, ROW_GROWTH * trained_length)


def _batch_tokens(stored: Mapping[str, Any], length: int, to: int, train_tokens: int) -> int:
    """As many tokens as the run took, but so few rows that each can read on for `to` tokens."""
    if train_tokens < to:
        say(f"note: the training text has {train_tokens:,} tokens, so that no state will be {to:,} tokens old")
    usual = resolve(stored).train.batch_tokens
    return length * max(1, min(usual // length, train_tokens // to))


@contextmanager
def _measured_text(source: Path, shards: Path, names: list[str]) -> Iterator[TokenStream]:
    """The text that perplexity is measured on, in tokens of the model."""
    with ExitStack() as stack:
        if not names:
            yield TokenStream(shards, "val")
            return
        tokenizer = load(source).tokenizer
        if tokenizer is None:
            raise CheckpointError(f"{source} has no tokenizer.json; text cannot be read without one")
        yield Sources(names, {"text_column": None, "separator": None}).tokenized(tokenizer, stack)


def _measure(
    checkpoint: Path, stream: TokenStream, starts: Sequence[int], to: int, config: RunConfig, what: str
) -> list[Bin]:
    device = choose_device(config.parallel.device)
    model = load(checkpoint).model.to(device)
    check_ids(str(checkpoint), stream, model.config.padded_vocab_size)
    dtype = choose_dtype(config.train.precision, device)
    with progress(f"perplexity by position, {what}", len(starts) * to, "k tokens", 1e3) as advance:
        return loss_by_position(model, stream, starts, to, dtype=dtype, after_piece=advance)
