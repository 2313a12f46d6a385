"""On a GPU: a step that is not finite changes nothing, and the run goes back as on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from runs import metrics, settings, state_bytes

from mambakit.training.run import train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("fp32", "adamw"), ("bf16", "adamw"), ("fp16", "adamw"), ("bf16", "muon")]
)
def test_a_step_that_is_not_finite_is_skipped_and_rows_are_left_out(
    kind: str, precision: str, optimizer: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are made NaN between the captured passes and the update."""
    from mambakit.training import loop as loop_module

    original = loop_module._accumulate
    is_bad = {40, 64, 72}  # first rows of the batches of steps 6, 9 and 10

    def accumulate(run: Any, *arguments: Any) -> Any:
        loss, states = original(run, *arguments)
        if run.progress.next_row in is_bad:
            next(run.model.parameters()).grad.view(-1)[0] = math.nan
            loss = loss * math.nan
        return loss, states

    monkeypatch.setattr(loop_module, "_accumulate", accumulate)
    values = settings(
        shards, kind, train={"precision": precision, "steps": 20}, checkpoint={"every": 1, "keep_last": 99},
        optim={"name": optimizer}, parallel={"device": "cuda"},
    )  # fmt: skip
    values["guard"] = {"bad_steps": 2}
    train(values, out=tmp_path / "run")
    records = metrics(tmp_path / "run")
    # The evaluation after step 8 has shown that its weights are good.
    assert [(record["step"], record["rows"]) for record in records if record["type"] == "rollback"] == [(8, [64, 80])]
    assert [record["step"] for record in records if record["type"] == "train"] == list(range(1, 21))
    before, after = state_bytes(tmp_path / "run", 5), state_bytes(tmp_path / "run", 6)
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {name for name in before if name.startswith("train/state.safetensors")}
