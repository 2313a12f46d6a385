"""Times whole training steps of models on random tokens. A step is as in training/loop.py, with one micro-batch."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import ConfigError, ModelConfig, OptimConfig, Recompute, problems_with_fp8
from ..device import choose_device, choose_recompute, keep_freed_memory
from ..files import UserError
from ..measure import Moment, Numbers, Timing, peak_memory, process_seconds, release_memory
from ..model import MambaLM, Output, State
from ..parallel import Ranks
from ..training.optim import make_optimizer, update
from ..training.passes import Pass, PlainPass, make_pass
from . import common
from .cases import Randoms, random_documents
from .common import Ceilings, ReportPart
from .peers import absent_peers, loss_sum, mamba_ssm_model

OPTIM = OptimConfig()
# Default rows of a batch on a CUDA GPU, by the end of the model's name: other implementations were measured with these.
ROWS = {"130m": 32, "370m": 16, "780m": 16, "790m": 16, "1.3b": 8, "1.4b": 8, "2.7b": 4, "2.8b": 4, "7b": 1}
ROWS_OF_OTHERS, LENGTH = 8, 2048
SMALL_ROWS, SMALL_LENGTH = 2, 256  # where there is no GPU
BYTES_PER_PARAMETER = 16  # weight, gradient and AdamW's two averages, all fp32


# On the device: tokens and targets (rows, length), document ids, loss mask (False where the next token begins another
# document), number of targets.
RandomBatch = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]


@dataclass(frozen=True)
class TrainingPlan:
    """Which model is trained, on which batches, how, and for how many steps."""

    name: str
    config: ModelConfig
    rows: int
    length: int
    documents: int | None
    steps: int
    warmup_steps: int
    compiled: bool
    graphed: bool  # as a CUDA graph, on a GPU
    recompute: Recompute
    device: torch.device
    dtype: torch.dtype
    in_fp8: bool = False  # in_proj and out_proj multiply in eight bits
    implementation: str = "mambakit"

    @property
    def precision(self) -> str:
        return "fp8" if self.in_fp8 else common.dtype_name(self.dtype)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.rows * self.length

    def with_mamba_ssm(self) -> TrainingPlan:
        """The same with mamba_ssm. Not all of its layers take documents, so its rows are one document each."""
        return replace(
            self, implementation="mamba_ssm", documents=None, compiled=False, graphed=False, recompute="none",
            in_fp8=False,
        )  # fmt: skip

    def batches(self) -> Iterator[RandomBatch]:
        """Batches without end; each has new random tokens, and all have the same document boundaries."""
        randoms = Randoms(self.device)
        doc_ids, mask = None, torch.ones(self.rows, self.length, dtype=torch.bool)
        if self.documents is not None:
            doc_ids = random_documents(self.rows, self.length, self.documents)
            mask[:, :-1] = doc_ids[:, 1:] == doc_ids[:, :-1]
            doc_ids = doc_ids.to(self.device)
        num_targets, mask = float(mask.sum()), mask.to(self.device)
        while True:
            text = randoms.integers(self.config.vocab_size, self.rows, self.length + 1)
            counted = torch.full((), num_targets, dtype=torch.float32, device=self.device)
            yield text[:, :-1].contiguous(), text[:, 1:].contiguous(), doc_ids, mask, counted


class Trainer:
    """A model with its optimizer: ours, or mamba_ssm's with logits and torch's cross entropy."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.scaler = torch.amp.GradScaler(plan.device.type, enabled=plan.dtype == torch.float16)
        self.model: nn.Module
        self.run_micro_batch: Pass
        if plan.implementation == "mamba_ssm":
            peer = self.model = mamba_ssm_model(plan.config, plan.device).train()

            def forward(tokens: Tensor, *, targets: Tensor, **_: object) -> Output:
                return Output(State(()), loss_sum=loss_sum(peer(tokens).logits, targets))

            self.ranks = Ranks(peer)  # type: ignore[arg-type]
            self.run_micro_batch = PlainPass(forward, self.scaler, plan.device, plan.dtype)
        else:
            with plan.device:
                model = self.model = MambaLM(plan.config).train()
            model.backbone.recompute = plan.recompute
            if plan.in_fp8:
                model.multiply_in_fp8()
            ways: dict[str, Any] = {"compiled": plan.compiled, "graphed": plan.graphed}
            self.ranks, shape = Ranks(model), (plan.rows, plan.length)
            self.run_micro_batch = make_pass(self.ranks, self.scaler, plan.dtype, shapes=[shape], **ways)
        self.optimizer = make_optimizer(self.ranks.parameters, OPTIM, plan.device)

    def step(self, batch: RandomBatch) -> Tensor:
        """Run one step. Gives the loss, still on the device."""
        loss, *_ = self.run_micro_batch(*batch)
        update(self.ranks, self.optimizer, self.scaler, OPTIM.lr, OPTIM.clip, loss)
        return loss


def measure_training(
    models: Sequence[str],
    *,
    batch_rows: int | None = None,
    length: int | None = None,
    steps: int = 10,
    warmup_steps: int = 3,
    precision: str = "auto",
    documents: int | None = None,
    compiled: bool = False,
    cuda_graph: bool = True,
    recompute: Literal["auto", "none", "light", "mixer", "block"] = "auto",
    peers: bool = False,
    device: str = "auto",
) -> Iterator[ReportPart]:
    """Time whole training steps of models by name, and of mamba_ssm's models if `peers` is set."""
    configs = {name: ModelConfig.preset(name) for name in models}
    if not configs:
        raise ConfigError("there is no model to measure; name one, such as tiny or mamba-130m")
    place = choose_device(device)
    dtype = common.checked_dtype("precision", precision, place)
    on_gpu = place.type == "cuda"
    length = length if length is not None else LENGTH if on_gpu else SMALL_LENGTH
    _check_counts(batch_rows=batch_rows, length=length, steps=steps)
    _check_counts(least=0, warmup_steps=warmup_steps)
    common.check_documents(documents, length)
    if precision == "fp8":
        found = [problems_with_fp8(config, "--precision fp8", name) for name, config in configs.items()]
        if problems := list(itertools.chain.from_iterable(found)):
            raise ConfigError("\n".join(problems))
    keep_freed_memory()
    yield common.environment_part(place)
    absent = absent_peers(["mamba_ssm"] if peers else [], place)
    graphed, recomputed = cuda_graph and on_gpu and not compiled, choose_recompute(recompute, place)
    plans: list[TrainingPlan] = []
    for name, config in configs.items():
        rows = batch_rows or (ROWS.get(name.rpartition("-")[2], ROWS_OF_OTHERS) if on_gpu else SMALL_ROWS)
        plan = TrainingPlan(
            name, config, rows, length, documents, steps, warmup_steps, compiled, graphed, recomputed, place, dtype,
            in_fp8=precision == "fp8",
        )  # fmt: skip
        plans += [plan, plan.with_mamba_ssm()] if peers and not absent else [plan]
    speeds: list[TrainingSpeed] = []
    for plan in plans:
        try:
            speed = measure_steps(plan, is_first=not speeds)
        except Exception as error:
            if plan.implementation != "mambakit":  # whatever error a peer has, the other models are still measured
                yield common.failed_part(plan.implementation, plan.name, error)
            elif isinstance(error, torch.OutOfMemoryError):
                what = f"{plan.name} with {plan.rows} rows of {plan.length} tokens"
                raise UserError(f"{what} does not fit in the memory of the GPU; lower batch_rows or length") from None
            else:
                raise
        else:
            speeds.append(speed)
            yield ReportPart("results", [speed.to_json()], str(speed))
        gc.collect()  # a model and its optimizer refer to each other
        if plan.compiled:
            torch.compiler.reset()
        release_memory(place)
    if len(speeds) > 1:
        yield ReportPart("results", [], _speed_table(speeds))
    yield common.absent_part(absent)


def _check_counts(*, least: int = 1, **settings: int | None) -> None:
    for setting, value in settings.items():
        if value is not None and value < least:
            raise ConfigError(f"{setting}={value}: need a whole number of at least {least}")


def measure_steps(plan: TrainingPlan, *, is_first: bool) -> TrainingSpeed:
    """Build a model and train it: a first step, the ceilings, warm-up, the timed steps, the ceilings again."""
    started = time.perf_counter()
    torch.manual_seed(0)
    trainer, batches = Trainer(plan), plan.batches()
    losses: list[float] = []

    def run(count: int) -> list[float]:
        """Run `count` steps and give the seconds of each. As in training, a loss is read during the next step."""
        ticks = [Moment(plan.device)]
        unread: list[Numbers] = []
        for _ in range(count):
            unread.append(Numbers(trainer.step(next(batches))))
            ticks.append(Moment(plan.device))
            if len(unread) > 1:
                losses.extend(unread.pop(0).read())
        for numbers in unread:
            losses.extend(numbers.read())
        for number, value in enumerate(losses, 1):
            if not math.isfinite(value):
                raise FloatingPointError(f"{plan.name}: the loss of step {number} is {value}")
        return [later.seconds_since(earlier) for earlier, later in itertools.pairwise(ticks)]

    run(1)
    first_step = time.perf_counter() - started
    cold_start = process_seconds() if is_first else None
    before = common.measure_ceilings(plan.device, plan.dtype)  # frees cached memory, which the warm-up allocates again
    run(plan.warmup_steps)
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)
    timing = Timing(tuple(run(plan.steps)))
    peak = peak_memory(plan.device, trainer.run_micro_batch.hidden_bytes)
    plan = replace(plan, graphed=trainer.run_micro_batch.is_captured)
    after = common.measure_ceilings(plan.device, plan.dtype)
    return TrainingSpeed(plan, timing, first_step, cold_start, peak, losses[0], losses[-1], before, after)


@dataclass(frozen=True)
class TrainingSpeed:
    """The measured training steps of one implementation."""

    plan: TrainingPlan
    timing: Timing  # of whole steps
    first_step_seconds: float  # with building the model
    cold_start_seconds: float | None  # from the start of the process to the first step; None for all but the first
    peak_bytes: int | None  # of the GPU in the timed steps; elsewhere of the process since it began
    first_loss: float
    last_loss: float
    before: Ceilings
    after: Ceilings

    @property
    def tokens_per_second(self) -> float:
        return self.plan.tokens / self.timing.median

    def mfu(self, flops_per_token: int) -> float:
        """The share of the matmul rate, which is the mean of those before and after the steps."""
        rate = (self.before.matmul_flops_per_second + self.after.matmul_flops_per_second) / 2
        return flops_per_token * self.tokens_per_second / rate

    @property
    def mfu_of_parameters(self) -> float:
        """With the usual six operations for each parameter and token."""
        return self.mfu(6 * self.plan.config.num_parameters())

    @property
    def mfu_of_counted(self) -> float:
        """With the counted operations of this network, recurrence included."""
        return self.mfu(self.plan.config.flops_per_token(training=True))

    @property
    def beyond_bytes(self) -> int | None:
        """The peak without weights, gradients and optimizer. None for a process, which has much else in its memory."""
        if self.peak_bytes is None or self.plan.device.type != "cuda":
            return None
        return self.peak_bytes - BYTES_PER_PARAMETER * self.plan.config.num_parameters()

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": plan.name,
            "implementation": plan.implementation,
            "parameters": plan.config.num_parameters(),
            "batch_rows": plan.rows,
            "length": plan.length,
            "tokens_per_step": plan.tokens,
            "documents": plan.documents,
            "precision": plan.precision,
            "compile": plan.compiled,
            "cuda_graph": plan.graphed,
            "recompute": plan.recompute,
            "step": self.timing.to_json(),
            "tokens_per_second": self.tokens_per_second,
            "mfu_6_parameters": self.mfu_of_parameters,
            "mfu_counted": self.mfu_of_counted,
            "peak_bytes": self.peak_bytes,
            "beyond_parameters_bytes": self.beyond_bytes,
            "first_step_seconds": self.first_step_seconds,
            "cold_start_seconds": self.cold_start_seconds,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "ceilings_before": asdict(self.before),
            "ceilings_after": asdict(self.after),
        }

    def __str__(self) -> str:
        plan, timing = self.plan, self.timing
        documents = f", documents in a row: {plan.documents}" if plan.documents else ""
        spread = f"{timing.percentile(10) * 1e3:.2f}–{timing.percentile(90) * 1e3:.2f}"
        first = f"done after {self.first_step_seconds:.2f} s"
        if self.cold_start_seconds is not None:
            first += f", {self.cold_start_seconds:.2f} s after the process began"
        memory = "not known here" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.2f} GiB at the peak"
        if self.beyond_bytes is not None:
            memory += f", {self.beyond_bytes / 2**30:.2f} GiB beyond weights, gradients and optimizer"
        elif self.peak_bytes is not None:
            memory += " of the process"
        lines = {
            "before": str(self.before),
            "step": f"{timing.median * 1e3:.2f} ms (p10–p90 {spread}, {len(timing.seconds)} steps)",
            "speed": f"{self.tokens_per_second:,.0f} tokens/s",
            "MFU": f"{self.mfu_of_parameters:.1%} by 6 x parameters, {self.mfu_of_counted:.1%} by counted operations",
            "memory": memory,
            "first step": first,
            "loss": f"{self.first_loss:.4f} in the first step, {self.last_loss:.4f} in the last",
            "after": str(self.after),
        }
        heading = (
            f"\n{plan.name}, {plan.implementation}: {plan.config.num_parameters():,} parameters, "
            f"{plan.rows} x {plan.length:,} tokens, {plan.precision}{', compiled' * plan.compiled}"
            f"{', CUDA graph' * plan.graphed}, recompute {plan.recompute}{documents}"
        )
        return "\n".join([heading, *(f"  {name:<12}{line}" for name, line in lines.items())])


def _speed_table(speeds: Sequence[TrainingSpeed]) -> str:
    rows = [["model", "", "median ms", "tokens/s", "MFU by 6 x parameters", "by counted operations", "peak GiB"]]
    rows += [
        [
            speed.plan.name,
            speed.plan.implementation,
            f"{speed.timing.median * 1e3:.2f}",
            f"{speed.tokens_per_second:,.0f}",
            f"{speed.mfu_of_parameters:.1%}",
            f"{speed.mfu_of_counted:.1%}",
            "-" if speed.peak_bytes is None else f"{speed.peak_bytes / 2**30:.2f}",
        ]
        for speed in speeds
    ]
    return "\n" + common.table(rows, num_left=2)
