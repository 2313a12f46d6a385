"""Trackers: what they get, that a resumed run shows each step once, and that none of them can stop a run."""

from __future__ import annotations

import errno
import importlib.machinery
import json
import os
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from runs import metrics, settings, state_bytes, wait_for

from mambakit.checkpoint import native
from mambakit.config import ConfigError, resolve
from mambakit.training import trackers, tracking
from mambakit.training.run import train, training_steps
from mambakit.training.trackers import LinkedCheckpoints, Note, Tracked, scalars
from mambakit.training.tracking import Place, last_step
from mambakit.verify import verify

Keep = Callable[[Note], None]


class Kept:
    """A tracker that keeps what it gets, and notes its name for the next time."""

    opened: list[tuple[Tracked, Note]]
    records: list[dict[str, Any]]

    def __init__(self, run: Tracked, note: Note, keep: Keep) -> None:
        self.opened.append((run, note))
        keep({"name": "kept"})
        self.begin, self.where = run.done, "here"

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Puts a tracker in TensorBoard's place, whether that is installed or not."""

    def put(tracker: Any) -> None:
        module = ModuleType("tensorboard")
        module.__spec__ = importlib.machinery.ModuleSpec("tensorboard", None, origin=__file__)
        monkeypatch.setitem(sys.modules, "tensorboard", module)
        monkeypatch.setitem(trackers.TRACKERS, "tensorboard", tracker)  # type: ignore[arg-type]

    return put


@pytest.fixture
def kept(use: Callable[[Any], None]) -> type[Kept]:
    kind = type("Kept", (Kept,), {"opened": [], "records": []})
    use(kind)
    return kind


def tracked_settings(shards: Path, to: str = "tensorboard", **sections: dict[str, Any]) -> dict[str, Any]:
    track = {"to": [to], "sample_every": 6, "sample_tokens": 4}
    return settings(shards, **{"track": track, "checkpoint": {"keep_best": False}, **sections})


def file_of(run: Path) -> list[dict[str, Any]]:
    return metrics(run, drop=())


def killed(shards: Path, folder: Path, to: str, at_step: int, **sections: dict[str, Any]) -> Path:
    """A run as it is on disk after a kill: its tracker has all records, and its last checkpoint is some steps older."""
    note = folder / "run" / "tracked" / f"{to}.json"
    config = tracked_settings(shards, to, **sections)
    config["checkpoint"]["background"] = False  # nothing in the folder changes while it is copied
    steps = training_steps(config, out=folder / "run")
    for record in steps:
        if record["type"] == "train" and record["step"] == at_step:
            break
    size = (folder / "run" / "metrics.jsonl").stat().st_size
    wait_for(lambda: note.is_file() and json.loads(note.read_text()).get("bytes", 0) >= size)
    shutil.copytree(folder / "run", folder / "killed")
    steps.close()
    return folder / "killed"


@pytest.fixture
def notes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_NOTES", 0.0)
    monkeypatch.setattr(tracking, "RESTS", 0)


def test_a_tracker_gets_every_record_and_the_training_is_the_same(
    shards: Path, finished: Path, tmp_path: Path, kept: type[Kept]
) -> None:
    train(tracked_settings(shards), out=tmp_path / "run", quiet=True)
    assert kept.records == file_of(tmp_path / "run")
    assert {record["type"] for record in kept.records} == {"train", "eval", "sample"}
    assert state_bytes(tmp_path / "run", 12) == state_bytes(finished, 12)
    run, note = kept.opened[0]
    assert (run.name, run.project, run.done, run.step, note) == ("run", "mambakit", 0, 0, {"bytes": 0})


def test_what_a_tracker_has_beyond_the_checkpoint_is_told_again(
    shards: Path, tmp_path: Path, kept: type[Kept], notes_at_once: None
) -> None:
    """Killed after step 8, with a checkpoint of step 6, whose evaluations belong to it or not."""
    run = killed(shards, tmp_path, "tensorboard", 8)
    kept.records.clear()
    train({}, out=run, resume=True, quiet=True)
    about, note = kept.opened[-1]
    assert about.step == 6 and note == {"name": "kept", "bytes": about.done}
    assert kept.records == [record for record in file_of(run) if record["step"] >= 6]


def test_a_tracker_that_is_added_on_resume_gets_the_steps_before(
    shards: Path, finished: Path, tmp_path: Path, kept: type[Kept]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    train({"track": {"to": ["tensorboard"]}, "train": {"steps": 14}}, out=run, resume=True, quiet=True)
    assert kept.records == file_of(run) and kept.records[-1]["step"] == 14


def test_a_complete_run_opens_no_tracker_again(shards: Path, tmp_path: Path, kept: type[Kept]) -> None:
    for _ in range(2):
        train(tracked_settings(shards), out=tmp_path / "run", resume=True, quiet=True)
    assert len(kept.opened) == 1


@pytest.mark.parametrize("when", ["__init__", "write", "flush", "close"])
def test_a_tracker_that_fails_is_dropped_and_told_once(
    when: str,
    shards: Path,
    finished: Path,
    tmp_path: Path,
    use: Callable[[Any], None],
    capsys: pytest.CaptureFixture[str],
    notes_at_once: None,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the server is gone\nsecond line")

    use(type("Failing", (Kept,), {"opened": [], "records": [], when: fail}))
    result = train(tracked_settings(shards), out=tmp_path / "run")
    assert result.step == 12 and metrics(tmp_path / "run") == metrics(finished)
    told = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert told == [
        "tensorboard failed and gets no more records; metrics.jsonl has all of them (RuntimeError: the server is gone)"
    ]


@pytest.mark.parametrize("when", ["__init__", "write", "close"])
def test_a_tracker_that_blocks_forever_is_left_behind(
    when: str,
    shards: Path,
    finished: Path,
    tmp_path: Path,
    use: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    release = threading.Event()

    def block(*_: Any) -> None:
        release.wait()

    use(type("Blocking", (Kept,), {"opened": [], "records": [], when: block}))
    monkeypatch.setattr(tracking, "SECONDS_AT_END", 0.5)
    try:
        result = train(tracked_settings(shards), out=tmp_path / "run")
    finally:
        release.set()
    assert result.step == 12 and metrics(tmp_path / "run") == metrics(finished)
    assert "tensorboard did not take all records in time; metrics.jsonl has them" in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_made(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"track.to names trackio, which is not installed: pip install '.*\[trackio\]'"
    ):
        train(tracked_settings(shards, "trackio"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_the_name_of_a_tracker_is_not_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B makes a folder `wandb` where a program runs."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="not installed"):
        trackers.check_installed(("wandb",))


def test_trackers_are_named_once_and_by_their_names() -> None:
    assert resolve({"track": {"to": "wandb"}}).track.to == ("wandb",)
    with pytest.raises(ConfigError, match=r"track.to.0='tensorbord': need 'tensorboard', 'wandb' or 'trackio'"):
        resolve({"track": {"to": ["tensorbord"]}})
    with pytest.raises(ConfigError, match="names a tracker twice"):
        resolve({"track": {"to": ["wandb", "wandb"]}})


def test_figures_that_are_not_known_are_left_out() -> None:
    record = {"type": "train", "step": 3, "loss": None, "lr": 0.1, "tokens": 7}
    assert scalars(record) == {"train/lr": 0.1, "train/tokens": 7}


@pytest.mark.parametrize("block", [1, 7, 50, 2**16])
def test_the_records_of_the_last_step_are_found_from_the_end(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "BLOCK", block)
    lines = [json.dumps({"step": step, "text": "x" * 20}) + "\n" for step in (1, 2, 2, 2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    size = len(lines[0])
    assert [last_step(path, size * count) for count in range(6)] == [
        Place(0, 0), Place(0, 1), Place(size, 2), Place(size, 2), Place(size, 2), Place(4 * size, 3),
    ]  # fmt: skip


def test_tensorboard_shows_each_step_once_after_a_kill_and_a_resume(
    shards: Path, tmp_path: Path, notes_at_once: None
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = killed(shards, tmp_path, "tensorboard", 8)
    train({"optim": {"lr": 5e-3}}, out=run, resume=True, quiet=True)  # so that steps computed again have other losses
    shown = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    for name in ("loss", "lr", "bits_per_byte", "grad_norm", "tokens_per_second", "mfu", "data_wait_seconds"):
        expected = [(r["step"], r[name]) for r in file_of(run) if r["type"] == "train"]
        found = [(event.step, event.value) for event in shown.Scalars(f"train/{name}")]
        assert found == [(step, pytest.approx(value)) for step, value in expected]
    assert [event.step for event in shown.Scalars("eval/loss")] == [4, 8, 12]
    texts = {event.step: event.tensor_proto.string_val[0].decode() for event in shown.Tensors("samples/1/text_summary")}
    samples = [record for record in file_of(run) if record["type"] == "sample"]
    for sample in samples[::2]:
        assert texts[sample["step"]].split() == (sample["prompt"] + sample["text"]).split()
    assert "lr: 0.005" in shown.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a file of W&B: its own messages in LevelDB's log format, after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, whole = path.read_bytes(), b""
    assert data[:4] == b":W&B"
    at = 7
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:  # the end of a block holds no header
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B without a key, which writes to no folder of the person's."""
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def test_a_wandb_folder_is_complete_after_a_kill_and_a_resume_and_has_one_id(
    shards: Path, tmp_path: Path, offline: None, notes_at_once: None
) -> None:
    run = killed(shards, tmp_path, "wandb", 8)
    first = next((run / "wandb").glob("offline-run-*"))
    train({}, out=run, resume=True, quiet=True)
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert folder != first and [path.name for path in (run / "set-aside" / "wandb").iterdir()] == [first.name]
    number = json.loads((run / "tracked" / "wandb.json").read_text())["id"]
    records = list(wandb_records(folder / f"run-{number}.wandb"))
    about = next(record.run for record in records if record.HasField("run"))
    assert (about.run_id, about.project, about.display_name) == (number, "mambakit", "killed")
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["optim"]["lr"] == 1e-2
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [row["_step"] for row in rows] == list(range(1, 13))
    written = [(record["step"], record["loss"]) for record in file_of(run) if record["type"] == "train"]
    assert [(row["_step"], row["train/loss"]) for row in rows] == written
    assert [row["_step"] for row in rows if "eval/loss" in row] == [4, 8, 12]
    pages = [folder / "files" / row["samples/1/path"] for row in rows if "samples/1/path" in row]
    assert len(pages) == 2 and all(page.read_text(encoding="utf-8").startswith("<pre>") for page in pages)
    assert any(record.HasField("exit") for record in records)


def test_an_offline_folder_has_the_checkpoints_as_artifacts_after_a_kill_and_a_resume(
    shards: Path, tmp_path: Path, offline: None, notes_at_once: None
) -> None:
    track = {"to": ["wandb"], "artifacts": True, "sample_every": 0}
    run = killed(shards, tmp_path, "wandb", 8, track=track, checkpoint={"keep_last": 9, "keep_best": False})
    stale = shutil.copytree(native.folder_of(run, 6), run / "wandb/checkpoints/step_00000008")
    train({}, out=run, resume=True, quiet=True)
    assert not stale.exists()
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    logged = [record.artifact for record in wandb_records(file) if record.HasField("artifact")]
    number = json.loads((run / "tracked" / "wandb.json").read_text())["id"]
    assert {(each.name, each.type, each.run_id) for each in logged} == {(f"checkpoint-{number}", "model", number)}
    assert [json.loads(each.metadata)["step"] for each in logged] == [3, 6, 9, 12]
    assert set(logged[-1].aliases) == {"latest", "step-12", "best"}
    for artifact, step in zip(logged, (3, 6, 9, 12), strict=True):
        folder = native.folder_of(run, step)
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        assert files.keys() == {entry.path for entry in artifact.manifest.contents}
        for entry in artifact.manifest.contents:
            assert Path(entry.local_path).read_bytes() == files[entry.path].read_bytes()
    assert not list(verify(run))


@pytest.mark.parametrize("has_links", [True, False])
def test_a_checkpoint_that_is_given_as_an_artifact_outlives_the_run_s_own(
    has_links: bool, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    run = shutil.copytree(finished, tmp_path / "run")
    steps = sorted(native.step_of(folder) for folder in native.checkpoints(run))
    linked = LinkedCheckpoints(run, 0)
    first = list(linked.new())
    assert [native.step_of(folder) for folder in first] == steps and not list(linked.new())
    shutil.rmtree(native.folder_of(run, steps[0]))
    assert all(not list(native.verify(folder)) for folder in first)
    weights = [folder / "model.safetensors" for folder in (first[-1], native.folder_of(run, steps[-1]))]
    assert weights[0].samefile(weights[1]) == has_links
    for folder in first:
        (folder / "before").touch()
    again = list(LinkedCheckpoints(run, steps[-1]).new())  # a resumed run: that of the last step may be another
    assert [native.step_of(folder) for folder in again if (folder / "before").exists()] == steps[:-1]
    assert [native.step_of(folder) for folder in again] == steps


def test_a_checkpoint_that_is_deleted_while_it_is_linked_is_left_out(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    oldest = native.checkpoints(run)[-1]

    def delete_first(source: str, *rest: Any) -> None:
        if oldest.exists():
            shutil.rmtree(oldest)
        link(source, *rest)

    link = os.link
    monkeypatch.setattr(os, "link", delete_first)
    found = [folder.name for folder in LinkedCheckpoints(run, 0).new()]
    assert found == [folder.name for folder in reversed(native.checkpoints(run))] and oldest.name not in found
    assert sorted(path.name for path in (run / "wandb/checkpoints").iterdir()) == found


def test_artifacts_are_for_wandb() -> None:
    with pytest.raises(
        ConfigError, match="track.artifacts=true gives checkpoints to W&B, which track.to does not name"
    ):
        resolve({"track": {"to": ["tensorboard"], "artifacts": True}})


def test_trackio_has_each_step_once_after_a_kill_and_a_resume(
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    notes_at_once: None,
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    run = killed(shards, tmp_path, "trackio", 8)
    train({}, out=run, resume=True, quiet=True)
    number = json.loads((run / "tracked" / "trackio.json").read_text())["id"]
    found = {each.id: each for each in Api().runs("mambakit")}
    assert len(found) == 1 and found[number].config["optim"]["lr"] == 1e-2
    rows = SQLiteStorage.get_logs("mambakit", "killed", run_id=number)
    written = [(record["step"], record["loss"]) for record in file_of(run) if record["type"] == "train"]
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == written
    assert capsys.readouterr().out == ""  # which is for programs
