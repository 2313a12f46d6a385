"""What a person does in Python: the commands as functions, training step by step, models in other libraries."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import small_model
from runs import metrics, settings, state_bytes

import mambakit
from mambakit.files import UserError


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def test_each_command_is_a_function(run: Path, shards: Path, tmp_path: Path) -> None:
    found = mambakit.evaluate(run, shards, baselines=["gzip"])
    assert found.results[0].model.endswith("step_00000012")
    assert json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])["split"] == "val"
    assert mambakit.report(run) == run / "report.html" and (run / "report.html").stat().st_size > 1000
    mambakit.convert(run, tmp_path / "theirs", to="state-spaces")
    loaded = mambakit.load(run)
    mambakit.save(loaded, tmp_path / "saved")
    mambakit.save(loaded.model, tmp_path / "native", tokenizer=loaded.tokenizer, to="native")
    texts = {
        mambakit.load(folder).generate("the cat", max_new_tokens=8, temperature=0)
        for folder in (run, tmp_path / "theirs", tmp_path / "saved", tmp_path / "native")
    }
    assert len(texts) == 1
    ends = {mambakit.load(folder).end_tokens for folder in (run, tmp_path / "theirs", tmp_path / "saved")}
    assert ends == {loaded.end_tokens} and loaded.end_tokens


def test_functions_stay_functions_after_their_rooms_were_imported() -> None:
    code = (
        "import mambakit, mambakit.evaluation, mambakit.reporting, mambakit.training, mambakit.data.prepare; "
        "assert all(callable(getattr(mambakit, name)) for name in ('evaluate', 'report', 'train', 'prepare', 'convert'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_quiet_training_says_nothing(shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mambakit.train(settings(shards, train={"steps": 3}), out=tmp_path / "run", quiet=True)
    assert capfd.readouterr() == ("", "")
    mambakit.train({"train": {"steps": 4}}, out=tmp_path / "run", resume=True)
    assert "step 4/4" in capfd.readouterr().err


def test_training_step_by_step_gives_the_records_of_the_run(
    finished: Path, shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = list(mambakit.training_steps(settings(shards), out=tmp_path / "run"))
    assert capfd.readouterr() == ("", "")
    written = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records == written
    assert metrics(tmp_path / "run") == metrics(finished)
    assert state_bytes(tmp_path / "run", 12) == state_bytes(finished, 12)


def test_a_quiet_run_that_waits_for_its_caller_silences_nobody(
    shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = mambakit.training_steps(settings(shards), out=tmp_path / "waiting")
    next(waiting)
    mambakit.train(settings(shards, train={"steps": 3}), out=tmp_path / "run")
    assert "step 3/3" in capfd.readouterr().err
    waiting.close()
    assert capfd.readouterr() == ("", "")


def test_who_breaks_out_of_the_steps_can_go_on(finished: Path, shards: Path, tmp_path: Path) -> None:
    for record in mambakit.training_steps(settings(shards), out=tmp_path / "run"):
        if record["step"] == 5:
            break
    assert (tmp_path / "run/checkpoints/step_00000005/manifest.json").is_file()
    rest = list(mambakit.training_steps({}, out=tmp_path / "run", resume=True))
    assert rest[0]["step"] == 6
    assert metrics(tmp_path / "run") == metrics(finished)
    assert state_bytes(tmp_path / "run", 12) == state_bytes(finished, 12)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals")
def test_ctrl_c_among_the_steps_saves_and_is_ctrl_c(shards: Path, tmp_path: Path) -> None:
    def interrupted() -> None:
        for record in mambakit.training_steps(settings(shards), out=tmp_path / "run"):
            if record["step"] == 5:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "run/checkpoints/step_00000005/manifest.json").is_file()


def batches(form: Any) -> Iterator[Any]:
    random = torch.Generator().manual_seed(5)
    while True:
        yield form(torch.randint(0, 50, (4, 33), generator=random))


FORMS = {
    "lists": lambda rows: rows.tolist(),
    "lists of tensors": list,
    "arrays": lambda rows: rows.numpy(),
    "narrow arrays": lambda rows: rows.numpy().astype(np.uint16),
    "a mapping of lists": lambda rows: {"tokens": rows[:, :-1].tolist(), "targets": rows[:, 1:].tolist()},
}
OWN: dict[str, Any] = {
    "model": {"kind": "mamba2", "d_model": 16, "num_layers": 1, "vocab_size": 50, "head_dim": 8, "state_size": 8},
    "train": {"steps": 2}, "parallel": {"device": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_batches_may_be_lists_and_arrays(form: str, tmp_path: Path) -> None:
    if form == "lists of tensors":
        FORMS[form] = lambda rows: torch.stack(list(rows))
    mambakit.train(OWN, batches(FORMS[form]), out=tmp_path / "run", quiet=True)
    mambakit.train(OWN, batches(lambda rows: rows), out=tmp_path / "same", quiet=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "same")


@pytest.mark.parametrize("batch", [[[1, 2, 3], [1, 2]], [1, 2, 3], [[0.5, 1.5]], {"tokens": [[1, 2]]}, 7, ["text"]])
def test_a_batch_that_is_none_is_told(batch: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a batch"):
        mambakit.train(OWN, [batch], out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_lora_of_every_projection_trains_and_merges(kind: str) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = small_model(kind)
    tuned = get_peft_model(model, LoraConfig(target_modules=["in_proj", "out_proj"], r=2))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, model.config.vocab_size, (2, 9))
    with torch.no_grad():
        before = tuned(tokens).logits
        merged = tuned.merge_and_unload()
        assert isinstance(merged, mambakit.MambaLM)
        assert torch.allclose(merged(tokens).logits, before, atol=1e-5)
