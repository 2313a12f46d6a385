"""Models trained for some steps by one process and by several, in fp64, so that only a real mistake makes a difference;
and in bf16, where what is computed in fp32 makes one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mambakit import MambaLM, ModelConfig
from mambakit.config import ParallelConfig
from mambakit.data.loader import Batch
from mambakit.parallel import Mesh, parallelize

ROWS, LENGTH, VOCABULARY, STEPS, CLIP = 4, 24, 37, 10, 0.5
SIZES: dict[str, Any] = {"d_model": 32, "num_layers": 2, "vocab_size": VOCABULARY}
MAMBA2: dict[str, Any] = {"kind": "mamba2", "head_dim": 8, "state_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "mamba1": {"kind": "mamba1", "state_size": 4, "bias": True, "bcdt_norm": True},
    "mamba2": {**MAMBA2, "num_groups": 1, "tie_embeddings": False},
    "mamba2 of 4 groups": {**MAMBA2, "num_groups": 4, "gated_norm": "group", "bias": True},
    "mamba2 of 4 groups, norm over the width": {**MAMBA2, "num_groups": 4, "gated_norm": "width"},
    "mamba2 whose groups are cut": {**MAMBA2, "d_model": 48, "num_groups": 3, "gated_norm": "group"},
}
Layout = tuple[str, dict[str, Any]]  # shard, degrees and other settings of parallel
DEGREES = ("replicate", "shard", "cp", "tp")
LAYOUTS: dict[int, list[Layout]] = {
    2: [
        ("none", {"replicate": 2}),
        ("full", {"shard": 2}),
        ("optimizer", {"shard": 2}),
        ("none", {"tp": 2}),
        ("none", {"cp": 2}),
    ],
    4: [
        ("none", {"replicate": 4}),
        ("full", {"shard": 4}),
        ("optimizer", {"shard": 4}),
        ("full", {"replicate": 2, "shard": 2}),
        ("none", {"tp": 4}),
        ("none", {"cp": 4}),
        ("full", {"shard": 2, "tp": 2}),
        ("full", {"shard": 2, "cp": 2}),
        ("none", {"tp": 2, "cp": 2}),
        ("optimizer", {"shard": 2, "tp": 2}),
        ("full", {"replicate": 2, "cp": 2}),
        ("none", {"replicate": 2, "tp": 2}),
    ],
}


def make_batch(step: int, packed: bool = True) -> Batch:
    """Random rows, of which some have several documents."""
    random = torch.Generator().manual_seed(100 + step)
    text = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=random)
    documents = torch.sort(torch.randint(3, (ROWS, LENGTH), generator=random), 1).values.int()
    documents[0] = 0
    documents = documents if packed else torch.zeros_like(documents)
    mask = torch.rand(ROWS, LENGTH, generator=random) > 0.2
    return Batch(text[:, :-1], text[:, 1:], documents, mask, torch.zeros(ROWS, dtype=torch.bool))


def adamw(parameters: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    matrices = [p for name, p in parameters.items() if name.endswith("proj.weight")]
    others = [p for name, p in parameters.items() if not name.endswith("proj.weight")]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )


def loss_of(model: MambaLM, rows: Batch, num_targets: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=model.lm_head.weight.dtype != torch.float64):
        output = model(rows.tokens, doc_ids=rows.doc_ids, targets=rows.targets, loss_mask=rows.loss_mask)
    assert output.loss_sum is not None
    return output.loss_sum / num_targets


def train_alone(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What one process comes to: weights before and after, gradients of the first step, losses and norms of all."""
    torch.manual_seed(0)
    model = MambaLM(config).to(torch.promote_types(dtype, torch.float32))
    parameters = dict(model.named_parameters())
    optimizer = adamw(parameters)
    found: dict[str, Any] = {"start": {n: p.detach().clone() for n, p in model.state_dict().items()}, "steps": []}
    for step in range(STEPS if dtype == torch.float64 else 1):  # Adam makes much of the rounding of small gradients
        batch = make_batch(step)
        losses = [loss_of(model, batch.rows(row, row + 1), batch.num_targets) for row in range(ROWS)]
        for loss in losses:
            loss.backward()
        if step == 0:
            found["gradients"] = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        found["steps"].append((sum(loss.item() for loss in losses), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    found["end"] = {n: p.detach() for n, p in parameters.items()}
    return found


def train_together(config: ModelConfig, layout: Layout, recompute: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The same by all ranks; of weights and gradients the parts of this one, with their places."""
    shard, degrees = layout[0], {name: value for name, value in layout[1].items() if name in DEGREES}
    alone = train_alone(config, dtype)
    mesh = Mesh.of(torch.device("cpu"), **degrees)
    with torch.device("meta"):
        model = MambaLM(config).to(torch.promote_types(dtype, torch.float32))
    kind: Any = "hybrid" if degrees.get("replicate", 1) > 1 and shard == "full" else shard
    others = {name: value for name, value in layout[1].items() if name not in DEGREES}
    parallel = ParallelConfig(shard=kind, **others)
    ranks = parallelize(model, mesh, parallel, dtype if dtype == torch.bfloat16 else torch.float32)
    ranks.load(alone["start"], torch.device("cpu"))
    model.backbone.recompute = recompute
    optimizer = adamw(ranks.parameters)
    worst: dict[str, float] = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "weight": 0.0}

    def compare(kind: str, of_piece: Any, whole: dict[str, Tensor]) -> None:
        for name, piece in ranks.pieces.items():
            mine = of_piece(piece)
            for held in piece.place.boxes():
                theirs = whole[name][held.whole]
                if theirs.numel():
                    scale = max(1e-3, theirs.abs().max().item()) if kind == "gradient" else 1.0
                    worst[kind] = max(worst[kind], (mine[held.local] - theirs).abs().max().item() / scale)

    for step, (expected_loss, expected_norm) in enumerate(alone["steps"]):
        batch = make_batch(step)
        own = batch.rows(*ranks.rows_of(ROWS)).columns(*ranks.columns_of(LENGTH))
        total = torch.zeros((), dtype=torch.float64)
        for row in range(own.num_rows):
            ranks.before_pass(is_last=row + 1 == own.num_rows)
            loss = loss_of(model, own.rows(row, row + 1), batch.num_targets)
            loss.backward()
            total += loss.detach()
        ranks.sum_(total)
        ranks.reduce_gradients()
        if step == 0:
            compare("gradient", lambda piece: piece.tensor.grad, alone["gradients"])
        norm, skipped = ranks.norm(total)
        ranks.clip(CLIP, norm)
        assert not skipped
        worst["loss"] = max(worst["loss"], abs(total.item() - expected_loss))
        worst["norm"] = max(worst["norm"], abs(norm.item() - expected_norm) / expected_norm)
        optimizer.step()
        optimizer.zero_grad()
        ranks.after_update()
    compare("weight", lambda piece: piece.tensor.detach(), alone["end"])
    numbers = torch.tensor(list(worst.values()), dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return dict(zip(worst, numbers.tolist(), strict=True))


def run_ranks(program: str, world: int, folder: Path) -> None:
    """Run a program once for each rank, with the folder, its rank and the number of ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, program, str(folder), str(rank), str(world)], env=environment)
        for rank in range(world)
    ]
    codes = [process.wait(timeout=600) for process in ranks]
    assert codes == [0] * world, codes


def together(
    world: int, folder: Path, cases: list[tuple[str, Layout, str]], dtype: str = "float64"
) -> list[dict[str, float]]:
    """Train each case on `world` processes: how far each kind of number is from that of one process."""
    (folder / "cases.json").write_text(json.dumps([(*case, dtype) for case in cases]))
    run_ranks(__file__, world, folder)
    found: list[dict[str, float]] = json.loads((folder / "found.json").read_text())
    return found


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    cases = json.loads((folder / "cases.json").read_text())
    found = [
        train_together(ModelConfig(**{**SIZES, **MODELS[name]}), (shard, degrees), level, getattr(torch, dtype))
        for name, (shard, degrees), level, dtype in cases
    ]
    dist.destroy_process_group()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
