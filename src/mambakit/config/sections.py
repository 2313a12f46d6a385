"""The other sections of settings, and the whole config of a run."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from ..files import paths_of
from .base import Settings
from .growth import Growth
from .model import UNKNOWN_VOCABULARY, ModelConfig


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
        "unless set, 0.02, and up to 0.1 where that is less than 128 KiB; blocks are whole: small texts vary",
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


# Numbers of tokens after which a size doubles, up to the one that is set.
Doublings = Annotated[tuple[Annotated[int, Field(ge=1, le=2**60)], ...], Field(strict=False, max_length=16)]


def _not_rising(name: str, doublings: tuple[int, ...]) -> Iterator[str]:
    if any(later <= earlier for earlier, later in itertools.pairwise(doublings)):
        yield f"{name}={doublings}: need numbers of tokens that rise"


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
    length_warmup: Doublings = Field(
        (), description="tokens after which rows double in length; before, each row is cut into equal pieces"
    )
    join: bool = Field(
        False, description="read all documents as one text: the state is not reset where a new one begins"
    )

    def problems(self) -> Iterator[str]:
        if any(not weight >= 0 for weight in self.mix) or (self.mix and not sum(self.mix) > 0):
            yield f"mix={self.mix}: need weights of at least 0, and one above it"
        elif self.mix and self.temperature != 1:
            yield "mix and data.temperature both say how sources are mixed; give one of them"
        elif (self.mix or self.temperature != 1) and self.carry_state:
            yield "carry_state reads sources as they lie; it cannot be combined with a mix of them"
        yield from _not_rising("length_warmup", self.length_warmup)
        if self.sequence_length % 2 ** len(self.length_warmup):
            yield (
                f"sequence_length={self.sequence_length} cannot be halved {len(self.length_warmup)} times, as "
                "length_warmup says; give fewer numbers, or another length"
            )
        if self.length_warmup and self.carry_state:
            yield "length_warmup cuts rows into pieces that start from nothing; it cannot be combined with carry_state"

    @field_validator("path", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        paths = [value] if isinstance(value, str) else value
        return paths_of(paths) if isinstance(paths, list | tuple) and all(isinstance(p, str) for p in paths) else paths


MATRICES = ("in_proj.weight", "out_proj.weight", "x_proj.weight", "dt_proj.weight")  # that Muon steps


class OptimConfig(Settings):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw, or muon for the matrices of the layers, with adamw for embedding, head and all others; "
        "both with the same learning rate",
    )
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
    momentum: float = Field(0.95, ge=0, lt=1, description="(muon) of the average of gradients")
    weight_decay: float = Field(0.1, ge=0, description="never on A_log, D, dt bias, norms and biases")
    clip: float | None = Field(1.0, gt=0, description="largest norm of the gradient; null leaves it as it is")
    state: Literal["fp32", "int8"] = Field(
        "fp32", description="(adamw) how its two averages are kept; int8 takes a quarter of the memory: needs torchao"
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="also keep an average of the weights over steps, with this decay, such as 0.999; it is evaluated, "
        "and saved beside them",
    )

    def is_for_muon(self, parameter: str) -> bool:
        """Whether Muon steps the parameter of this name."""
        return self.name == "muon" and parameter.endswith(MATRICES)

    def state_bytes(self, parameter: str = "") -> float:
        """Bytes that are kept of each number of a parameter beside weight and gradient."""
        averages = 1 if self.is_for_muon(parameter) else 2
        return averages * {"fp32": 4.0, "int8": 1.0}[self.state] + (4.0 if self.ema is not None else 0.0)

    def problems(self) -> Iterator[str]:
        if self.name != "muon" and self.momentum != type(self).model_fields["momentum"].default:
            yield f"momentum is a setting of name=muon, but name={self.name}; remove one"
        if self.name != "adamw" and self.state != "fp32":
            yield f"state={self.state} is for name=adamw, but name={self.name}; remove one"
        if self.schedule != "constant" and self.min_lr > self.lr:
            yield f"min_lr={self.min_lr} is above lr={self.lr}; lower it, or raise lr"
        if self.schedule != "wsd" and self.decay_steps is not None:
            yield f"decay_steps is a setting of schedule=wsd, but schedule={self.schedule}; remove one"


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
    batch_warmup: Doublings = Field(
        (), description="tokens after which the batch doubles, such as 1e8 3e8: two halvings of batch_tokens at first"
    )
    vram: str = Field(
        "auto",
        description="memory of the GPU that the run may use, such as 24gb; micro_batch_rows and recompute are chosen "
        "for it unless set. auto: what is free when the run begins",
    )
    micro_batch_rows: int | None = Field(
        None, ge=1, description="rows computed at once; by train.vram on a GPU, else as many as make 8192 tokens"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        "auto",
        description="of the computation; weights stay fp32. auto: bf16 or fp16 on a GPU, fp32 on a CPU. fp8: bf16, but "
        "in_proj and out_proj multiply in eight bits",
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
        "of in_proj and a part of the residual stream; block: all but the input of each block. auto: by train.vram on "
        "a GPU, none on a CPU",
    )
    recompute_every: int = Field(
        1, ge=1, le=2**16, description="mixer, block: only in every k-th block; the others do as light"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="decides the first weights and dropout")
    eval_every: int = Field(1000, ge=0, description="steps between evaluations on the validation split; 0 for none")
    eval_tokens: int | None = Field(2**20, ge=1, description="tokens of an evaluation; null for the whole split")
    eval_batch_rows: int | None = Field(None, ge=1, description="rows evaluated at once; micro_batch_rows unless set")
    early_stop: int | None = Field(None, ge=1, description="stop after this many evaluations without a better loss")

    @property
    def vram_gigabytes(self) -> float | None:
        """None for auto."""
        size = re.fullmatch(r"(\d+(?:\.\d+)?) ?g(?:i?b)?", self.vram.lower())
        return float(size[1]) if size else None

    @property
    def has_length(self) -> bool:
        return any(getattr(self, name) is not None for name in self.LENGTHS)

    def problems(self) -> Iterator[str]:
        given = [name for name in self.LENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            yield f"{' and '.join(given)} both say how long the run is; keep one"
        yield from _not_rising("batch_warmup", self.batch_warmup)
        if self.vram != "auto" and not (self.vram_gigabytes or 0) >= 1:
            yield f"vram={self.vram}: need auto, or a size of at least 1gb, such as 24gb"
        if self.recompute_every > 1 and self.recompute not in ("mixer", "block"):
            yield f"recompute_every={self.recompute_every} needs recompute mixer or block, not {self.recompute}"
        if self.early_stop is not None and self.eval_every == 0:
            yield "early_stop needs evaluations, but eval_every=0; set it, or remove early_stop"
        if self.compile and self.recompute in ("light", "mixer"):
            yield (
                f"recompute={self.recompute} has no effect with compile=true, where torch decides what is kept; "
                "use block, none or auto, or remove compile"
            )


class LoraConfig(Settings):
    """Low-rank adapters: W + alpha/rank B A is computed, and A and B alone are trained."""

    rank: int | None = Field(None, ge=1, le=2**16, description="train adapters of this rank alone; unset: all weights")
    alpha: float | None = Field(None, gt=0, description="adapters are scaled by alpha / rank; 2 rank unless set")
    dropout: float = Field(0.0, ge=0, lt=1, description="on the input of an adapter, in training")
    targets: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="projections that get one, such as in_proj out_proj; every one of the model unless set"
    )

    def problems(self) -> Iterator[str]:
        given = [name for name in ("alpha", "dropout", "targets") if getattr(self, name)]
        if given and self.rank is None:
            yield f"{given[0]} is of adapters, and lora.rank says that there are none; set it, such as lora.rank: 16"

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def is_on(self) -> bool:
        return self.rank is not None

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / (self.rank or 1)

    def adapts(self, projection: str) -> bool:
        """Whether projections of this name get an adapter."""
        return self.is_on and (projection in self.targets if self.targets else projection.endswith("_proj"))


class CheckpointConfig(Settings):
    """When the run is saved, and what is kept."""

    every: int = Field(1000, ge=1, description="steps between checkpoints; the last step is saved always")
    keep_last: int = Field(2, ge=1, description="the newest ones kept")
    keep_every: int | None = Field(None, ge=1, description="also keep those whose step is a multiple of this")
    keep_best: bool = Field(True, description="also save and keep the one with the lowest validation loss")
    background: bool | Literal["auto"] = Field(
        "auto",
        description="write checkpoints while training goes on, from a copy in the CPU's memory; auto: in one process, "
        "where that memory is large enough; several ranks wait for each checkpoint",
    )


class TrackConfig(Settings):
    """What is shown and recorded on the way."""

    log_every: int = Field(10, ge=1, description="steps between lines where there is no live display")
    sample_every: int = Field(1000, ge=0, description="steps between samples of text; 0 for none")
    sample_prompts: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="beginnings the samples go on from; those of two validation documents unless set"
    )
    sample_tokens: int = Field(100, ge=1, le=2**20, description="length of a sample")
    to: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False)] = Field(
        (), description="trackers that get all records, the samples and the config; extras of these names install them"
    )
    project: str = Field("mambakit", min_length=1, max_length=128, description="(wandb, trackio) project of the run")
    name: str | None = Field(None, min_length=1, max_length=128, description="(wandb, trackio) the folder's unless set")
    artifacts: bool = Field(False, description="(wandb) checkpoints as artifacts, with all that a resume needs")

    def problems(self) -> Iterator[str]:
        if len(set(self.to)) < len(self.to):
            yield f"to={' '.join(self.to)} names a tracker twice; name each once"
        if self.artifacts and "wandb" not in self.to:
            yield "artifacts=true gives checkpoints to W&B, which track.to does not name; add wandb to it"

    @field_validator("sample_prompts", "to", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class GuardConfig(Settings):
    """What is done about steps that go wrong, and about steps that do not end."""

    bad_steps: int = Field(
        5,
        ge=1,
        description="bad steps in a row after which the run goes back to its last good checkpoint, and on without "
        "their rows. A step is bad if its loss or gradient is not finite (it is skipped), or if its loss is a spike",
    )
    spike: float | None = Field(
        10.0,
        gt=0,
        description="a loss is a spike if it is above the median of the last good ones by so many standard deviations "
        "(1.48 times the median deviation) and by a tenth; not in warm-up, nor with data.carry_state; null: never",
    )
    window: int = Field(64, ge=8, le=2**16, description="good losses that a spike is measured against")
    rollbacks: int = Field(3, ge=0, description="how often a run goes back; after that, it ends with a message")
    hang_seconds: float | None = Field(
        300.0,
        gt=0,
        description="a step without a sign of life for so long, and for ten times the median step, shows where all "
        "threads are; three times as long until the second step, which compiles; null: never",
    )


DEVICES = ("auto", "cpu", "cuda", "mps", "xla")
OTHER_DEVICES = ("xpu", "npu", "hpu", "mlu", "musa", "neuron", "mtia", "maia", "privateuseone", "meta")


class ParallelConfig(Settings):
    """Where the run computes."""

    device: str = Field(
        "auto",
        description="auto: the CUDA GPU where there is one, else the CPU; cpu, cuda, mps, xla, or any other kind of "
        "device that torch has here (docs/hardware.md)",
    )
    threads: int | None = Field(None, ge=1, le=4096, description="CPU threads; what torch chooses unless set")
    shard: Literal["none", "optimizer", "full", "hybrid"] = Field(
        "none",
        description="what data-parallel ranks share among them: nothing (DDP), the optimizer's state (ZeRO-1), all "
        "parameters (FSDP2), or all within shard_size ranks, with copies across (HSDP)",
    )
    shard_size: int | None = Field(None, ge=2, description="ranks of a group of hybrid; those of a machine unless set")
    tp: int = Field(1, ge=1, description="tensor parallelism: ranks that share the width of each layer")
    cp: int = Field(1, ge=1, description="context parallelism: ranks that share the length of each row")
    reshard: bool = Field(True, description="full, hybrid: free a block's parameters after its forward pass")
    prefetch: int = Field(1, ge=0, le=64, description="full, hybrid: blocks whose parameters are gathered ahead")
    offload: bool = Field(
        False,
        description="full, hybrid: keep parameters, gradients and optimizer state in the CPU's memory, and step them "
        "there; slower, for models that a card cannot hold. One card: --gpus 1",
    )
    reduce: Literal["last", "every"] = Field(
        "last",
        description="full, hybrid: sum gradients over ranks after the last micro-batch of a step, or after every one, "
        "which takes less memory and more communication",
    )

    def problems(self) -> Iterator[str]:
        """Which devices there are, torch says when the run begins. A slip of the keyboard is told at once."""
        if self.device in DEVICES + OTHER_DEVICES:
            return
        near = ["cuda"] if self.device == "gpu" else difflib.get_close_matches(self.device, DEVICES, n=1)
        if near or not self.device:
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(DEVICES)}"
            yield f"device={self.device} is no device that is known; {hint}"


class RunConfig(Settings):
    """Everything a training run is made of."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    guard: GuardConfig = GuardConfig()
    parallel: ParallelConfig = ParallelConfig()

    def problems(self) -> Iterator[str]:
        return problems_between({name: getattr(self, name) for name in SECTIONS})

    @property
    def batch_rows(self) -> int:
        """Rows of one optimizer step."""
        return self.train.batch_tokens // self.data.sequence_length

    @property
    def growth(self) -> Growth:
        """How batches and rows grow at the beginning of the run."""
        length = self.data.sequence_length
        return Growth(
            self.batch_rows,
            *(
                tuple(-(-tokens // length) for tokens in doublings)
                for doublings in (self.train.batch_warmup, self.data.length_warmup)
            ),
        )

    @property
    def micro_batch_rows(self) -> int:
        """Rows computed at once."""
        return min(self.batch_rows, self.train.micro_batch_rows or max(1, 8192 // self.data.sequence_length))

    def training_flops(self) -> int:
        """Arithmetic of one token in training. Frozen weights have no gradient: a third of it is left out."""
        flops = self.model.flops_per_token(training=True)
        return flops * 2 // 3 if self.lora.is_on else flops

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


SECTIONS = {name: cast("type[Settings]", field.annotation) for name, field in RunConfig.model_fields.items()}


FP8_MULTIPLE = 16  # of the sides of matrices that tensor cores multiply in eight bits


def problems_between(sections: Mapping[str, Any]) -> Iterator[str]:
    """What does not fit together across sections, of those that are right by themselves."""
    data, optim, train, parallel = (sections.get(name) for name in ("data", "optim", "train", "parallel"))
    if data and train and train.batch_tokens % data.sequence_length:
        yield (
            f"train.batch_tokens={train.batch_tokens} is not a multiple of data.sequence_length="
            f"{data.sequence_length}; try {max(1, train.batch_tokens // data.sequence_length) * data.sequence_length}"
        )
    elif data and train and train.batch_tokens // data.sequence_length % 2 ** len(train.batch_warmup):
        yield (
            f"the {train.batch_tokens // data.sequence_length} rows of a step cannot be halved "
            f"{len(train.batch_warmup)} times, as train.batch_warmup says; give fewer numbers, or another batch_tokens"
        )
    if data and train and train.batch_warmup and data.carry_state:
        yield "train.batch_warmup changes the rows of a batch; it cannot be combined with data.carry_state"
    if optim and parallel and (parallel.shard != "none" or parallel.tp > 1):
        for name, value in (("name", optim.name), ("state", optim.state), ("ema", optim.ema)):
            if value not in ("adamw", "fp32", None):
                yield (
                    f"optim.{name}={value} needs all of each matrix on every rank, but parallel.shard="
                    f"{parallel.shard}, tp={parallel.tp}; use shard=none and tp=1 (cp may be any), or remove it"
                )
    if optim and train and train.steps is not None:
        for name, value in (("warmup_steps", optim.warmup_steps), ("decay_steps", optim.decay_steps)):
            if value is not None and value > train.steps:
                yield f"optim.{name}={value} is longer than train.steps={train.steps}; lower it, or raise train.steps"
    lora = sections.get("lora")
    if train and train.precision == "fp8":
        yield from _problems_beside_fp8(sections)
    if lora and optim and lora.is_on:
        for name, value in (("name", optim.name), ("state", optim.state), ("ema", optim.ema)):
            if value not in ("adamw", "fp32", None):
                yield f"optim.{name}={value} cannot be combined with lora.rank={lora.rank}; remove one of them"
    if lora and parallel and lora.is_on:
        for name in ("shard", "tp", "cp"):
            value = getattr(parallel, name)
            if value != ParallelConfig.model_fields[name].default:
                yield (
                    f"parallel.{name}={value} cannot be combined with lora.rank={lora.rank}: adapters are trained by "
                    "one rank, or by data-parallel ranks that share nothing (parallel.shard=none); remove it"
                )


def _problems_beside_fp8(sections: Mapping[str, Any]) -> Iterator[str]:
    model, parallel, lora = (sections.get(name) for name in ("model", "parallel", "lora"))
    if parallel and parallel.tp > 1:
        yield f"train.precision=fp8 cannot be combined with parallel.tp={parallel.tp}; use bf16, or tp=1"
    if lora and lora.is_on:
        yield f"train.precision=fp8 cannot be combined with lora.rank={lora.rank}; use bf16"
    if model:
        yield from problems_with_fp8(model)


def problems_with_fp8(
    model: ModelConfig, setting: str = "train.precision=fp8", name: str = "the model"
) -> Iterator[str]:
    """Why products of eight bits are not for this model."""
    dims = model.dims
    sides = {"d_model": dims.d_model, "inner channels": dims.d_inner, "outputs of in_proj": sum(dims.segments.values())}
    for side, size in sides.items():
        if size % FP8_MULTIPLE:
            yield (
                f"{setting} needs sides of matrices that are multiples of {FP8_MULTIPLE}, and {name} has {size} "
                f"{side}; use bf16, or another model"
            )
