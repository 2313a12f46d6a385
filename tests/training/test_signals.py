"""Signals from the first moment of a command to its last: it ends in time, with a status that says it can go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import make_corpus, settings

from mambakit import signals
from mambakit.training import loop as loop_module
from mambakit.training.run import train
from mambakit.verify import verify

from .signal_campaign import Campaign

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads from /proc when a process listens")
SIGNALS = int(os.environ.get("MAMBAKIT_TEST_SIGNALS", "5"))


def test_signals_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "campaign", seed=SIGNALS)
    campaign.go(SIGNALS)
    assert len(campaign.stops) >= SIGNALS


_STUCK = """
import hashlib, sys
sys.argv = ["mambakit", *sys.argv[2:]]
from mambakit import __main__, signals
signals.GRACE_SECONDS = 1.0

def stuck(*args, **kwargs):
    sys.stderr.write("stuck\\n")
    sys.stderr.flush()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes, in which Python handles no signal

def patch():
    import mambakit.data.tokenize as tokenize, mambakit.training.loop as loop, mambakit.training.run as run
    {"tokenizer": lambda: setattr(tokenize, "train_tokenizer", stuck),
     "first step": lambda: setattr(loop, "_accumulate", stuck),
     "model": lambda: setattr(run, "build", stuck)}[PLACE]()

PLACE = "%s"
patch()
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("place", ["tokenizer", "model", "first step"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_inside_one_long_call_ends_in_time(place: str, number: int, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    config = settings(corpus, data={"tokenizer": "train:300"}, train={"steps": 2}, checkpoint={"every": 1})
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["train", str(tmp_path / "config.json"), "--out", str(tmp_path / "run"), "--resume"]
    env = {**os.environ, "MAMBAKIT_CACHE": str(tmp_path / "cache")}
    line = [sys.executable, "-c", _STUCK % place, "", *words]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        said = ""
        while "stuck" not in said:
            said += process.stderr.readline() or pytest.fail(said)
        time.sleep(0.5)  # until it is inside the call
        begin = time.monotonic()
        process.send_signal(number)
        said += process.communicate(timeout=60)[1]
        assert (process.returncode, "Traceback" in said) == (75, False), said
        assert time.monotonic() - begin < 30
        assert f"mambakit: stopped by {signal.Signals(number).name}; the same command" in said
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAMBAKIT_CACHE", str(tmp_path / "cache"))
        assert train(config, out=tmp_path / "run", resume=True).step == 2
    assert not list(verify(tmp_path / "run"))


_TOLD_AT_ITS_END = """
import os, signal, sys
from mambakit import __main__
from mambakit.data import prepare
from mambakit.cli import commands
place, sys.argv = sys.argv[1], ["mambakit", *sys.argv[2:]]
home = {"_put_together": prepare, "remove": prepare, "_print_index": commands}[place]
original = getattr(home, place)

def told(*given):
    found = original(*given)
    os.kill(os.getpid(), signal.SIGTERM)
    return found

setattr(home, place, told)
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("place", ["_put_together", "remove", "_print_index"])
def test_prepare_that_is_told_to_stop_when_its_work_is_done_has_done_it(place: str, tmp_path: Path) -> None:
    """When the shards have their name, status 75 would start the same command again, which then finds them there."""
    corpus, out = make_corpus(tmp_path / "corpus"), tmp_path / "shards"
    line = [
        sys.executable,
        "-c",
        _TOLD_AT_ITS_END,
        place,
        "prepare",
        str(corpus),
        "--out",
        str(out),
        "--tokenizer",
        "bytes",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == (75 if place == "_put_together" else 0), done.stderr
    assert out.exists() == (place != "_put_together")
    if out.exists():
        assert f"written to {out}" in done.stdout and not list(verify(out))
        assert {path.name for path in tmp_path.iterdir()} == {"corpus", "shards"}


def test_a_sample_is_interrupted_between_two_tokens(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def generate(*args: Any, **kwargs: Any) -> Iterator[tuple[int, str]]:
        for number in range(1000):
            written.append(number)
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield 0, "a"

    monkeypatch.setattr(loop_module, "generate_text", generate)
    result = train(settings(shards, train={"eval_every": 100}), out=tmp_path / "run")
    assert (result.stopped_by, result.step) == ("SIGTERM", 6)
    assert len(written) < 10


def test_a_program_of_a_persons_own_is_not_ended() -> None:
    assert signals.first() is None
    signals.end_process("SIGTERM")
