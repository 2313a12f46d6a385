"""Being told to stop, once and more than once."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from mambakit.training import stopping
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
