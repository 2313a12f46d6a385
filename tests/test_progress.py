"""What is said to a person never steers their terminal, and never ends the work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import on_terminal
from runs import make_shards, settings

from mambakit.config import write_yaml
from mambakit.progress import printable

pty = pytest.importorskip("pty")  # not on Windows

HOSTILE = "run\x1b]0;title\x07\x1b[2J\x9b31m\r\x00\x7f[/b] [red]name"
SHOWN = "run�]0;title��[2J�31m���[/b] [red]name"
WORK = """
import sys
from mambakit.progress import console, progress, say
sys.stdin.readline()  # whoever reads standard error is gone by now
for _ in range(3):
    say("a line " * 2000)
with progress("working", 10, "steps") as advance:
    for _ in range(10):
        advance(1)
console().print("more", "x" * 10000)
print("done")
"""


def _start(code: str, stderr: int, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **pipes, **options)  # type: ignore[call-overload, no-any-return]


def _on_terminal(code: str) -> str:
    status, seen = on_terminal([sys.executable, "-c", code])
    assert status == 0, seen
    return seen


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, SHOWN),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("a\r\nb", "a\nb"),
        ("naïve 🐭", "naïve 🐭"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_say_does_not_steer_the_terminal() -> None:
    seen = _on_terminal(f"from mambakit.progress import say; say({HOSTILE!r})")
    assert seen == SHOWN + "\r\n"


def test_a_bar_takes_any_name() -> None:
    """Neither as codes for the terminal nor as rich's own markup."""
    seen = _on_terminal(f"""
from mambakit.progress import console, progress, say
with progress({HOSTILE!r}, 2, "steps") as advance:
    say({HOSTILE!r})
    advance(2)
console().print({HOSTILE!r}, markup=False)
""")
    assert "\x1b]0;" not in seen and "\x1b[2J" not in seen and "\x9b" not in seen and "\x07" not in seen
    assert seen.count("[red]name") >= 3 and "100%" in seen
    assert "\x1b[" in seen  # the bar has codes of its own


@pytest.mark.parametrize("reader", ["pipe", "terminal"])
def test_work_goes_on_when_nobody_reads_any_more(reader: str) -> None:
    ours, theirs = os.pipe() if reader == "pipe" else pty.openpty()
    with _start(WORK, theirs) as process:
        os.close(theirs)
        os.close(ours)
        stdout, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, stdout) == (0, "done\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_work_goes_on_when_the_log_is_full() -> None:
    with Path("/dev/full").open("w") as full, _start(WORK, full.fileno()) as process:
        stdout, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, stdout) == (0, "done\n")


@pytest.mark.parametrize("closing", ["sys.stderr.close()", "sys.stderr = None"])
def test_work_goes_on_without_standard_error(closing: str) -> None:
    with _start(f"import sys; {closing}\n{WORK}", subprocess.DEVNULL) as process:
        stdout, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, stdout) == (0, "done\n")


def test_a_run_whose_log_reader_is_killed_trains_to_its_end(tmp_path: Path) -> None:
    """As `mambakit train … 2>&1 | tee log`, and tee is killed."""
    from mambakit.config import resolve

    config = tmp_path / "run.yaml"
    config.write_text(write_yaml(resolve(settings(make_shards(tmp_path)))))
    command = [sys.executable, "-m", "mambakit", "train", str(config), "--out", str(tmp_path / "run")]
    ours, theirs = os.pipe()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        assert os.read(ours, 1)  # it has begun
        os.close(ours)
        assert process.wait(timeout=300) == 0
    assert (tmp_path / "run/checkpoints/step_00000012/manifest.json").is_file()
