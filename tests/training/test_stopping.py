"""Being told to stop, once and more than once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch

from mambakit.training import stopping
from mambakit.training.display import Display
from mambakit.training.stopping import Stopper, StopRequested

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals")


def test_signals_that_come_together_are_one_request() -> None:
    stopper = Stopper()
    stopper.check()
    with stopper.listening():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        with pytest.raises(StopRequested):
            stopper.check()
    assert stopper.signal_name == "SIGTERM"


def test_a_second_ctrl_c_by_a_person_who_waited_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SECONDS_BEFORE_FORCE", -1.0)
    stopper = Stopper()
    with stopper.listening():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler's, however late, cuts no save short
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_callers_own_handling_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stopper().listening():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1"])
def test_what_a_terminal_or_a_scheduler_sends_is_a_request_too(name: str) -> None:
    stopper = Stopper()
    with stopper.listening():
        os.kill(os.getpid(), getattr(signal, name))
        with pytest.raises(StopRequested):
            stopper.check()
    assert stopper.signal_name == name


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        stopper = Stopper()
        with stopper.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            stopper.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_answer_comes_while_one_long_call_computes() -> None:
    """Python itself handles the signal only after the call."""
    answers: list[tuple[str, float]] = []
    stopper = Stopper(lambda name: answers.append((name, time.monotonic())))
    size = 512
    while True:  # a product of at least two seconds
        left = torch.ones(size, size, dtype=torch.float64)
        begin = time.monotonic()
        torch.mm(left, left)
        if time.monotonic() - begin > 0.5 or size >= 8192:
            break
        size *= 2
    size = min(8192, size * 2)
    left = torch.ones(size, size, dtype=torch.float64)
    sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with stopper.listening():
        sender.start()
        torch.mm(left, left)
        done = time.monotonic()
        sender.join()
        with pytest.raises(StopRequested):
            stopper.check()
    assert [name for name, _ in answers] == ["SIGINT"]
    assert answers[0][1] < done - 0.2


def test_a_run_says_what_a_second_press_does(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(total_steps=10, first_step=0, log_every=1)
    display.stopping("SIGINT")
    assert "stopping after what is being computed, then saving. Ctrl-C again ends at once" in capsys.readouterr().err
    display.stopping("SIGTERM")
    assert "Ctrl-C" not in capsys.readouterr().err


def test_time_left_does_not_count_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    display = Display(total_steps=101, first_step=0, log_every=1000)
    record = {"type": "train", "lr": 1.0, "tokens_per_second": 1.0}
    now = 60.0  # compiling
    display.show({**record, "step": 1})
    assert display.time_left() is None
    now = 61.0
    display.show({**record, "step": 2})
    assert display.time_left() == pytest.approx(99.0)
