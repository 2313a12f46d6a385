"""Micro-batches that fit the memory of a GPU: chosen before a run begins, tried before anything is written, and made
smaller where they turn out too large. A step is the same sum over the same rows, whatever its micro-batches are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..config import ConfigError, Recompute, RunConfig
from ..device import choose_dtype, choose_recompute
from ..files import is_out_of_memory, replace_json
from ..parallel import Ranks, World
from ..parallel.mesh import layout_of
from ..planning import Gpu, card_bytes, fit
from ..planning.memory import stepping_bytes
from ..progress import say
from .passes import GraphedPass, Pass, make_pass

if TYPE_CHECKING:
    from .loop import Run

GIB = 2**30
LEVELS: tuple[Recompute, ...] = ("none", "light", "mixer", "block")  # each keeps less than the one before


def fitted(config: RunConfig, world: World, device: torch.device) -> RunConfig:
    """The config with the rows of a micro-batch, and what is recomputed, chosen for the memory that is free. What was
    set stays."""
    train = config.train
    if device.type != "cuda" and train.vram_gigabytes:
        say(f"note: train.vram={train.vram} is for a GPU, and has no effect on {device}")
    if device.type != "cuda" or (train.micro_batch_rows is not None and train.recompute != "auto"):
        return config
    mesh = layout_of(config, world.size, world.local_size, is_one=world.is_one)
    free, gpu = memory_free(config, device), Gpu.of(device, choose_dtype(train.precision, device))
    found = fit(config, mesh, free, gpu)
    passes = f"{found.passes} passes a step" if found.passes > 1 else "the whole step in one pass"
    say(
        f"{found.rows} rows at once, {passes}, recompute {found.recompute}: the fastest that fits, with about "
        f"{found.total / GIB:.1f} of {free / GIB:.1f} GiB"
    )
    return _changed(config, found.rows, found.recompute)


def memory_free(config: RunConfig, device: torch.device) -> float:
    """Bytes that the run can have: what is free on the GPU, and no more than train.vram allows."""
    free, _ = torch.cuda.mem_get_info(device)
    return min(free, card_bytes(config.train.vram_gigabytes)) if config.train.vram_gigabytes else free


def limit_memory(config: RunConfig, device: torch.device) -> None:
    """Have torch keep to train.vram."""
    if config.train.vram_gigabytes and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        share = card_bytes(config.train.vram_gigabytes) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def pass_of(config: RunConfig, ranks: Ranks, scaler: torch.amp.GradScaler, dtype: torch.dtype) -> Pass:
    """The pass over the micro-batches of a step; the last one may be smaller."""
    own_rows, length = config.batch_rows // ranks.mesh.data_size, config.data.sequence_length // ranks.mesh.cp
    rows = min(config.micro_batch_rows, own_rows)
    last = own_rows % rows
    # FSDP2 takes all passes in one way: those of the first steps, which may have fewer or shorter rows, too.
    is_even = not last and config.growth.first_batch_rows // ranks.mesh.data_size % rows == 0
    is_even = is_even and not config.data.length_warmup
    is_graphed = config.train.cuda_graph and (is_even or not ranks.is_sharded)
    shapes = {(rows, length), (last or rows, length)}
    return make_pass(ranks, scaler, dtype, shapes=shapes, compiled=config.train.compile, graphed=is_graphed)


def try_out(run: Run) -> None:
    """On a GPU, take the passes of a step without effect, beside as much memory as the optimizer will need. Where that
    is too much, micro-batches are made smaller until they fit."""
    if run.device.type != "cuda" or run.data.train is None:
        return
    while True:
        try:
            peak = _peak_of_passes(run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _clear(run)
            if not shrink(run):
                what = f"micro-batches of {rows_of(run.config)} do not fit in the memory of {run.device}"
                raise ConfigError(f"{what}; lower --data.sequence-length, or take a smaller --model") from error
        else:
            if run.world.is_first:
                say(f"tried on {run.device}: {peak / GIB:.1f} GiB at the peak")
            return


def _peak_of_passes(run: Run) -> int:
    device, config = run.device, run.config
    own_rows, length = config.batch_rows // run.ranks.mesh.data_size, config.data.sequence_length // run.ranks.mesh.cp
    rows = min(config.micro_batch_rows, own_rows)
    plain = run.run_micro_batch.plain if isinstance(run.run_micro_batch, GraphedPass) else run.run_micro_batch
    random = torch.cuda.get_rng_state(device), torch.get_rng_state()
    torch.cuda.reset_peak_memory_stats(device)
    optim = config.optim.model_copy(update={"ema": None})  # whose averages are there already
    missing = sum(
        optim.state_bytes(name) * parameter.numel()
        for name, parameter in run.ranks.parameters.items()
        if parameter not in run.optimizer.state and parameter.device == device
    )
    averages = torch.empty(round(missing + stepping_bytes(config)), dtype=torch.uint8, device=device)
    tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
    documents = torch.zeros(rows, length, dtype=torch.int32, device=device)
    count = torch.ones((), dtype=torch.float32, device=device)
    memory = run.model.initial_state(rows).tensors() if config.data.carry_state else ()
    passes = 2 if own_rows > rows else 1  # the second adds to the gradients of the first
    for number in range(passes):
        run.ranks.before_pass(is_last=number + 1 == passes)
        plain(tokens, tokens, documents, None, count, *memory)
    peak = torch.cuda.max_memory_allocated(device)  # sync point: an error of the device is told here
    del averages
    _clear(run)
    torch.cuda.set_rng_state(random[0], device)
    torch.set_rng_state(random[1])
    return peak


def _clear(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(run.device)


def shrink(run: Run) -> bool:
    """After running out of memory: half the rows from now on, and for single rows, more that is recomputed. False
    where nothing is left to try. Ranks end, since the others may be in the middle of a pass."""
    config = run.config
    rows, level = config.micro_batch_rows, choose_recompute(config.train.recompute, run.device)
    stronger = [other for other in LEVELS[LEVELS.index(level) + 1 :] if not config.train.compile or other == "block"]
    if not run.world.is_one or (rows == 1 and not stronger):
        return False
    run.config = _changed(config, -(-rows // 2), level if rows > 1 else stronger[0])
    run.model.backbone.recompute = choose_recompute(run.config.train.recompute, run.device)
    if isinstance(run.run_micro_batch, GraphedPass):
        run.run_micro_batch.release()
    run.run_micro_batch = pass_of(run.config, run.ranks, run.scaler, run.dtype)
    if run.has_trained:
        replace_json(run.folder / "config.json", run.config.to_json())
    now = f"{rows_of(run.config)} at once, recompute {run.config.train.recompute}"
    say(f"{rows_of(config)} at once was too much for the memory of {run.device}; from now on {now}")
    return True


def rows_of(config: RunConfig) -> str:
    """Of a micro-batch, for a message."""
    return f"{config.micro_batch_rows} row{'s' * (config.micro_batch_rows > 1)}"


def _changed(config: RunConfig, rows: int, recompute: Recompute) -> RunConfig:
    changes = {"micro_batch_rows": rows, "recompute": recompute}
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})
