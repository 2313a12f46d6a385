"""The commands, as a person types them."""

from __future__ import annotations

import inspect
import json
import lzma
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from runs import WORDS, make_corpus, make_shards, metrics, settings, wait_for
from safetensors.torch import load_file, save_file

from mambakit import presets
from mambakit.checkpoint import huggingface
from mambakit.cli import COMMANDS, main
from mambakit.config import SECTIONS, PrepareConfig
from mambakit.data.tokenize import bytes_tokenizer
from mambakit.verify import verify

ROOT = Path(__file__).parents[1]
TINY = [
    "--model.d-model",
    "16",
    "--model.num-layers",
    "1",
    "--data.sequence-length",
    "32",
    "--train.batch-tokens",
    "128",
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    (out.parent / "config.json").write_text(json.dumps(settings(shards)))
    assert main(["train", str(out.parent / "config.json"), "--out", str(out)]) == 0
    return out


def examples() -> dict[str, list[str]]:
    """Every command of README.md and of each --help, by where it stands."""
    found = {"README.md": re.findall(r"^mambakit .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)}
    for name, command in COMMANDS.items():
        found[name] = [
            line.strip() for line in (inspect.getdoc(command) or "").splitlines() if line.startswith("  mambakit ")
        ]
    return found


def _end_when_it_listens() -> None:
    """Send this process SIGTERM once the server that it starts handles it."""
    before = signal.getsignal(signal.SIGTERM)

    def end() -> None:
        wait_for(lambda: signal.getsignal(signal.SIGTERM) != before)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()


@pytest.mark.parametrize("place", examples())
def test_every_example_runs(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but with models of all names tiny and runs of few steps."""
    commands = examples()[place]
    assert commands
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    tiny = {
        name: {**preset, "d_model": 32, "num_layers": 1, "num_groups": 1} for name, preset in presets.MODELS.items()
    }
    monkeypatch.setattr(
        presets,
        "MODELS",
        {
            name: {k: v for k, v in preset.items() if k != "num_groups" or preset["kind"] == "mamba2"}
            for name, preset in tiny.items()
        },
    )
    monkeypatch.setattr(presets, "RECIPES", {**presets.RECIPES, "paper-130m": {"train": {"batch_tokens": 2048}}})
    for folder in ("notes", "letters", "src", "docs"):
        make_corpus(tmp_path / folder, 12)
    (tmp_path / "book.txt").write_text("\n".join(WORDS * 500))
    (tmp_path / "prompts.txt").write_text("the cat\na dog\n")
    records = "".join(json.dumps({"title": word, "text": " ".join(WORDS)}) + "\n" for word in WORDS * 20)
    (tmp_path / "wiki.jsonl.xz").write_bytes(lzma.compress(records.encode()))
    needed = {
        "evaluate": "run",
        "generate": "run",
        "serve": "run",
        "lengthen": "run",
        "convert": "run",
        "report": "run tuned",
        "verify": "run",
        "info": "run",
        "train": "",
        "launch": "",
        "bench data": "",
    }
    if place in needed:
        assert main(["prepare", "notes", "--out", "shards", "--tokenizer", "train:300"]) == 0
    for name in needed.get(place, "").split():
        assert (
            main(
                ["train", "--data", "shards", "--out", name, "--train.steps", "100", "--checkpoint.every", "100", *TINY]
            )
            == 0
        )
    if place == "launch":
        rows = ["--train.batch-tokens", "3072", "--data.sequence-length", "32"]  # which 8, 16 and 32 ranks can share
        assert main(["train", "--data", "shards", "--write-config", "run.yaml", *TINY, *rows]) == 0
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 17\n")
        (tmp_path / "bin/sbatch").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for command in commands:
        for script in tmp_path.glob("runs/*.sbatch.sh"):
            script.unlink()
        words = shlex.split(re.sub(r"--train\.steps \d+", "--train.steps 3", command))[1:]
        if "--tasks" in words:  # in test_harness.py; most have their data on Hugging Face
            continue
        if words[0] == "prepare" and "--tokenizer" not in words:
            words += ["--tokenizer", "train:300"]
        if words[0] == "prepare" and (tmp_path / "shards").exists():
            words[words.index("--out") + 1] = f"shards{len(list(tmp_path.iterdir()))}"
        if words[0] == "train" and "--write-config" not in words:
            words += ["--train.batch-tokens", "64", "--data.sequence-length", "32"] if "--resume" not in words else []
            words += (
                ["--train.steps", "3"] if not {"--train.steps", "--train.tokens", "--train.epochs"} & {*words} else []
            )
            words = [("1e3" if word == "1e6" else word) for word in words]
            if (
                "run" in words
                and (tmp_path / "run").exists()
                and "--resume" not in words
                and "--init-from" not in words
            ):
                words[words.index("run")] = f"run{len(list(tmp_path.iterdir()))}"
        if words[0] == "serve":
            words = (
                [*words, "--port", "0"]
                if "--port" not in words
                else ["0" if word == "8080" else word for word in words]
            )
            _end_when_it_listens()
        if words[0] == "lengthen":
            words[words.index("--to") + 1] = "40"
            words += ["--train.steps", "3"] if "--train.steps" not in words else []
        if words[0] == "convert" and (tmp_path / words[2]).exists():
            words[2] += "2"
        assert main(words) == 0, f"{command} (as {words})"


def test_help_of_prepare_has_every_option_with_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    shown = capsys.readouterr().out
    for name, field in PrepareConfig.model_fields.items():
        default = "unset" if field.default is None else str(field.default).lower()
        assert f"--{name.replace('_', '-')} " in shown
        assert f"{field.description} (default: {default})" in shown


def test_help_of_each_command_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert name in overview
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "For example:" in shown and f"mambakit {name} " in shown


def test_every_setting_is_a_flag_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    for section, fields in SECTIONS.items():
        for name in fields.model_fields:
            assert f"--{section}.{name.replace('_', '-')}" in shown


MISTAKES: dict[str, tuple[list[str], str]] = {
    "missing folder": (["prepare", "nowhere", "--out", "o"], "nowhere does not exist; give a file or folder of text"),
    "empty folder": (["prepare", "empty", "--out", "o"], "empty holds no text: it is empty"),
    "no text": (["prepare", "binary", "--out", "o"], "binary holds no text: it has 1 binary"),
    "strict": (["prepare", "mixed", "--out", "o", "--strict"], "mixed/a.bin cannot be read (binary), and --strict was given"),
    "tokenizer": (["prepare", "mixed", "--out", "o", "--tokenizer", "train:12"], "need train:VOCAB with a vocabulary from 257"),
    "tokenizer file": (["prepare", "mixed", "--out", "o", "--tokenizer", "./nothing.json"], "the tokenizer ./nothing.json does not exist"),
    "out exists": (["prepare", "mixed", "--out", "mixed"], "mixed exists and is not empty"),
    "fraction": (["prepare", "mixed", "--out", "o", "--val-fraction", "2"], "val_fraction=2: need less than 1"),
    "three mistakes": (["train", "three.yaml", "--out", "o"], "3 problems:\n  optim.lr='fast': need a valid number\n  train.stepz is not a setting; did you mean steps?\n  train.batch_tokens=1000 is not a multiple of data.sequence_length=1024"),
    "no such config": (["train", "nothing.yaml"], "the config nothing.yaml does not exist"),
    "broken yaml": (["train", "broken.yaml"], "the config broken.yaml cannot be read"),
    "preset": (["train", "--data", "mixed", "--model", "mamba-130"], "no model preset is called 'mamba-130'; did you mean mamba-130m?"),
    "recipe": (["train", "--data", "mixed", "--recipe", "fats"], "no recipe is called 'fats'; did you mean fast?"),
    "no data": (["train", "--out", "o"], "there is nothing to train on"),
    "data missing": (["train", "--data", "nowhere", "--out", "o"], "nowhere does not exist"),
    "resume what": (["train", "--resume"], "--resume needs the run to go on with"),
    "no gpu": (["train", "--data", "mixed", "--out", "o", "--parallel.device", "mps"], "torch finds no Apple GPU here"),
    "fp16": (["train", "--data", "mixed", "--out", "o", "--train.precision", "fp16", "--parallel.device", "cpu"], "train.precision=fp16 needs a CUDA GPU"),
    "no model": (["generate", "empty", "--prompt", "a"], "config.json does not exist"),
    "no folder": (["evaluate", "nowhere", "--data", "mixed"], "nowhere is not a folder"),
    "command": (["trian"], "there is no command 'trian'; did you mean train?"),
    "verify what": (["verify"], "there is nothing to verify; name shard folders, checkpoints, runs or model folders"),
    "report nothing": (["report", "mixed"], "mixed holds no metrics.jsonl"),
    "stream": (["generate", "empty", "--prompt", "a", "b", "--stream"], "--stream prints one text as it comes"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_message_and_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    for folder in ("empty", "binary", "mixed"):
        (tmp_path / folder).mkdir()
    (tmp_path / "binary/a.bin").write_bytes(b"\0\1\2")
    (tmp_path / "mixed/a.bin").write_bytes(b"\0\1\2")
    (tmp_path / "mixed/a.txt").write_text("text")
    (tmp_path / "three.yaml").write_text("optim:\n  lr: fast\ntrain:\n  stepz: 3\n  batch_tokens: 1000\ndata: mixed\n")
    (tmp_path / "broken.yaml").write_text("train: [1, 2\nx: }")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    arguments, message = MISTAKES[name]
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "Traceback" not in told.err and not told.out
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_flag_that_does_not_exist_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--optim.lrr", "3"])
    assert ended.value.code == 2
    assert "--optim.lr" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_and_other_shards_are_refused(
    run: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", "--out", str(run), "--model.d-model", "32"]) == 2
    assert "holds another model" in capsys.readouterr().err
    model = tmp_path / "bytes"
    from helpers import small_model

    huggingface.write(small_model("mamba1", vocab_size=257), model, tokenizer=bytes_tokenizer())
    assert main(["evaluate", str(model), "--data", str(shards)]) == 2
    assert "made with another tokenizer" in capsys.readouterr().err
    assert not list(verify(run))


def test_json_is_all_that_standard_output_holds(
    run: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    capsys.readouterr()
    corpus = make_corpus(tmp_path / "corpus", 5)
    assert result("prepare", str(corpus), "--out", str(tmp_path / "o"), "--tokenizer", "bytes")["vocab_size"] == 257
    assert result("train", "--resume", "--out", str(run))["step"] == 12
    found = result("evaluate", str(run), "--data", str(shards), "--baseline", "gzip", "--samples", "1")
    assert [entry["model"] for entry in found["results"]][1] == "gzip -9, one stream"
    assert found["results"][0]["bits_per_byte"] > 0
    texts = result("generate", str(run), "--prompt", "the cat", "a dog", "--seed", "3", "--max-new-tokens", "5")[
        "results"
    ]
    assert [entry["prompt"] for entry in texts] == ["the cat", "a dog"]
    assert (
        result("generate", str(run), "--prompt", "the cat", "--seed", "3", "--max-new-tokens", "5")["results"]
        == texts[:1]
    )
    assert result("verify", str(run), str(shards)) == {str(run): [], str(shards): []}


def test_verify_says_what_is_wrong_and_fails(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    copy = shutil.copytree(shards, tmp_path / "shards")
    with (copy / "train-00000.bin").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff")
    assert main(["verify", str(copy)]) == 2
    assert "train-00000.bin differs from what was written" in capsys.readouterr().out


def test_verify_looks_at_every_path(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "nothing"), str(shards)]) == 2
    told = capsys.readouterr().out
    assert "nothing is no shard folder, checkpoint, run or model" in told and f"{shards}: good" in told


def test_a_model_folder_is_verified_by_opening_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(run), str(tmp_path / "model"), "--to", "huggingface"]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.endswith("weights are finite; it has no checksums\n")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["backbone.layers.0.mixer.D"][0] = math.nan
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "model")]) == 2
    assert "weights that are not finite: backbone.layers.0.mixer.D" in capsys.readouterr().out


def test_the_report_shows_the_evaluation_that_was_made(run: Path, shards: Path) -> None:
    assert main(["evaluate", str(run), "--data", str(shards), "--baseline", "gzip"]) == 0
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "gzip -9, one stream" in page and "<svg" in page


def test_settings_come_from_file_then_names_then_flags(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "model: mamba-130m\nrecipe: careful\noptim:\n  beta1: 0.8\ntrain:\n  tokens: 500\n"
    )
    out = tmp_path / "b.yaml"
    flags = ["--recipe", "fast", "--optim.lr", "3e-4", "--model.tie-embeddings", "false", "--optim.clip", "null"]
    assert main(["train", str(tmp_path / "a.yaml"), *flags, "--write-config", str(out)]) == 0
    from mambakit.config import read_config, resolve

    config = resolve(read_config(out))
    assert (config.optim.lr, config.optim.beta1, config.optim.clip) == (3e-4, 0.8, None)
    assert (config.model.d_model, config.model.tie_embeddings) == (768, False)
    assert (config.train.steps, config.train.tokens) == (50_000, None)
    assert "vocab_size" not in read_config(out)["model"]


def test_text_is_prepared_once_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    corpus = make_corpus(tmp_path / "corpus", 20)
    words = ["train", "--data", str(corpus), "--data.tokenizer", "train:300", "--train.steps", "1", *TINY]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    assert "tokenizing" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "b")]) == 0
    assert "tokenizing" not in capsys.readouterr().err
    (corpus / "new.txt").write_text("more of it")
    assert main([*words, "--out", str(tmp_path / "c")]) == 0
    assert "tokenizing" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals")
@pytest.mark.parametrize("sent", [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")])
def test_a_signal_saves_says_how_to_go_on_and_ends_with_75(sent: signal.Signals, shards: Path, tmp_path: Path) -> None:
    config = settings(shards, train={"steps": 100_000, "eval_every": 0}, checkpoint={"every": 100_000})
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "mambakit", "train", str(tmp_path / "config.json"), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(sent)
    try:
        told = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 75
    assert f"stopped by {sent.name} at step" in told
    assert f"mambakit train --resume --out {out}" in told
    assert "Traceback" not in told
    steps = len(metrics(out))
    assert (out / f"checkpoints/step_{steps:08d}/manifest.json").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of Windows differ")
def test_training_goes_on_when_nobody_reads_what_it_says(shards: Path, tmp_path: Path) -> None:
    """As with `2>&1 | head -1`, or a tee that was killed."""
    (tmp_path / "config.json").write_text(json.dumps(settings(shards)))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "mambakit", "train", str(tmp_path / "config.json"), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert "mamba2" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert (out / "checkpoints/step_00000012/manifest.json").is_file()
    assert len([record for record in metrics(out) if record["type"] == "train"]) == 12


def test_nothing_is_imported_for_help_that_takes_long() -> None:
    code = "import sys; from mambakit.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "RUN", "--prompt", "a", "--temperature", "-1"], "temperature=-1.0: need a number of at least 0"),
        (["generate", "RUN", "--prompt", "a", "--top-p", "1.5"], "top_p=1.5"),
        (["generate", "RUN", "--prompt", "a", "--stop", ""], "holds an empty string"),
        (["generate", "RUN", "--prompt", "a", "--top-p", "0"], "top_p=0.0: need a number above 0 and at most 1"),
        (["generate", "--prompt", "a"], "a is taken for the model, and there is no text to go on from"),
        (["evaluate", "RUN"], "there is nothing to evaluate on; name a folder of shards or of text with --data"),
        (["evaluate", "RUN", "--data", "SHARDS", "--batch-rows", "0"], "batch_rows=0"),
        (["evaluate", "RUN", "--data", "SHARDS", "--max-tokens", "0"], "max_tokens=0"),
        (["train", "--data", "SHARDS", "--out", "FILE"], "FILE"),
        (["launch", "nothere.yaml"], "nothere.yaml does not exist"),
        (["launch", "x.yaml", "--container", ""], "--container is empty"),
        (["generate", "RUN", "--prompt", "a", "--seed", str(2**64)], "need a number from 0 to 2^63 - 1"),
        (["evaluate", "RUN", "--data", "SHARDS", "--window", str(10**20)], "need a number from 1 to 2^31"),
        (["plan", "--model", "mamba2-130m", "--tokens-per-second", "nan"], "--tokens-per-second nan: need more than 0"),
        (["train", "--data", "SHARDS", "--write-config", "no/such/x.yaml"], "no/such/x.yaml: No such file"),
        (["train", "--data", "SHARDS", "--out", "new", "--resume", "nothing"], "the checkpoint nothing does not exist"),
    ],
)
def test_more_mistakes_are_told_in_one_message(
    words: list[str], message: str, run: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    assert main([str(run) if word == "RUN" else str(shards) if word == "SHARDS" else word for word in words]) == 2
    told = capsys.readouterr()
    assert message in told.err and "Traceback" not in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_a_flag_given_again_adds_to_what_was_given(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.yaml"
    assert main(["train", "--data", "a", "b", "--train.steps", "1", "--data", "hf:c", "--write-config", str(out)]) == 0
    from mambakit.config import read_config

    assert read_config(out)["data"]["path"] == ["a", "b", "hf:c"]
    capsys.readouterr()
    words = ["--prompt", "the", "--prompt", "a dog", "--max-new-tokens", "1", "--json"]
    assert main(["generate", str(run), *words]) == 0
    assert [result["prompt"] for result in json.loads(capsys.readouterr().out)["results"]] == ["the", "a dog"]


def test_a_setting_of_two_numbers_takes_two_words(tmp_path: Path) -> None:
    words = ["--data", "a", "--model.kind", "mamba2", "--model.dt-limit", "0.01", "inf", "--train.steps", "1"]
    assert main(["train", *words, "--write-config", str(tmp_path / "a.yaml")]) == 0
    from mambakit.config import read_config

    assert read_config(tmp_path / "a.yaml")["model"]["dt_limit"] == [0.01, "inf"]


def test_a_config_is_written_once_whatever_the_ranks(tmp_path: Path) -> None:
    words = ["--data", "a", "--train.steps", "1", "--gpus", "2", "--write-config", str(tmp_path / "a.yaml")]
    assert main(["train", *words]) == 0 and (tmp_path / "a.yaml").exists()


def test_a_config_may_come_last(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train:\n  steps: 7\n")
    out = tmp_path / "b.yaml"
    assert main(["train", "--write-config", str(out), "--data", str(shards), str(tmp_path / "a.yaml")]) == 0
    from mambakit.config import read_config

    written = read_config(out)
    assert written["train"]["steps"] == 7 and written["data"]["path"] == [str(shards)]


def test_verify_survives_metrics_that_are_no_records(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copy = shutil.copytree(run, tmp_path / "run")
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b"17\n\xff\xfe\n")
    (copy / "best.json").write_text('{"step": null}')
    assert main(["verify", str(copy)]) == 2
    told = capsys.readouterr().out
    assert told.count("is no record of a step") == 2 and "best.json does not say which step is the best" in told
    assert main(["generate", str(copy), "--prompt", "the", "--max-new-tokens", "1"]) == 0
    told = capsys.readouterr().err
    assert "best.json does not say which step is the best" in told and "using step_00000012 instead" in told


def test_a_folder_of_text_with_an_index_of_its_own_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    corpus = make_corpus(tmp_path / "web", 10)
    (corpus / "index.json").write_text('{"pages": 10}')
    words = ["train", "--data", str(corpus), "--data.tokenizer", "bytes", "--train.steps", "1", *TINY]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
