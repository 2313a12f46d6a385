"""What broke under attack: stops at odd moments, folders that go away, damaged shards, small files that lie."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import make_corpus, metrics, settings, state_bytes

from mambakit.checkpoint import CheckpointError, native
from mambakit.cli import main
from mambakit.data.prepare import prepare, prepare_part
from mambakit.files import RunError, UserError
from mambakit.training import loop as loop_module
from mambakit.training.run import train
from mambakit.training.stopping import StopRequested
from mambakit.verify import verify


def test_a_stop_in_the_last_evaluation_leaves_the_same_checkpoint_in_the_end(
    shards: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(run: Any) -> None:
        if run.progress.step == 12:
            run.stopper.signal_name = "SIGTERM"
            raise StopRequested
        return original(run)

    original = loop_module._evaluate
    monkeypatch.setattr(loop_module, "_evaluate", stop)
    train(settings(shards), out=tmp_path / "run")
    monkeypatch.undo()
    train({}, out=tmp_path / "run", resume=True)
    states = [
        json.loads((run / "checkpoints/step_00000012/train/state.json").read_text())
        for run in (tmp_path / "run", finished)
    ]
    for state in states:
        del state["metrics_bytes"]  # rates in the records have more digits or fewer
    assert states[0] == states[1]
    assert state_bytes(tmp_path / "run", 12) == state_bytes(finished, 12)
    assert metrics(tmp_path / "run") == metrics(finished)
    assert json.loads((tmp_path / "run/best.json").read_text()) == json.loads((finished / "best.json").read_text())
    assert not list(verify(tmp_path / "run"))


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_while_a_checkpoint_is_replaced_loses_nothing(renames: int, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    folder = run / "checkpoints/step_00000012"
    shutil.copytree(folder, folder.with_name(".step_00000012.newer"))
    if renames == 2:
        folder.rename(folder.with_name(".step_00000012.older"))
    native.remove_abandoned(run)
    assert [path.name for path in sorted(folder.parent.iterdir())] == ["step_00000009", "step_00000012"]
    assert not list(verify(run))


def test_a_run_folder_that_goes_away_ends_the_run(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop_module.step

    def step(run: Any) -> None:
        if run.progress.step == 7:
            (tmp_path / "run").rename(tmp_path / "moved")
        original(run)

    monkeypatch.setattr(loop_module, "step", step)
    with pytest.raises(RunError, match="was moved or deleted while it was trained"):
        train(settings(shards), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert train({}, out=tmp_path / "moved", resume=True).step == 12


def test_steps_before_a_shard_that_breaks_are_saved(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shutil.copytree(shards, tmp_path / "data")
    original = loop_module.step

    def step(run: Any) -> None:
        if run.progress.step == 5:
            os.truncate(data / "train-00000.bin", 100)
        original(run)

    monkeypatch.setattr(loop_module, "step", step)
    with pytest.raises(UserError, match=r"train-00000\.bin"):
        train(
            settings(data, data={"workers": 0}, checkpoint={"every": 100}, train={"eval_every": 0}),
            out=tmp_path / "run",
        )
    assert native.step_of(native.checkpoints(tmp_path / "run")[0]) >= 5


BROKEN_INDEX: dict[str, Any] = {
    "vocabulary": lambda index: index.update(vocab_size=157),
    "huge vocabulary": lambda index: index.update(vocab_size=2**31),
    "end": lambda index: index.update(end_token=5),
    "end outside": lambda index: index.update(end_token=10**6),
    "documents": lambda index: index["counts"]["val"].update(documents=10**9),
    "bytes": lambda index: index["counts"]["train"].update(bytes=10**30),
    "source": lambda index: index.update(sources={"a": 3}),
    "tokens of a source": lambda index: index.update(sources={"a": {"tokens": {"train": "x"}}}),
    "markers of a source": lambda index: index.update(sources={"a": {"markers": {"x": 3}}}),
}


@pytest.mark.parametrize("name", BROKEN_INDEX)
def test_an_index_that_contradicts_itself_is_told(
    name: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(shards, tmp_path / "data")
    index = json.loads((data / "index.json").read_text())
    BROKEN_INDEX[name](index)
    (data / "index.json").write_text(json.dumps(index))
    words = ["train", "--data", str(data), "--out", str(tmp_path / "run"), "--train.steps", "1", "--model", "tiny"]
    assert main([*words, "--data.mix", "1"]) == 2
    told = capsys.readouterr().err
    assert "index.json" in told and "Traceback" not in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff"])
def test_a_tokenizer_that_is_not_the_shards_own_is_refused(
    data: bytes, shards: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(shards, tmp_path / "data")
    (copy / "tokenizer.json").write_bytes(data)
    words = ["train", "--data", str(copy), "--out", str(tmp_path / "run"), "--train.steps", "1", "--model", "tiny"]
    for command in (words, ["evaluate", str(finished), "--data", str(copy)]):
        assert main(command) == 2
        assert "tokenizer.json is not the file the index was made with" in capsys.readouterr().err


DAMAGE: dict[str, Any] = {
    "a token": ("*/train.bin", lambda data: data[:8] + b"\7\0\0\0" + data[12:]),
    "a count": ("*/task.json", lambda data: data.replace(b'"documents": ', b'"documents": 5')),
    "no report": ("*/task.json", lambda data: b"{}"),
    "the tokenizer": ("tokenizer-*.json", lambda data: b""),
    "fingerprints": ("prints-*.npy", lambda data: data[:50]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_work_that_was_damaged_is_done_again(name: str, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", num_files=6)
    options: dict[str, Any] = {"tokenizer": "train:300", "copies": "exact", "workers": 1}
    prepare([corpus], tmp_path / "expected", **options)
    prepare_part(0, 1, [corpus], tmp_path / "shards", **options)
    pattern, change = DAMAGE[name]
    (path,) = (tmp_path / ".shards.tasks").glob(pattern)
    path.write_bytes(change(path.read_bytes()))
    prepare([corpus], tmp_path / "shards", **options)
    for expected in (tmp_path / "expected").iterdir():
        assert (tmp_path / "shards" / expected.name).read_bytes() == expected.read_bytes(), expected.name


@pytest.mark.parametrize("file", ["index.json", "tokenizer.json", "train-00000.bin"])
def test_shards_of_the_cache_that_were_damaged_are_made_again(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    config = settings(make_corpus(tmp_path / "corpus"), data={"tokenizer": "bytes"}, train={"steps": 1})
    train(config, out=tmp_path / "a")
    (path,) = (tmp_path / "cache/shards").glob(f"*/{file}")
    path.write_bytes(path.read_bytes()[:-3])
    train(config, out=tmp_path / "b")
    assert "it is made again" in capsys.readouterr().err
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


SMALL: dict[str, tuple[str, Any]] = {
    "deep metrics": ("metrics.jsonl", lambda text: text + "[" * 200_000 + "\n"),
    "deep history": ("history.jsonl", lambda text: text + "[" * 200_000 + "\n"),
    "huge loss": ("best.json", lambda text: '{"step": 12, "loss": 1' + "0" * 400 + "}"),
    "huge step": ("best.json", lambda text: '{"step": 1' + "0" * 400 + ', "loss": 1.0}'),
    "long name": (
        "checkpoints/step_00000012/manifest.json",
        lambda text: text.replace("model.safetensors", "m" * 5000),
    ),
    "empty manifest": (
        "checkpoints/step_00000012/manifest.json",
        lambda text: json.dumps({**json.loads(text), "files": {}}),
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_files_that_lie_are_told_without_a_traceback(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    file, change = SMALL[name]
    (run / file).write_text(change((run / file).read_text()))
    assert main(["verify", str(run)]) == (0 if file == "history.jsonl" else 2)
    assert main(["generate", str(run), "--prompt", "the", "--max-new-tokens", "1"]) == 0
    assert main(["train", "--resume", "--out", str(run), "--train.steps", "14"]) == 0
    assert not list(verify(run))
    assert "Traceback" not in capsys.readouterr().err


def test_a_checkpoint_of_a_run_without_its_manifest_is_refused(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "checkpoints/step_00000012/manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        native.find(run / "checkpoints/step_00000012")


@pytest.mark.parametrize("command", ["verify", "report", "evaluate", "convert"])
def test_a_command_whose_output_is_closed_does_its_work(
    command: str, finished: Path, shards: Path, tmp_path: Path
) -> None:
    words = {"evaluate": f"--data {shards}", "convert": f"{tmp_path / 'out'} --to huggingface"}
    run = shutil.copytree(finished, tmp_path / "run")
    line = f"{sys.executable} -m mambakit {command} {run} {words.get(command, '')} >&-"
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals")
@pytest.mark.parametrize("seconds", [0.1, 0.25])
def test_ctrl_c_is_heard_while_modules_are_loaded(seconds: float, finished: Path) -> None:
    """Not in the first moment, when Python itself is starting."""
    code = (
        "import os, signal, sys, threading; from mambakit.__main__ import main; sys.argv = ['mambakit', 'verify', 'x'];"
        f"threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGINT)).start(); sys.exit(main())"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode in (130, 2), done.stderr  # 2, on a machine that has loaded all by then
    assert "Traceback" not in done.stderr and time.monotonic() - begin < 30
    assert done.returncode == 2 or "mambakit: interrupted" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals")
@pytest.mark.parametrize("module", ["numpy", "numpy._core", "numpy.linalg", "numpy.matrixlib", "torch", "torch._C"])
def test_ctrl_c_is_not_swallowed_while_a_module_is_imported(module: str, finished: Path) -> None:
    """torch imports numpy from C++, and forgets what that raises."""
    code = f"""
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))

sys.meta_path.insert(0, Finder())
sys.argv = ["mambakit", "verify", {str(finished)!r}]
from mambakit.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "mambakit: interrupted\n")


def test_a_name_in_a_manifest_does_not_reach_the_terminal_raw(finished: Path, tmp_path: Path) -> None:
    from helpers import on_terminal

    run = shutil.copytree(finished, tmp_path / "run")
    path = run / "checkpoints/step_00000012/manifest.json"
    path.write_text(path.read_text().replace("tokenizer.json", "a\\u001b]0;PWN\\u0007"))
    _, shown = on_terminal([sys.executable, "-m", "mambakit", "verify", str(run)])
    assert "PWN" in shown and "\x1b]0" not in shown


@pytest.mark.parametrize(
    "words", [["--train.epochs", "1e300"], ["--data.temperature", "1e-300"], ["--train.batch-tokens", "1e15"]]
)
def test_numbers_beyond_all_measure_are_mistakes(
    words: list[str], shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--data", str(shards), "--out", str(tmp_path / "run"), "--model", "tiny", *words]) == 2
    told = capsys.readouterr().err
    assert words[0].removeprefix("--").replace("-", "_") in told and "need" in told
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_it_was_made_of(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
    corpus = make_corpus(tmp_path / "corpus")
    tokenizer = finished / "checkpoints/step_00000012/tokenizer.json"
    config = {**settings(corpus, data={"tokenizer": str(tokenizer)}, train={"steps": 2}), "model": {}}
    train(config, out=tmp_path / "run", init_from=finished)
    line = json.loads((tmp_path / "run/history.jsonl").read_text())
    assert line["data"] == [str(corpus)] and line["init_from"].endswith("step_00000012")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match=f"are gone; name its data again with --data {corpus}"):
        train({"train": {"steps": 3}}, out=tmp_path / "run", resume=True)
    again = {"data": {"path": str(corpus)}, "train": {"steps": 3}}
    assert train(again, out=tmp_path / "run", resume=True).step == 3


@pytest.mark.parametrize("name", ["config.json", "history.jsonl"])
def test_a_run_that_was_killed_while_its_first_files_were_written_begins_again(
    name: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def replace_or_die(path: Path, target: Any) -> Path:
        if Path(target).name == name:
            raise Killed
        return replace(path, target)

    replace = Path.replace
    monkeypatch.setattr(Path, "replace", replace_or_die)
    with pytest.raises(Killed):
        train(settings(shards), out=tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setattr(os, "getpid", lambda: 1)  # another process
    assert train(settings(shards), out=tmp_path / "run", resume=True).step == 12
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_a_folder_with_files_of_a_persons_own_is_no_run(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/diary.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match="exists and is not empty; choose another --out"):
            train(settings(shards), out=tmp_path / "notes", resume=resume)
    assert os.listdir(tmp_path / "notes") == ["diary.txt"]


def test_what_mambakit_has_made_is_no_text(finished: Path, shards: Path, tmp_path: Path) -> None:
    place = tmp_path / "all"
    make_corpus(place, num_files=8)
    expected = prepare([place], tmp_path / "before", tokenizer="bytes")
    shutil.copytree(finished, place / "run")
    shutil.copytree(shards, place / "shards")
    shutil.copytree(finished / "checkpoints/step_00000012", place / "mine")
    found = prepare([place], tmp_path / "after", tokenizer="bytes")
    assert found.counts == expected.counts
    with pytest.raises(UserError, match="is a run of mambakit, and no text"):
        prepare([finished], tmp_path / "never", tokenizer="bytes")


EMPTY = [
    ["verify", ""], ["report", ""], ["generate", "", "--prompt", "a"], ["convert", "", "d", "--to", "native"],
    ["convert", "RUN", "", "--to", "native"], ["train", "", "--data", "SHARDS"], ["train", "--data", "SHARDS", "--out", ""],
    ["train", "--data", "SHARDS", "--model", ""], ["train", "--data", "SHARDS", "--init-from", ""],
    ["train", "--data", "SHARDS", "--write-config", ""], ["train", "--out", "RUN", "--resume", ""],
    ["evaluate", "RUN", "--data", "SHARDS", "--baseline", ""],
]  # fmt: skip


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_an_empty_name_is_a_mistake(
    words: list[str], finished: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """An unset variable of a shell must not mean the folder that one happens to be in."""
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "here"))
    places = {"RUN": str(finished), "SHARDS": str(shards)}
    assert main([places.get(word, word) for word in words]) == 2
    assert "is empty; give a name" in capsys.readouterr().err


def test_a_persons_files_are_not_written_over(
    finished: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("# mine\n")
    assert main(["train", "--data", str(shards), "--model", "tiny", "--write-config", str(mine)]) == 2
    assert main(["report", str(finished), "--out", str(mine)]) == 2
    assert mine.read_text() == "# mine\n" and capsys.readouterr().err.count("mine.yaml exists") == 2
    for _ in range(2):
        assert main(["report", str(finished), "--out", str(tmp_path / "report.html")]) == 0


def test_a_checkpoint_may_be_named_as_messages_name_it(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    assert main(["train", "--resume", "step_00000009", "--out", str(run)]) == 0
    assert state_bytes(run, 12) == state_bytes(finished, 12)


def test_a_mistake_leaves_no_folder(tmp_path: Path) -> None:
    assert main(["train", "--data", str(tmp_path / "shrads"), "--out", str(tmp_path / "deep/er/run")]) == 2
    assert os.listdir(tmp_path) == []
