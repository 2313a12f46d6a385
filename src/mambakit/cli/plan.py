"""The command `plan`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from .. import presets
from ..config import UNKNOWN_VOCABULARY, ConfigError, RunConfig, read_config, resolve
from ..files import path_of
from . import flags
from .flags import Json, SettingsFlags, flag
from .output import print_json, print_line

if TYPE_CHECKING:
    from ..planning import Cards, Report

GIB = 2**30


def plan(
    config: Annotated[Positional[Path | None], flag(metavar="[CONFIG.yaml|.json]")] = None,
    /,
    model: Annotated[str | None, flag("a model by name, such as mamba2-1.3b", "PRESET")] = None,
    recipe: Annotated[str | None, flag("as for train", "NAME")] = None,
    vram: Annotated[
        str | None, flag("memory of the GPU to fit, such as 24gb; a table of cards unless set", "SIZE")
    ] = None,
    dollars_per_hour: Annotated[float | None, flag("price of a GPU, for the cost of the run", "X")] = None,
    ranks: Annotated[int | None, flag("GPUs; one, or a machine if the settings name a layout", "N")] = None,
    gpus_per_node: Annotated[int, arg(help="GPUs of a machine")] = 8,
    tokens_per_second: Annotated[float | None, flag("of one GPU; unless set, of our H200 records", "X")] = None,
    link: Annotated[float, arg(metavar="GB/s", help="of a GPU to others of its machine")] = 450.0,
    network: Annotated[float, arg(metavar="GB/s", help="of a GPU to those of other machines")] = 50.0,
    grow_batch: Annotated[bool, flag("in the table, the batch grows with the GPUs")] = False,
    json: Json = False,
    settings: Annotated[SettingsFlags, arg(name="")] = {},  # noqa: B006 - never changed
) -> int:
    """Compute what a run takes before it begins: memory by part, time and cost on cards of every size; and with ranks,
    what they hold and communicate, and how fast layouts would train on up to 4,096 GPUs.

    Needs no GPU, and allocates nothing. Memory of a GPU is an account of its tensors, within 10 % of what was measured.
    What a rank holds and hands to others is exact: tests count it on real ranks. Speeds are estimates from a measured
    rate of one GPU and the speed of links. Settings are those of train, and what train would refuse is refused.

    For example:
      mambakit plan --model mamba2-370m --train.tokens 8000000000 --dollars-per-hour 3
      mambakit plan --model mamba-790m --vram 24gb --data.sequence-length 4096
      mambakit plan --model mamba2-1.3b --recipe paper-1.4b --parallel.shard full
      mambakit plan --model mamba-2.8b --ranks 16 --parallel.shard hybrid --parallel.tp 2 --network 25
      mambakit plan --model mamba-130m --tokens-per-second 90000 --grow-batch --json

    Args:
      config: settings from a file; flags win over it
    """
    from ..planning import Machine, cards, report

    named: dict[str, Any] = {"recipe": recipe} if recipe is not None else {}
    named |= {"model": {"preset": model}} if model else {}
    named |= {"train": {"vram": vram}} if vram is not None else {}
    file = read_config(path_of(config)) if config is not None else {}
    run = _resolved([file, named, flags.typed_settings(settings)])
    numbers = {
        "ranks": ranks, "gpus-per-node": gpus_per_node, "link": link, "network": network,
        "tokens-per-second": tokens_per_second, "dollars-per-hour": dollars_per_hour,
    }  # fmt: skip
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name} {value}: need more than 0")
    parallel = run.parallel
    is_plain = parallel.shard == "none" and parallel.tp * parallel.cp == 1 and not grow_batch
    if ranks == 1 or (ranks is None and is_plain):
        each = cards(run, tokens_per_second, dollars_per_hour, _epoch_tokens(run))
        if json:
            print_json(each.to_json())
        else:
            _print_cards(each)
        return 0
    machine = Machine(gpus_per_node, link * 1e9, network * 1e9)
    found = report(run, ranks or gpus_per_node, machine, tokens_per_second, grow_batch=grow_batch)
    if json:
        print_json(found.to_json())
    else:
        _print(found)
    return 0


def _epoch_tokens(config: RunConfig) -> int | None:
    from ..data.shards import is_shards, read_index

    folder = Path(config.data.path[0]) if config.data.path else None
    return read_index(folder).counts["train"].tokens if folder is not None and is_shards(folder) else None


def _resolved(layers: Sequence[Mapping[str, Any]]) -> RunConfig:
    """The config as train resolves it. A preset has its published vocabulary where no shards give another."""
    from ..training.run import resolved

    config = resolved(layers)
    if config.model.vocab_size != UNKNOWN_VOCABULARY:
        return config
    models = [layer["model"] for layer in layers if layer.get("model")]
    names = [each if isinstance(each, str) else each.get("preset") for each in models]
    preset = next((name for name in reversed(names) if name is not None), None)
    if preset is None:
        raise ConfigError("the size of the vocabulary is not known; set --model.vocab-size, or name a --model")
    return resolve(*layers, vocab_size=presets.MODELS[preset]["vocab_size"])


def _print_cards(found: Cards) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..progress import duration

    screen = Console(width=None if sys.stdout.isatty() else 140)
    config, model = found.config, found.config.model
    flops = f"{model.flops_per_token(training=True) / 1e9:,.2f} GFLOP to train on a token"
    rows = f"steps of {config.batch_rows:,} rows of {config.data.sequence_length:,} tokens"
    print_line(f"{model.kind}, {model.num_parameters():,} parameters, {flops}; {rows}")
    why = "no length is set" if config.train.epochs is None else "the length of an epoch is not known without shards"
    length = "" if found.is_length_set else f", 20 for each parameter: {why}"
    print_line(f"{found.steps:,} steps, {found.tokens:,} tokens{length}")
    parts = ("weights", "gradients", "optimizer", "kept", "loss", "workspace", "total")
    table = Table("GB", "rows", "passes", "recompute", *parts, "tokens/s", "time")
    if found.price is not None:
        table.add_column("dollars")
    for size, fit in found.fits.items():
        if fit is None:
            table.add_row(f"{size:g}", "–", "–", "does not fit")
            continue
        memory, cost = fit.memory.to_json(), found.cost(fit)
        table.add_row(
            f"{size:g}", f"{fit.rows:,}", f"{fit.passes:,}", fit.recompute,
            *(f"{memory[name] / GIB:,.1f}" for name in parts),
            f"{found.tokens_per_second(fit):,.0f}", duration(found.seconds(fit)),
            *([f"{cost:,.0f}"] if cost is not None else []),
        )  # fmt: skip
    screen.print(table)
    print_line(
        "GiB at the peak of a step; kept: by the blocks for backward. With one pass a step, gradients take the place "
        f"of what was kept. Speeds are estimates: {found.rate_source}. For other GPUs give --tokens-per-second. All "
        "this is for compute capability 8.0 and newer; a V100 (7.0) or GTX 1080 (6.1) runs no kernel of mambakit."
    )


def _print(found: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..planning import CARDS, LATENCY, card_bytes, choice, fastest_fit

    screen = Console(width=None if sys.stdout.isatty() else 120)
    model, mesh, held = found.config.model, found.mesh, found.held
    print_line(
        f"{model.kind}, {model.num_parameters():,} parameters, on {mesh.size:,} ranks: {found.layout} "
        f"(replicate {mesh.replicate} x shard {mesh.shard} x cp {mesh.cp} x tp {mesh.tp})"
    )
    print_line(
        f"One rank holds {held.total / GIB:,.2f} GiB: parameters {held.parameters / GIB:,.2f}, gradients "
        f"{max(held.gradients, held.summed_later) / GIB:,.2f}, optimizer {held.optimizer / GIB:,.2f}."
    )
    if held.offloaded:
        print_line(
            f"Of this, {held.offloaded / GIB:,.2f} GiB are in the CPU's memory; speeds leave out what that costs."
        )
    if held.summed_later:
        after = f"{held.gradients / GIB:,.2f}"
        print_line(f"Gradients are whole until the last micro-batch, then {after} GiB; see --parallel.reduce every.")
    size = found.config.train.vram_gigabytes or CARDS[-1]
    fit = fastest_fit(found.config, mesh, card_bytes(size))
    how = "nothing fits; share out more, or take --parallel.offload true"
    if fit is not None:
        how = f"{fit.rows} rows at once, {fit.passes} passes a step, recompute {fit.recompute}: about "
        how += f"{fit.total / GIB:,.1f} GiB at the peak, with what passes take"
    print_line(f"On a card of {size:g} GB: {how}.")
    if found.traffic:
        table = Table("given to collectives in a step", "operation", "across", "calls", "MB")
        for each in found.traffic:
            across = " x ".join(name for name in each.across if getattr(mesh, name) > 1)
            table.add_row(each.purpose, each.operation, across, f"{each.calls:,}", f"{each.bytes / 1e6:,.3f}")
        screen.print(table)
    print_line(
        f"Speeds are estimates. One GPU: {found.rate:,.0f} tokens/s, {found.rate_source}. Links: "
        f"{found.machine.link / 1e9:,.0f} GB/s within the {found.machine.gpus_per_node} GPUs of a machine, "
        f"{found.machine.network / 1e9:,.0f} GB/s for each across; {LATENCY * 1e6:.0f} µs for each hop. Only FSDP2's "
        "collectives overlap with computing. Real runs are slower. > marks the layout to choose: about the fastest, "
        "and of these the one that holds least."
    )
    table = Table("GPUs", "layout", "tokens/s", "per GPU", "efficiency", "GiB held", "rows")
    for gpus, speeds in found.speeds.items():
        for one in speeds:
            table.add_row(
                f"{gpus:,}",
                f"{'> ' if one is choice(speeds) else '  '}{one.layout}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.tokens_per_second / gpus:,.0f}",
                f"{one.efficiency:.0%}",
                f"{one.held.total / GIB:,.1f}",
                f"{one.tokens // found.config.data.sequence_length:,}",
            )
    screen.print(table)
    print_line(found.stop)
