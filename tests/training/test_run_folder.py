"""What a run leaves on disk: checkpoints that are whole or not there, and what happens when something is wrong."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_model
from runs import make_corpus, metrics, settings, state_bytes, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

import mambakit
from mambakit.checkpoint import CheckpointError, native
from mambakit.checkpoint import files as checkpoint_files
from mambakit.config import ConfigError
from mambakit.data.prepare import prepare
from mambakit.evaluation import Score
from mambakit.files import NoSpaceError, UserError, lock
from mambakit.training import loop as loop_module
from mambakit.training.run import train
from mambakit.training.stopping import Stopper
from mambakit.verify import verify

KILLS = int(os.environ.get("MAMBAKIT_TEST_KILLS", "8"))


def test_a_checkpoint_opens_in_transformers_and_in_mambakit_as_it_stands(finished: Path) -> None:
    folder = finished / "checkpoints/step_00000012"
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ours = mambakit.load(folder)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder)("the cat sat")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, ours.model(tokens).logits, atol=1e-4)
    assert ours.tokenizer is not None and ours.tokenizer.encode("the cat sat").ids == tokens[0].tolist()
    assert json.loads((folder / "train/config.json").read_text())["train"]["steps"] == 12


def test_no_file_of_a_run_is_a_pickle(finished: Path) -> None:
    suffixes = {path.suffix for path in finished.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".jsonl", ".safetensors", ".txt", ""}


def test_the_newest_the_best_and_every_nth_checkpoint_are_kept(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([2.0, 1.0, 3.0, 4.0])  # of steps 3, 6, 9, 12
    monkeypatch.setattr(loop_module, "score", lambda *a, **k: Score(next(losses), 1))
    config = settings(shards, checkpoint={"every": 1, "keep_last": 2, "keep_every": 5}, train={"eval_every": 3})
    train(config, out=tmp_path / "run")
    kept = {native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")}
    assert kept == {12, 11, 10, 5, 6}
    assert json.loads((tmp_path / "run/best.json").read_text()) == {"step": 6, "loss": 1.0}
    assert native.find(tmp_path / "run").name == "step_00000006"


def test_the_best_is_saved_between_regular_checkpoints(shards: Path, tmp_path: Path) -> None:
    config = settings(shards, checkpoint={"every": 100, "keep_last": 1}, train={"eval_every": 5, "steps": 11})
    train(config, out=tmp_path / "run")
    records = [record for record in metrics(tmp_path / "run") if record["type"] == "eval"]
    best = min(records, key=lambda record: record["loss"])["step"]
    assert {native.step_of(folder) for folder in native.checkpoints(tmp_path / "run")} == {11, best}


def test_early_stop_ends_the_run_and_saves(shards: Path, tmp_path: Path) -> None:
    config = settings(
        shards, optim={"lr": 1e-9, "min_lr": 0.0, "weight_decay": 0.0, "warmup_steps": 0},
        model={"dropout": 0.0}, train={"steps": 200, "eval_every": 1, "early_stop": 2}, track={"sample_every": 0},
    )  # fmt: skip
    result = train(config, out=tmp_path / "run")
    assert result.stopped_by is None
    assert 3 <= result.step < 200
    assert result.checkpoint.is_dir()
    again = train(config, out=tmp_path / "run", resume=True)
    assert again.step == result.step


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Any] = {
    "model.safetensors": _flip,
    "train/optimizer.safetensors": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "train/state.json": lambda path: path.unlink(),
    "train/state.safetensors": lambda path: path.write_bytes(b""),
    "tokenizer.json": _flip,
    "manifest.json": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_noticed_named_and_passed_over(
    name: str, finished: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    DAMAGE[name](run / "checkpoints/step_00000012" / name)
    assert any(name in problem for problem in verify(run))
    result = train(settings(shards), out=run, resume=True)
    said = capsys.readouterr().err
    assert f"step_00000012 is damaged: {run / 'checkpoints/step_00000012' / name}" in said
    assert "going on from step_00000009 instead" in said
    assert result.step == 12
    assert state_bytes(run, 12) == state_bytes(finished, 12)
    assert metrics(run) == metrics(finished)
    assert not list(verify(run))


def test_a_named_checkpoint_that_is_damaged_is_refused(finished: Path, shards: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    _flip(run / "checkpoints/step_00000012/model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors differs"):
        train(settings(shards), out=run, resume=run / "checkpoints/step_00000012")


_KILLED = """
import json, os, signal, sys, time
from mambakit.training.run import train
config, out, seconds = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
while True:
    child = os.fork()  # nothing has computed in this process yet, so a fork is as good as a new one, and quicker
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        train(config, out=out, resume=True)
        os._exit(0)
    if not seconds:
        sys.exit(os.waitpid(child, 0)[1])
    time.sleep(seconds.pop())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(sorted(name for name in os.listdir(out + "/checkpoints")) if os.path.exists(out + "/checkpoints") else [])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_killed_at_random_moments_the_run_ends_in_the_same_bits(shards: Path, tmp_path: Path) -> None:
    steps = 30 + 4 * KILLS
    config = settings(shards, checkpoint={"every": 1, "keep_last": 2}, train={"steps": steps, "eval_every": 10})
    train(config, out=tmp_path / "whole")
    random = torch.Generator().manual_seed(KILLS)
    seconds = (0.1 + 1.5 * torch.rand(KILLS, generator=random)).tolist()
    command = [sys.executable, "-c", _KILLED, json.dumps(config), str(tmp_path / "run"), json.dumps(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * KILLS)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == KILLS
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "run", steps) == state_bytes(tmp_path / "whole", steps)
    assert not list(verify(tmp_path / "run"))
    left = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert all(name.startswith("step_") for name in left), left


def test_a_second_training_of_the_same_run_is_refused(shards: Path, tmp_path: Path) -> None:
    config = settings(shards, train={"steps": 100_000})
    code = "import json, sys; from mambakit.training.run import train; train(json.loads(sys.argv[1]), out=sys.argv[2])"
    first = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(config), str(tmp_path / "run")], stderr=subprocess.DEVNULL
    )
    try:
        wait_for((tmp_path / "run/checkpoints/step_00000003").exists)
        with pytest.raises(UserError, match=f"is being trained by another process .process {first.pid}"):
            train(config, out=tmp_path / "run", resume=True)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    train({"train": {"steps": 1}}, out=tmp_path / "run", resume=True)  # a dead process holds no lock


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_the_run_can_go_on(
    background: bool, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(shards, checkpoint={"background": background})
    train(config, out=tmp_path / "whole")
    original = checkpoint_files.write_weights

    def full(path: Path, weights: Any) -> None:
        if "step_00000009" in str(path):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, weights)

    monkeypatch.setattr(checkpoint_files, "write_weights", full)
    with pytest.raises(NoSpaceError, match="no space left on the disk of"):
        train(config, out=tmp_path / "run")
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} >= {"step_00000006"}
    assert not list(verify(tmp_path / "run"))
    monkeypatch.undo()
    train(config, out=tmp_path / "run", resume=True)
    assert state_bytes(tmp_path / "run", 12) == state_bytes(tmp_path / "whole", 12)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@contextlib.contextmanager
def _small_disk(place: Path, size: int) -> Iterator[None]:
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here; a full disk is simulated by another test")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk as Linux does")
def test_a_real_disk_that_fills_up(shards: Path, tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk", 2 * 2**20):
        config = settings(shards, checkpoint={"every": 1, "keep_last": 99}, train={"steps": 25})
        command = [sys.executable, "-m", "mambakit", "train", "--out", str(tmp_path / "disk/run"), "--resume"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        done = subprocess.run([*command, str(tmp_path / "config.json")], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "no space left on the disk" in done.stderr.splitlines()[-1].lower()
        assert "Traceback" not in done.stderr
        saved = native.checkpoints(tmp_path / "disk/run")
        assert saved and not list(verify(tmp_path / "disk/run"))
        for folder in saved[1:]:
            shutil.rmtree(folder)
        done = subprocess.run([*command, "--checkpoint.keep-last", "1"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        train(config, out=tmp_path / "whole")
        assert metrics(tmp_path / "disk/run") == metrics(tmp_path / "whole")


def test_a_disk_too_small_is_told_before_the_first_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match="a checkpoint takes about 0.00 GB, but the disk of .* has 0.00 GB free"):
        train(settings(shards), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_refused_without_resume(finished: Path, shards: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="exists; go on with it by --resume"):
        train(settings(shards), out=finished)
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused(finished: Path, shards: Path) -> None:
    with pytest.raises(CheckpointError, match="holds another model: d_model is 16 there and 24 in the config"):
        train(settings(shards, model={"d_model": 24}), out=finished, resume=True)


def test_other_data_is_noticed_on_resume(finished: Path, shards: Path) -> None:
    for change in ({"sequence_length": 64}, {"seed": 1}, {"carry_state": True}):
        with pytest.raises(CheckpointError, match="came from other data, or in another order"):
            train({"data": change, "train": {"steps": 20}}, out=finished, resume=True)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.vocab_size=50, but the tokenizer"):
        train(settings(shards, model={"vocab_size": 50}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fine_tuning_starts_from_the_given_weights(finished: Path, shards: Path, tmp_path: Path) -> None:
    config = {key: value for key, value in settings(shards).items() if key != "model"}
    config["optim"] = {"lr": 1e-9, "min_lr": 0.0, "weight_decay": 0.0}
    result = train({**config, "train": {**config["train"], "steps": 1}}, out=tmp_path / "run", init_from=finished)
    before, after = mambakit.load(native.find(finished)).model, mambakit.load(result.checkpoint).model
    for mine, theirs in zip(after.parameters(), before.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_fine_tuning_on_data_of_another_tokenizer_is_refused(shards: Path, tmp_path: Path) -> None:
    from mambakit.checkpoint import huggingface
    from mambakit.data.tokenize import bytes_tokenizer

    huggingface.write(small_model("mamba1", vocab_size=300), tmp_path / "other", tokenizer=bytes_tokenizer())
    with pytest.raises(CheckpointError, match="made with another tokenizer"):
        train({"data": {"path": str(shards)}}, out=tmp_path / "run", init_from=tmp_path / "other")


def test_own_batches_take_the_loaders_place_and_resume(tmp_path: Path) -> None:
    def batches() -> Iterator[torch.Tensor]:
        random = torch.Generator().manual_seed(5)
        while True:
            yield torch.randint(0, 50, (4, 1), generator=random).expand(4, 33).clone()

    config: dict[str, Any] = {
        "model": {"kind": "mamba2", "d_model": 16, "num_layers": 1, "vocab_size": 50, "head_dim": 8, "state_size": 8},
        "train": {"steps": 8}, "optim": {"lr": 1e-2}, "checkpoint": {"every": 4}, "parallel": {"device": "cpu"},
    }  # fmt: skip
    train(config, batches(), out=tmp_path / "whole")
    losses = [record["loss"] for record in metrics(tmp_path / "whole")]
    assert losses[-1] < losses[0]
    train(
        {**config, "train": {"steps": 4}, "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 2}},
        batches(),
        out=tmp_path / "run",
    )
    train({"train": {"steps": 8}}, batches(), out=tmp_path / "run", resume=True)
    train(
        {**config, "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 2}}, batches(), out=tmp_path / "same"
    )
    assert metrics(tmp_path / "run") == metrics(tmp_path / "same")


def test_run_length_in_tokens_and_epochs(shards: Path, tmp_path: Path) -> None:
    by_tokens = settings(shards, train={"steps": None, "tokens": 1000}, track={"sample_every": 0})
    assert train(by_tokens, out=tmp_path / "tokens").total_steps == 4  # of 256 tokens
    by_epochs = settings(shards, train={"steps": None, "epochs": 1.0}, track={"sample_every": 0})
    result = train(by_epochs, out=tmp_path / "epochs")
    last = [record for record in metrics(result.folder) if record["type"] == "train"][-1]
    assert 1.0 <= last["epoch"] < 1.2


def test_bf16_trains_on_a_cpu(shards: Path, tmp_path: Path) -> None:
    for kind in ("mamba1", "mamba2"):
        config = settings(shards, kind, train={"precision": "bf16", "steps": 30}, model={"dropout": 0.0})
        train(config, out=tmp_path / kind)
        losses = [record["loss"] for record in metrics(tmp_path / kind) if record["type"] == "train"]
        assert losses[-1] < 0.8 * losses[0]
        assert mambakit.load(tmp_path / kind / "checkpoints/step_00000030").model.lm_head.weight.dtype == torch.float32


def stop_before(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for a stop just before the n-th look at the stopper."""
    looks = 0
    check = Stopper.check

    def counted(self: Stopper) -> None:
        nonlocal looks
        looks += 1
        if looks == number:
            self.signal_name = "SIGTERM"
        check(self)

    monkeypatch.setattr(Stopper, "check", counted)


def test_a_tuned_run_that_stops_at_once_keeps_the_weights_it_began_with(
    finished: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {key: value for key, value in settings(shards).items() if key != "model"}
    train(config, out=tmp_path / "whole", init_from=finished)
    stop_before(1, monkeypatch)
    assert train(config, out=tmp_path / "run", init_from=finished).step == 0
    train({}, out=tmp_path / "run", resume=True)
    assert state_bytes(tmp_path / "run", 12) == state_bytes(tmp_path / "whole", 12)


def test_a_stop_in_the_last_evaluation_is_no_end(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(shards, train={"eval_every": 100}, track={"sample_every": 0}, checkpoint={"every": 100})
    train(config, out=tmp_path / "whole")
    stop_before(2 * 12 + 1, monkeypatch)
    result = train(config, out=tmp_path / "run")
    assert (result.step, result.stopped_by) == (12, "SIGTERM")
    monkeypatch.undo()
    assert train({}, out=tmp_path / "run", resume=True).stopped_by is None
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert (tmp_path / "run/best.json").read_bytes() == (tmp_path / "whole/best.json").read_bytes()


def test_a_resume_that_is_refused_moves_nothing(shards: Path, tmp_path: Path) -> None:
    train(settings(shards, checkpoint={"keep_last": 9}), out=tmp_path / "run")
    before = native.checkpoints(tmp_path / "run")
    with pytest.raises(CheckpointError, match="came from other data"):
        train({"data": {"seed": 9}}, out=tmp_path / "run", resume=tmp_path / "run/checkpoints/step_00000006")
    assert native.checkpoints(tmp_path / "run") == before


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(
    finished: Path, shards: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for folder in native.checkpoints(run):
        _flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint of .* can be used"):
        train(settings(shards), out=run, resume=True)
    assert len(native.checkpoints(run)) == len(native.checkpoints(finished))


def test_a_run_on_text_goes_on_although_the_text_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    corpus = make_corpus(tmp_path / "corpus")
    config = settings(corpus, data={"tokenizer": "train:300"}, train={"steps": 4})
    train(config, out=corpus / "run")  # inside the text: its own files are none
    (corpus / "more.txt").write_text("a new note")
    monkeypatch.chdir(tmp_path / "cache")
    assert train({"train": {"steps": 6}}, out=corpus / "run", resume=True).step == 6


def test_batches_that_end_early_lose_no_step(tmp_path: Path) -> None:
    model = {"kind": "mamba1", "d_model": 8, "num_layers": 1, "vocab_size": 20}
    config: dict[str, Any] = {"model": model, "train": {"steps": 9}, "parallel": {"device": "cpu"}}
    batches = [torch.randint(0, 20, (2, 9)) for _ in range(3)]
    with pytest.raises(UserError, match="the batches ended at step 3 of 9; the run is saved"):
        train(config, batches, out=tmp_path / "run")
    assert (tmp_path / "run/checkpoints/step_00000003").is_dir()
    with pytest.raises(ConfigError, match="set model.vocab_size"):
        train({"model": "small", "train": {"steps": 9}}, batches, out=tmp_path / "other")


def test_tokens_left_are_counted_at_the_batch_of_now(shards: Path, tmp_path: Path) -> None:
    length: dict[str, Any] = {"steps": None, "tokens": 2048}
    config = settings(shards, train=length, track={"sample_every": 0})
    assert train(config, out=tmp_path / "run").total_steps == 8
    longer = {"train": {"tokens": 4096, "batch_tokens": 512}}
    assert train(longer, out=tmp_path / "run", resume=True).total_steps == 8 + 4


def test_a_run_may_branch_off_another_ones_checkpoint(finished: Path, shards: Path, tmp_path: Path) -> None:
    named = finished / "checkpoints/step_00000009"
    train(settings(shards), out=tmp_path / "branch", resume=named)
    assert metrics(tmp_path / "branch") == metrics(finished)
    assert not list(verify(tmp_path / "branch"))
    with pytest.raises(UserError, match="is a checkpoint of another run"):
        train(settings(shards), out=tmp_path / "branch", resume=named)


def test_who_comes_second_leaves_the_folder_to_the_first(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with lock(tmp_path / "run/lock"), pytest.raises(UserError, match="is being trained by another process"):
        train({"data": "nowhere"}, out=tmp_path / "run")
    assert (tmp_path / "run/lock").exists()


def test_foreign_metrics_are_not_overwritten(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("mine\n")
    with pytest.raises(UserError, match="exists; go on with it by --resume"):
        train(settings(shards), out=tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_text() == "mine\n"


def test_what_only_the_data_can_tell_is_checked_too(shards: Path, tmp_path: Path) -> None:
    config = settings(shards, optim={"warmup_steps": 50}, train={"steps": None, "tokens": 1024})
    with pytest.raises(ConfigError, match="longer than the run of 4 steps"):
        train(config, out=tmp_path / "run")
    prepare([make_corpus(tmp_path / "corpus", 3)], tmp_path / "shards", tokenizer="bytes", val_fraction=0)
    with pytest.raises(ConfigError, match="early_stop needs a validation split"):
        train(settings(tmp_path / "shards", train={"early_stop": 2}), out=tmp_path / "run")


def test_a_file_that_cannot_be_read_is_one_problem_of_its_checkpoint(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, advance: Any) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("mambakit.files.checksum", broken)
    problems = list(native.verify(finished / "checkpoints/step_00000012"))
    assert problems and all("cannot be read: Input/output error" in problem for problem in problems)


def test_a_tuned_run_killed_before_its_first_step_keeps_its_weights(
    finished: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {key: value for key, value in settings(shards).items() if key != "model"}
    train(config, out=tmp_path / "whole", init_from=finished)

    def killed(run: Any) -> None:
        raise RuntimeError("killed")

    for place in ("save", "loop"):  # before the weights are saved, and after
        monkeypatch.setattr(f"mambakit.training.run.{place}", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(config, out=tmp_path / "run", init_from=finished, resume=True)
        monkeypatch.undo()
    train({}, out=tmp_path / "run", resume=True)
    assert state_bytes(tmp_path / "run", 12) == state_bytes(tmp_path / "whole", 12)
