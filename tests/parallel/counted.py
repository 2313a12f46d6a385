"""Two training steps on several processes, in which all that a rank holds and hands to collectives is counted."""

from __future__ import annotations

import functools
import json
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mambakit import MambaLM
from mambakit.checkpoint.state import Progress
from mambakit.config import resolve
from mambakit.device import choose_dtype, choose_recompute
from mambakit.parallel import Ranks, World, cross_entropy, mesh_of, parallelize
from mambakit.parallel.places import local_part
from mambakit.training.loop import _accumulate, _agree_to_go_on
from mambakit.training.optim import make_optimizer, update
from mambakit.training.pace import Pace
from mambakit.training.passes import make_pass

# torch.distributed's functions, and where each has the tensor that the rank gives.
FUNCTIONS = {
    "all_reduce": ("all-reduce", 0, "tensor"),
    "all_gather": ("all-gather", 1, "tensor"),
    "all_gather_into_tensor": ("all-gather", 1, "input_tensor"),
    "all_gather_single": ("all-gather", 1, "input_tensor"),
    "reduce_scatter_tensor": ("reduce-scatter", 1, "input"),
    "reduce_scatter_single": ("reduce-scatter", 1, "input"),
    # None of these is expected: the plan would miss them.
    "all_gather_object": ("other", 1, "obj"),
    "broadcast": ("other", 0, "tensor"),
    "all_to_all_single": ("other", 1, "input"),
    "barrier": ("other", 9, "none"),
    "reduce": ("other", 0, "tensor"),
    "gather": ("other", 0, "tensor"),
    "scatter": ("other", 0, "tensor"),
    "send": ("other", 0, "tensor"),
    "recv": ("other", 0, "tensor"),
}
# Who calls: a part of a file's path, and a function.
CALLERS = (
    ("fsdp/_fully_shard", "foreach_all_gather", "parameters"),
    ("fsdp/_fully_shard", "foreach_reduce", "gradients"),
    ("parallel/ranks", "_sum_in_place", "gradients"),
    ("parallel/ranks", "_exchange_rows", "parameters"),
    ("parallel/ranks", "sum_", "loss"),
    ("parallel/ranks", "norm", "clip"),
    ("training/pace", "begin", "targets and pace"),
    ("training/loop", "_agree_to_go_on", "agreement to go on"),
    ("parallel/cross_entropy", "", "cross entropy"),
    ("parallel/context", "", "context-parallel states"),
    ("parallel/tensor", "", "tensor-parallel sums"),
)
Counts = dict[str, list[int]]  # "purpose, operation": calls, bytes


def _purpose() -> str:
    """That of the nearest caller. Sums of which only autograd is the caller are tensor parallelism's."""
    frame, is_sum = sys._getframe(), False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        for part, function, purpose in CALLERS:
            if part in file and function in ("", name):
                return purpose
        is_sum = is_sum or "parallel/collectives" in file
        frame = frame.f_back  # type: ignore[assignment]
    return "tensor-parallel sums" if is_sum else "unknown"


def count_calls(counts: Counts) -> None:
    def wrapped(function: Any, operation: str, place: int, keyword: str, *given: Any, **named: Any) -> Any:
        tensor = named[keyword] if keyword in named else given[place] if place < len(given) else None
        found = counts.setdefault(f"{_purpose()}, {operation}", [0, 0])
        found[0] += 1
        found[1] += tensor.nbytes if isinstance(tensor, Tensor) else 0
        return function(*given, **named)

    for name, how in FUNCTIONS.items():
        if hasattr(dist, name):
            setattr(dist, name, functools.partial(wrapped, getattr(dist, name), *how))


def stored_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of the memory that these tensors lie in, each piece of it once."""
    parts = [local_part(tensor).detach() for tensor in tensors if tensor is not None]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def train_counted(settings: Any, local_size: int, counts: Counts, store: Any) -> dict[str, Any]:
    """Two steps: what is held before and after each update, and what was handed over in each."""
    from layouts import make_batch  # beside this file, which is a script here

    device = torch.device("cpu")
    config = resolve(settings)
    cross_entropy.LOGITS_AT_ONCE = int(os.environ.get("LOGITS_AT_ONCE", cross_entropy.LOGITS_AT_ONCE))
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), local_size, store)
    dtype = choose_dtype(config.train.precision, device)
    mesh = mesh_of(config, world, device)
    with torch.device("meta"):
        model = MambaLM(config.model)
    ranks = parallelize(model, mesh, config.parallel, dtype)
    torch.manual_seed(0)
    ranks.load(MambaLM(config.model).state_dict(), device)
    model.train()
    model.backbone.recompute = choose_recompute(config.train.recompute, device)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = make_optimizer(ranks.parameters, config.optim, device)
    run = types.SimpleNamespace(
        config=config, device=device, ranks=ranks, model=model, world=world, carried=None, check_stop=lambda: None,
        stopper=types.SimpleNamespace(signal_name=None), guard=types.SimpleNamespace(trouble=None),
        progress=Progress(), run_micro_batch=make_pass(ranks, scaler, dtype, shapes=[], compiled=False, graphed=False),
    )  # fmt: skip
    steps, pace = [], Pace(world, device)
    whole = _whole_gradients(model, ranks)
    for number in range(2):
        counts.clear()
        _agree_to_go_on(run)  # type: ignore[arg-type]
        own = make_batch(number)
        own = own.rows(*ranks.rows_of(own.num_rows))
        num_targets = pace.begin(own.num_targets, 0.0, mesh.tp * mesh.cp)
        assert num_targets == make_batch(number).num_targets
        loss, _ = _accumulate(run, own, num_targets)  # type: ignore[arg-type]
        found = {
            "parameters": stored_bytes(model.parameters()),
            "gradients": stored_bytes(parameter.grad for parameter in model.parameters()),
        }
        found["summed_later"] = max(whole, default=0)
        update(ranks, optimizer, scaler, 1e-3, config.optim.clip, loss)
        found["optimizer"] = stored_bytes(t for state in optimizer.state.values() for t in state.values())
        found["count"] = sum(parameter.numel() for parameter in ranks.parameters.values())
        steps.append({"held": found, "handed": {purpose: list(found) for purpose, found in counts.items()}})
    return {"rank": mesh.rank, "steps": steps}


def _whole_gradients(model: MambaLM, ranks: Ranks) -> list[int]:
    """A list that gets the bytes of the gradients that FSDP2 keeps whole, before each pass."""
    found: list[int] = []

    def look(*_: Any) -> None:
        states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
        groups = [group for state in states for group in state._fsdp_param_groups]
        kept = [p for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        found.append(
            sum(
                gradient.nbytes
                for p in kept
                for gradient in (p.unsharded_accumulated_grad, p._unsharded_param.grad)
                if gradient is not None
            )
        )

    if ranks.is_sharded:
        model.backbone.embedding.register_forward_pre_hook(look)
    return found


def together(world: int, folder: Path, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each rank has counted, for each case: {"settings", "local_size"}."""
    from .layouts import run_ranks  # not at the top: each rank runs this file as a program

    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(__file__, world, folder)
    by_rank = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(world)]
    return [list(each) for each in zip(*by_rank, strict=True)]


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    counts: Counts = {}
    count_calls(counts)
    store = dist.distributed_c10d._get_default_store()
    cases = json.loads((folder / "cases.json").read_text())
    found = [train_counted(case["settings"], case["local_size"], counts, store) for case in cases]
    (folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
