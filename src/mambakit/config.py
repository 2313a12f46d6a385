"""Every setting, its default and its checks. Imports no torch, so that a wrong setting is told at once."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .files import UserError, paths_of
from .mixers import MIXERS, Mamba1Dims, Mamba2Dims


class ConfigError(UserError):
    """A person's mistake in a config. The message names every problem found."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = "\n".join(f"  {line}" for line in problems)
        super().__init__(problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n{lines}")


class Settings(BaseModel):
    """A section of settings: frozen, no unknown keys, and all problems in one message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(*_explain(error, type(self))) from None


def _explain(error: ValidationError, section: type[BaseModel]) -> Iterator[str]:
    """Every problem of a validation: what was given, what is needed, what to do."""
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield _unknown(name, section.model_fields)
        elif problem["type"] == "missing":
            yield f"{name} is missing; give it, or start from a preset"
        elif problem["type"] == "value_error":
            yield from str(problem["ctx"]["error"]).splitlines()
        else:
            need = problem["msg"].replace("Input should be", "need").replace("a valid integer", "a whole number")
            yield f"{name}={reprlib.repr(problem['input'])}: {need}"


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return f"{name} is not a setting; {hint}"


UNKNOWN_VOCABULARY = 1  # stands for that of a tokenizer not seen yet; no language has one word


class ModelConfig(Settings):
    """A Mamba language model: what it computes, and so which parameters it has.

    Settings marked (mamba1) or (mamba2) belong to that kind alone.
    """

    kind: Literal["mamba1", "mamba2"]
    d_model: int = Field(ge=1, le=2**20, description="width of the residual stream")
    num_layers: int = Field(ge=1, le=2**12, description="number of blocks, each a norm and a mixer")
    vocab_size: int = Field(ge=1, le=2**31, description="number of token ids in use")
    vocab_multiple: int = Field(
        1, ge=1, le=2**20, description="the embedding has vocab_size rows, rounded up to a multiple"
    )
    tie_embeddings: bool = Field(True, description="the output layer is the embedding itself")

    expand: int = Field(2, ge=1, le=2**10, description="inner width over d_model")
    state_size: int = Field(
        0, ge=1, le=2**16, description="N, states per channel; 16 for mamba1, 128 for mamba2 unless set"
    )
    conv_width: int = Field(4, ge=1, le=2**10, description="W, taps of the convolution")
    bias: bool = Field(False, description="bias in in_proj and out_proj")
    conv_bias: bool = Field(True, description="bias in the convolution")
    norm_eps: float = Field(1e-5, gt=0)
    residual_in_fp32: bool = Field(True, description="sum the residual stream in fp32 whatever the compute dtype")
    dropout: float = Field(0.0, ge=0, lt=1, description="on the embedding and on each mixer's output, in training")

    dt_rank: int | None = Field(
        None, ge=1, le=2**20, description="(mamba1) rank of the dt projection; d_model/16 unless set"
    )
    bcdt_norm: bool = Field(False, description="(mamba1) weightless RMS norm on dt, B and C, as in Falcon-Mamba")
    bcdt_norm_eps: float = Field(1e-6, gt=0, description="(mamba1) eps of that norm")

    head_dim: int = Field(64, ge=1, description="(mamba2) P, channels of a head")
    num_groups: int = Field(1, ge=1, description="(mamba2) G, groups of heads that share B and C")
    gated_norm: Literal["group", "width"] = Field(
        "group", description="(mamba2) the gated norm's mean runs over each group, or over the whole inner width"
    )
    dt_limit: tuple[float, Annotated[float, AllowInfNan(True)]] = Field(
        (0.0, math.inf), description="(mamba2) bounds of dt after softplus"
    )
    chunk_size: int | None = Field(None, ge=1, description="(mamba2) tokens of a chunk; the kernel chooses unless set")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ModelConfig:
        """A published or house size by name, such as "mamba-130m", with settings changed by keyword."""
        from .presets import MODELS

        return cls(**{**_by_name("model preset", name, MODELS), **changes})

    @model_validator(mode="before")
    @classmethod
    def _fill_by_kind(cls, values: Any) -> Any:
        """Defaults that depend on other settings."""
        if not isinstance(values, dict):
            return values
        limit = values.get("dt_limit")
        dims = MIXERS.get(str(values.get("kind")), Mamba1Dims)  # what is no kind is told by its field
        values = {**values, **dims.fill(values)}
        if isinstance(limit, (list, tuple)):  # JSON has no tuples, and no word for infinity
            values["dt_limit"] = tuple(math.inf if bound in ("inf", "Infinity") else bound for bound in limit)
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        if problems := [*self._foreign_settings(), *self.dims.problems()]:
            raise ValueError("\n".join(problems))
        return self

    def _foreign_settings(self) -> list[str]:
        """Settings of another kind that were given a value which would be ignored."""
        return [
            f"{name}={getattr(self, name)!r} is a setting of {other}, but kind={self.kind}; remove it, or change kind"
            for other, dims in MIXERS.items()
            for name in dims.own_settings
            if other != self.kind and getattr(self, name) != type(self).model_fields[name].default
        ]

    @property
    def dims(self) -> Mamba1Dims | Mamba2Dims:
        """The sizes of a layer's mixer. All layers are alike."""
        dims: Mamba1Dims | Mamba2Dims = MIXERS[self.kind].of(self)
        return dims

    def to_dict(self) -> dict[str, Any]:
        """All settings, with the two names that peft asks any model's config for."""
        return {**self.model_dump(), "model_type": "mambakit", "tie_word_embeddings": self.tie_embeddings}

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, and so the width of the logits."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def num_parameters(self) -> int:
        """Exact number of unique parameters."""
        vocab = self.padded_vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return vocab + self.num_layers * (self.d_model + self.dims.num_parameters()) + self.d_model

    def flops_per_token(self, *, training: bool = False) -> int:
        """Arithmetic of one token: two per multiply-add of a matrix product, one per operation of the recurrence.

        Norms, activations and other work proportional to the width alone are left out. A training step is
        counted as three forward passes, without recomputation.
        """
        forward = self.num_layers * self.dims.flops_per_token() + 2 * self.d_model * self.padded_vocab_size
        return 3 * forward if training else forward


def _by_name(what: str, name: Any, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A preset by its name."""
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no {what} is called {reprlib.repr(name)}; {hint}Known: {', '.join(known)}")
    return known[name]


def _at_home(value: Any) -> Any:
    return os.path.expanduser(value) if isinstance(value, str) else value


def _not_empty(value: str | None, info: ValidationInfo) -> str | None:
    if value == "":
        raise ValueError(f"{info.field_name} is empty; give a value, or leave it out")
    return value


# Settings for text, which `prepare` and a run that trains on text have in common.
TokenizerSpec = Annotated[
    str,
    BeforeValidator(_at_home),
    Field(
        description="bytes, a tokenizer.json, a Hugging Face name, or train:VOCAB: byte-level BPE learned from the text"
    ),
]
ValFraction = Annotated[
    float | None,
    Field(
        ge=0,
        lt=1,
        description="share of the text held out for validation: whole documents, or blocks where documents are few; "
        "unless set, 0.02, and up to 0.1 where that is less than 128 KiB",
    ),
]
Separator = Annotated[
    str | None,
    Field(
        max_length=2**16,
        description="text between the documents of one file, such as '<|endoftext|>': files are cut there; none: never "
        "cut; unless set, never cut, but well-known markers are reported",
    ),
    AfterValidator(_not_empty),
]
TextColumn = Annotated[
    str | None,
    Field(
        description="of records: the column that is their text, or a template such as '{title}\\n\\n{text}'; found by "
        "itself unless set"
    ),
    AfterValidator(_not_empty),
]


class PrepareConfig(Settings):
    """How documents become shards."""

    tokenizer: TokenizerSpec = "train:8192"
    val_fraction: ValFraction = None
    workers: int | None = Field(None, ge=1, description="threads that tokenize; one for each core unless set")
    strict: bool = Field(False, description="a file that cannot be read is an error, and not skipped")
    layout: Literal["packed32", "wide64"] | None = Field(
        None, description="how a token is stored; unless set, packed32 for up to 65,536 token ids, else wide64"
    )
    text_column: TextColumn = None
    separator: Separator = None
    min_characters: int = Field(0, ge=0, description="leave out documents with fewer characters")
    copies: Literal["keep", "exact", "near"] = Field(
        "keep", description="leave out copies of earlier documents: exact ones, or also those that share most 5-grams"
    )


class DataConfig(Settings):
    """What is read, and how rows are cut from it."""

    path: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="a folder of shards, or files, folders and datasets (hf:NAME), which are prepared first, once"
    )
    tokenizer: TokenizerSpec = "train:8192"
    val_fraction: ValFraction = None
    separator: Separator = None
    text_column: TextColumn = None
    sequence_length: int = Field(1024, ge=1, le=2**26, description="tokens of a row")
    seed: int = Field(0, ge=0, lt=2**63, description="decides the order of rows")
    workers: int = Field(1, ge=0, le=1024, description="threads that read ahead; 0 reads when a batch is asked for")
    prefetch: int = Field(4, ge=1, le=2**16, description="batches read ahead")
    tokens: Literal["auto", "packed32", "uint16", "uint32"] = Field(
        "auto", description="for .bin and .npy files of tokens: how they are written; detected unless set"
    )
    mix: Annotated[tuple[Annotated[float, Field(strict=False)], ...], Field(strict=False)] = Field(
        (), description="how often rows come from each source, in the order they were prepared in; by size unless set"
    )
    temperature: float = Field(
        1.0,
        ge=0.01,
        le=1e6,
        description="rows come from a source by its size to the power of 1 / this: more even above 1",
    )
    carry_state: bool = Field(
        False, description="rows read on where they stopped, with the model's state: training beyond the row"
    )

    @model_validator(mode="after")
    def _mix_is_possible(self) -> DataConfig:
        if any(not weight >= 0 for weight in self.mix) or (self.mix and not sum(self.mix) > 0):
            raise ValueError(f"data.mix={self.mix}: need weights of at least 0, and one above it")
        if self.mix and self.temperature != 1:
            raise ValueError("data.mix and data.temperature both say how sources are mixed; give one of them")
        if (self.mix or self.temperature != 1) and self.carry_state:
            raise ValueError("data.carry_state reads sources as they lie; it cannot be combined with a mix of them")
        return self

    @field_validator("path", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        paths = [value] if isinstance(value, str) else value
        return paths_of(paths) if isinstance(paths, list | tuple) and all(isinstance(p, str) for p in paths) else paths


class OptimConfig(Settings):
    """AdamW and its learning rate."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(1e-5, ge=0, description="learning rate at the end, for cosine, linear and wsd")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="after warm-up; wsd stays at the peak and decays over the last decay_steps"
    )
    warmup_steps: int | None = Field(None, ge=0, description="a tenth of the run, at most 2000, unless set")
    decay_steps: int | None = Field(None, ge=0, description="(wsd) a fifth of the run unless set")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="never on A_log, D, dt bias, norms and biases")
    clip: float | None = Field(1.0, gt=0, description="largest norm of the gradient; null leaves it as it is")

    @model_validator(mode="after")
    def _fits_together(self) -> OptimConfig:
        problems = []
        if self.schedule != "constant" and self.min_lr > self.lr:
            problems.append(f"min_lr={self.min_lr} is above lr={self.lr}; lower it, or raise lr")
        if self.schedule != "wsd" and self.decay_steps is not None:
            problems.append(f"decay_steps is a setting of schedule=wsd, but schedule={self.schedule}; remove one")
        if problems:
            raise ValueError("\n".join(problems))
        return self


# What backward computes once more rather than keep: nothing; norms and dt; all but in_proj's output and some sums of
# the residual stream; all of a block.
Recompute = Literal["none", "light", "mixer", "block"]


class TrainConfig(Settings):
    """How long, in what steps, and what is looked at on the way."""

    # The three ways to say how long a run is; one at most is set, and one is chosen when the run begins if none is.
    LENGTHS: ClassVar[tuple[str, ...]] = ("steps", "tokens", "epochs")

    steps: int | None = Field(
        None,
        ge=1,
        le=2**40,
        description="run length in optimizer steps; by data, model and device unless one of three is set",
    )
    tokens: int | None = Field(None, ge=1, le=2**60, description="run length in tokens")
    epochs: float | None = Field(None, gt=0, le=1e6, description="run length in passes over the data")
    batch_tokens: int = Field(32768, ge=1, le=2**32, description="tokens of one optimizer step")
    micro_batch_rows: int | None = Field(
        None, ge=1, description="rows computed at once; as many as make 8192 tokens unless set"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="of the computation; weights stay fp32. auto: bf16 or fp16 on a GPU, fp32 on a CPU"
    )
    compile: bool = Field(False, description="torch.compile the model")
    cuda_graph: bool = Field(
        True,
        description="on a GPU, capture the pass over a micro-batch once and replay it, so that small ones do not wait "
        "for the host; not together with compile",
    )
    recompute: Literal["auto", "none", "light", "mixer", "block"] = Field(
        "auto",
        description="what backward computes once more rather than keep. light: norms and dt; mixer: all but the output "
        "of in_proj and a part of the residual stream; block: all but the input of each block. auto: light on a GPU, "
        "none on a CPU",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="decides the first weights and dropout")
    eval_every: int = Field(1000, ge=0, description="steps between evaluations on the validation split; 0 for none")
    eval_tokens: int | None = Field(2**20, ge=1, description="tokens of an evaluation; null for the whole split")
    eval_batch_rows: int | None = Field(None, ge=1, description="rows evaluated at once; micro_batch_rows unless set")
    early_stop: int | None = Field(None, ge=1, description="stop after this many evaluations without a better loss")

    @property
    def has_length(self) -> bool:
        return any(getattr(self, name) is not None for name in self.LENGTHS)

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        problems = []
        given = [name for name in self.LENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            problems.append(f"{' and '.join(given)} both say how long the run is; keep one")
        if self.early_stop is not None and self.eval_every == 0:
            problems.append("early_stop needs evaluations, but eval_every=0; set it, or remove early_stop")
        if self.compile and self.recompute in ("light", "mixer"):
            problems.append(
                f"recompute={self.recompute} has no effect with compile=true, where torch decides what is kept; "
                "use block, none or auto, or remove compile"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class CheckpointConfig(Settings):
    """When the run is saved, and what is kept."""

    every: int = Field(1000, ge=1, description="steps between checkpoints; the last step is saved always")
    keep_last: int = Field(2, ge=1, description="the newest ones kept")
    keep_every: int | None = Field(None, ge=1, description="also keep those whose step is a multiple of this")
    keep_best: bool = Field(True, description="also save and keep the one with the lowest validation loss")


class TrackConfig(Settings):
    """What is shown and recorded on the way."""

    log_every: int = Field(10, ge=1, description="steps between lines where there is no live display")
    sample_every: int = Field(1000, ge=0, description="steps between samples of text; 0 for none")
    sample_prompts: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="beginnings the samples go on from; those of two validation documents unless set"
    )
    sample_tokens: int = Field(100, ge=1, le=2**20, description="length of a sample")

    @field_validator("sample_prompts", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class ParallelConfig(Settings):
    """Where the run computes."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="auto: the CUDA GPU where there is one, else the CPU"
    )
    threads: int | None = Field(None, ge=1, le=4096, description="CPU threads; what torch chooses unless set")


class RunConfig(Settings):
    """Everything a training run is made of."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        problems = list(_problems_between({name: getattr(self, name) for name in SECTIONS}))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def batch_rows(self) -> int:
        """Rows of one optimizer step."""
        return self.train.batch_tokens // self.data.sequence_length

    @property
    def micro_batch_rows(self) -> int:
        """Rows computed at once."""
        return min(self.batch_rows, self.train.micro_batch_rows or max(1, 8192 // self.data.sequence_length))

    def differences(self, other: RunConfig) -> list[str]:
        """Settings that differ, one line each."""
        mine, theirs = self.to_json(), other.to_json()
        return [
            f"{section}.{name}: {value} -> {theirs[section][name]}"
            for section, fields in mine.items()
            for name, value in fields.items()
            if theirs[section][name] != value
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which `resolve` makes an equal config."""
        values: dict[str, Any] = self.model_dump(mode="json")
        if self.model.vocab_size == UNKNOWN_VOCABULARY:
            del values["model"]["vocab_size"]
        values["model"]["dt_limit"] = [bound if math.isfinite(bound) else "inf" for bound in self.model.dt_limit]
        return values


SECTIONS: dict[str, type[Settings]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "track": TrackConfig,
    "parallel": ParallelConfig,
}


def _problems_between(sections: Mapping[str, Any]) -> Iterator[str]:
    """What does not fit together across sections, of those that are right by themselves."""
    data, optim, train = (sections.get(name) for name in ("data", "optim", "train"))
    if data and train and train.batch_tokens % data.sequence_length:
        yield (
            f"train.batch_tokens={train.batch_tokens} is not a multiple of data.sequence_length="
            f"{data.sequence_length}; try {max(1, train.batch_tokens // data.sequence_length) * data.sequence_length}"
        )
    if optim and train and train.steps is not None:
        for name, value in (("warmup_steps", optim.warmup_steps), ("decay_steps", optim.decay_steps)):
            if value is not None and value > train.steps:
                yield f"optim.{name}={value} is longer than train.steps={train.steps}; lower it, or raise train.steps"


def resolve(*layers: Mapping[str, Any], vocab_size: int | None = None) -> RunConfig:
    """One checked config from layers of nested settings, of which later ones win.

    Besides the sections, `recipe` names a preset of optimization, and `model: NAME` or `model.preset` one of a model.
    `vocab_size` is that of the data's tokenizer, for a model that does not set its own.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for layer in ({"model": "small"}, *layers):
        given = _without_presets(layer, problems)
        if _names_model(layer):  # a model by name takes the whole place of the one before
            values.pop("model", None)
        values = merge(values, given)
    model = values.get("model") or {}
    if isinstance(model, Mapping) and model.get("vocab_size") is None:
        values["model"] = {**model, "vocab_size": vocab_size or UNKNOWN_VOCABULARY}
    problems += [_unknown(name, {**SECTIONS, "recipe": None}) for name in values if name not in SECTIONS]
    sections: dict[str, Settings] = {}
    for name, section in SECTIONS.items():
        given = values.get(name) or {}
        if not isinstance(given, Mapping):
            first = next(iter(section.model_fields))
            problems.append(f"{name}={reprlib.repr(given)}: need settings, such as {name}: {{{first}: …}}")
            continue
        try:
            sections[name] = section(**given)
        except ConfigError as error:
            problems += [f"{name}.{problem}" for problem in error.problems]
            right = {key: value for key, value in given.items() if not _is_named(key, error.problems)}
            with contextlib.suppress(ConfigError):  # what is right of it may still not fit the other sections
                sections[name] = section(**right)
    problems += _problems_between(sections)
    if problems:
        raise ConfigError(*problems)
    checked: dict[str, Any] = dict(sections)
    return RunConfig(**checked)


def _is_named(key: str, problems: Sequence[str]) -> bool:
    return any(re.match(rf"{re.escape(key)}\b", problem) for problem in problems)


def _names_model(layer: Mapping[str, Any]) -> bool:
    model = layer.get("model")
    return isinstance(model, str) or (isinstance(model, Mapping) and model.get("preset") is not None)


def _without_presets(layer: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A layer with the presets it names put in place, under what it sets itself."""
    from .presets import MODELS, RECIPES

    values = dict(layer)
    recipe = values.pop("recipe", None)
    if isinstance(values.get("model"), str):  # `model: NAME`
        values["model"] = {"preset": values["model"]}
    if isinstance(values.get("data"), (str, list, tuple)):  # `data: PATH`
        values["data"] = {"path": values["data"]}
    model = dict(values["model"]) if isinstance(values.get("model"), Mapping) else {}
    preset = model.pop("preset", None)
    try:
        if preset is not None:
            known = {
                name: value for name, value in _by_name("model preset", preset, MODELS).items() if name != "vocab_size"
            }
            values["model"] = {**known, **model}
    except ConfigError as error:
        problems += error.problems
        values["model"] = {**MODELS["small"], **model}
    try:
        if recipe is not None:
            values = merge(_by_name("recipe", recipe, RECIPES), values)
    except ConfigError as error:
        problems += error.problems
    return values


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, those of `over` winning. A run length replaces the other ways to say it."""
    merged = dict(base)
    for name, value in over.items():
        if value is None:  # a section without settings, as in a file with all its lines commented out
            continue
        if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            section = dict(merged[name])
            if name == "train" and any(value.get(length) is not None for length in TrainConfig.LENGTHS):
                section = {key: kept for key, kept in section.items() if key not in TrainConfig.LENGTHS}
            merged[name] = {**section, **value}
        else:
            merged[name] = value
    return merged


def read_config(path: Path) -> dict[str, Any]:
    """Nested settings from a YAML or JSON file, not checked yet."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, and no config; to train on it, say --data {path}")
    if not path.is_file():
        raise ConfigError(f"the config {path} does not exist; give a .yaml or .json file")
    if path.stat().st_size > 2**20:
        raise ConfigError(f"the config {path} has {path.stat().st_size} bytes; need at most a million")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, parse_float=_number) if path.suffix == ".json" else read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the config {path} cannot be read: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"the config {path} holds no settings; need sections such as\ntrain:\n  steps: 1000")
    return values


# Some settings that a run has always had in its config.json: without one of them, it is not whole.
REQUIRED_OF_A_RUN = {"model": ("kind", "d_model"), "data": ("path",), "optim": ("lr",), "train": ("batch_tokens",)}


def read_run_config(run: Path) -> dict[str, Any]:
    """The settings of a run, which are whole."""
    path = run / "config.json"
    stored = read_config(path)
    try:
        whole = resolve(stored).to_json()
        if absent := [
            f"{section}.{name}"
            for section, settings in whole.items()
            for name in settings
            if name in REQUIRED_OF_A_RUN.get(section, ()) and name not in (stored.get(section) or {})
        ]:
            raise ConfigError(f"{absent[0]} is missing")
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    return stored


def read_yaml(text: str) -> Any:
    """YAML's plain values; 3e-4 and 1e6 are numbers, as YAML 1.2 and people have it."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    with_exponent = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$")
    Loader.add_implicit_resolver("!number", with_exponent, list("-+.0123456789"))
    Loader.add_constructor("!number", lambda loader, node: _number(node.value))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _number(text: str) -> int | float:
    """A decimal number; whole if it is written with an exponent and is: 1e6 tokens are a count."""
    value = float(text)
    return int(value) if "e" in text.lower() and value.is_integer() and abs(value) < 2**53 else value


def write_yaml(config: RunConfig) -> str:
    """The config as a file that `read_config` reads."""
    import yaml

    text: str = yaml.safe_dump(config.to_json(), sort_keys=False, allow_unicode=True)
    return text
