"""model/recompute.py beside torch's selective checkpointing: tokens/s and memory of training steps, on a GPU.

    python benchmarks/selective_checkpointing.py [--models NAME,NAME] [--steps 10] [--no-graph] [--out FILE]

Our two levels, and the nearest that torch.utils.checkpoint can do with a policy by operator:

- light: all outputs of operators are kept but those of norms, of Mamba-1's dt_proj, and of out_proj. Mamba-2's gated
  norm is part of one operator, whose outputs are kept or not as a whole: once with it, and once with the three
  operators that it replaces.
- mixer: the outputs of in_proj and out_proj alone are kept, in regions of one block and of four.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mambakit import ModelConfig, ops
from mambakit.bench.training import LENGTH, ROWS, TrainingPlan, measure_steps
from mambakit.model import lm
from mambakit.model.mamba2 import Mamba2
from mambakit.model.state import State

PLAIN_BLOCK, PLAIN_BACKBONE, PLAIN_MIX = lm.Block.forward, lm.Backbone.forward, Mamba2._mix
MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
WAYS = ("none", "light", "light, torch", "light, torch, three operators", "mixer", "mixer, torch", "mixer, torch, four")
Policy = Callable[..., CheckpointPolicy]


def policy(config: ModelConfig, level: str) -> Policy:
    """Which outputs are kept."""
    dims = config.dims
    kept_projections = {sum(dims.segments.values())}  # by the width of their output
    if level == "mixer":
        kept_projections.add(config.d_model)
    elif config.kind == "mamba1":
        kept_projections.add(dims.dt_rank + 2 * dims.state_size)

    def decide(context: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        if op in MATMULS:
            keeps = args[-1].shape[-1] in kept_projections
        else:
            name = str(op)
            keeps = level == "light" and name.startswith("mambakit") and "rms_norm" not in name
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def checkpointed(function: Callable[..., Any], decide: Policy, *arguments: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def use_blocks(decide: Policy) -> None:
    """A region for each block."""

    def forward(self: Any, hidden: Tensor, residual: Tensor, doc_ids: Any, state: Any, *_: Any) -> Any:
        return checkpointed(functools.partial(PLAIN_BLOCK, self), decide, hidden, residual, doc_ids, state)

    lm.Block.forward = forward  # type: ignore[method-assign]


def use_groups(decide: Policy, size: int = 4) -> None:
    """A region for each four blocks."""

    def forward(self: Any, tokens: Tensor, doc_ids: Any, state: Any) -> Any:
        assert state is None
        hidden, residual = self._start(tokens, self.config.dropout)
        states: list[Any] = []
        for first in range(0, len(self.layers), size):

            def run(hidden: Tensor, residual: Tensor, first: int = first) -> Any:
                after = []
                for block in self.layers[first : first + size]:
                    hidden, residual, layer_state = PLAIN_BLOCK(block, hidden, residual, doc_ids, None)
                    after.append(layer_state)
                return hidden, residual, after

            hidden, residual, after = checkpointed(run, decide, hidden, residual)
            states += after
        return self._finish(hidden, residual), State(tuple(states))

    lm.Backbone.forward = forward  # type: ignore[method-assign]


def use_three_operators() -> None:
    """Mamba-2's chain as three operators, so that the norm's output alone can be left out."""

    def mix(self: Any, projected: Tensor, doc_ids: Any, state: Any, recipes: Any) -> Any:
        assert state is None
        sizes = [self.segments["z"], self.conv1d.out_channels, self.segments["dt"]]
        z, xBC, dt = projected.split(sizes, dim=-1)
        xBC, conv = ops.causal_conv1d(xBC, self.conv1d.weight.squeeze(1), self.conv1d.bias, doc_ids=doc_ids)
        x, B, C = self._heads(xBC)
        dims = self.dims
        y, ssm = ops.ssd(x, dt, self._A(), B, C, self.D, self.dt_bias, dt_limit=dims.dt_limit, doc_ids=doc_ids)
        return self.out_proj(self._gated_norm(y, z)), {"conv": conv, "ssm": ssm}

    Mamba2._mix = mix  # type: ignore[method-assign]


def restore() -> None:
    lm.Block.forward, lm.Backbone.forward = PLAIN_BLOCK, PLAIN_BACKBONE  # type: ignore[method-assign]
    Mamba2._mix = PLAIN_MIX  # type: ignore[method-assign]


def measure(plan: TrainingPlan, way: str) -> dict[str, Any]:
    """Train one model one way."""
    level = way.split(",")[0]
    if "torch" in way:
        decide = policy(plan.config, level)
        use_groups(decide) if "four" in way else use_blocks(decide)
        if "three" in way:
            use_three_operators()
    else:
        plan = replace(plan, recompute=level)  # type: ignore[arg-type]
    try:
        speed = measure_steps(plan, is_first=False)
    finally:
        restore()
        gc.collect()
        torch.cuda.empty_cache()
    return {
        "model": plan.name,
        "way": way,
        "graph": speed.plan.graphed,
        "tokens_per_second": speed.tokens_per_second,
        "milliseconds": [1000 * one for one in speed.timing.seconds],
        "peak_gib": (speed.peak_bytes or 0) / 2**30,
        "last_loss": speed.last_loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="mamba-130m,mamba-370m,mamba2-130m,mamba2-370m")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-graph", action="store_true", help="operator by operator, as where there is no CUDA graph")
    parser.add_argument("--out", type=Path, help="all results, as JSON")
    options = parser.parse_args()
    device, results = torch.device("cuda", 0), []
    for name in options.models.split(","):
        config, rows = ModelConfig.preset(name), ROWS[name.rpartition("-")[2]]
        graphed = not options.no_graph
        plan = TrainingPlan(
            name, config, rows, LENGTH, None, options.steps, 3, False, graphed, "none", device, torch.bfloat16
        )
        for way in WAYS:
            if "three" in way and config.kind != "mamba2":
                continue
            result = measure(plan, way)
            results.append(result)
            print(
                f"{name:12} {way:30} {result['tokens_per_second']:9,.0f} tokens/s {result['peak_gib']:6.2f} GiB  "
                f"loss {result['last_loss']:.6f}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
