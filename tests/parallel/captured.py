"""Passes as CUDA graphs where ranks speak in them: run as a program, once for each case, on one GPU.

FSDP2 on two ranks has a second rank that only seems to be there (torch's fake process group): its collectives copy, but
streams, events and memory are those of a real one. Layers and rows are shared among one rank, over NCCL.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mambakit import MambaLM, ModelConfig
from mambakit.config import ParallelConfig
from mambakit.parallel import Mesh, Ranks, parallelize
from mambakit.parallel.context import share_rows
from mambakit.parallel.places import local_part
from mambakit.parallel.slices import Sharing
from mambakit.parallel.tensor import share_layers
from mambakit.training.passes import make_pass

ROWS, LENGTH, PASSES = 4, 128, 3
DEVICE = torch.device("cuda", 0)


def laid_out(case: str, config: ModelConfig) -> Ranks:
    torch.manual_seed(0)
    weights = MambaLM(config).state_dict()
    with torch.device("meta"):
        model = MambaLM(config)
        if case == "tp":
            share_layers(model, Sharing(config, 1, 0), dist.group.WORLD)
    shard: Any = "full" if case == "fsdp" else "none"
    degrees = {"shard": 2} if case == "fsdp" else {}
    ranks = parallelize(model, Mesh.of(DEVICE, **degrees), ParallelConfig(shard=shard), torch.bfloat16)
    if case == "cp":
        ranks.links = share_rows(model, dist.group.WORLD)
    ranks.load(weights, DEVICE)
    model.train()
    return ranks


def gradients(case: str, config: ModelConfig, *, graphed: bool) -> dict[str, Tensor]:
    """After two steps of some passes each; weights change in between, as an optimizer would change them."""
    ranks = laid_out(case, config)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    run = make_pass(ranks, scaler, torch.bfloat16, shapes=[(ROWS, LENGTH)], compiled=False, graphed=graphed)
    random = torch.Generator(DEVICE).manual_seed(1)
    found: dict[str, Tensor] = {}
    for step in range(2):
        for number in range(PASSES):
            ranks.before_pass(is_last=number + 1 == PASSES)
            text = torch.randint(config.vocab_size, (ROWS, LENGTH + 1), device=DEVICE, generator=random)
            documents = torch.arange(LENGTH, device=DEVICE, dtype=torch.int32).div(50, rounding_mode="floor")
            count = torch.full((), ROWS * LENGTH, dtype=torch.float32, device=DEVICE)
            tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            run(tokens, targets, documents.expand(ROWS, -1).contiguous(), None, count)
        for name, parameter in ranks.model.named_parameters():
            assert parameter.grad is not None, name
            found[f"{step} {name}"] = local_part(parameter.grad).clone()
            local_part(parameter).detach().mul_(1.01)
            parameter.grad = None
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):  # an evaluation leaves parameters whole
            ranks.model(text[:, :-1])
    assert run.is_captured == graphed
    return found


def main() -> None:
    case, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.cuda.set_device(DEVICE)
    if case == "fsdp":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        dist.get_backend_config = lambda group=None: "cuda:nccl"  # type: ignore[assignment]  # it too can be captured
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    sizes: dict[str, Any] = {"d_model": 64, "num_layers": 3, "vocab_size": 100, "kind": kind}
    config = ModelConfig(**sizes, **({"head_dim": 16, "state_size": 16} if kind == "mamba2" else {}))
    plain, captured = (gradients(case, config, graphed=graphed) for graphed in (False, True))
    different = [name for name, gradient in plain.items() if not torch.equal(gradient, captured[name])]
    assert not different, different
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
