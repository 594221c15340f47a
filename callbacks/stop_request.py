"""A request to stop, remembered until the running iteration is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType

from lightning.pytorch.utilities.exceptions import SIGTERMException


class StopRequest:
    """Takes signals in the place of Lightning's handlers, which enter a collective in the middle of whatever this rank is
    doing. A second Ctrl-C interrupts at once.

    Args:
        signals: which ones.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals
        self.received = 0
        """Number of the signal, 0 = none."""

    def listen(self) -> None:
        """From now on, until the Trainer's teardown puts back the handlers of before. Only a main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        again = "; Ctrl-C once more to stop at once" if number == signal.SIGINT else ""
        print(f"\n{signal.Signals(number).name}: stopping after this iteration{again}", flush=True)


def stop(number: int) -> None:
    """End the run as the signal of this number would have. Errors: ``KeyboardInterrupt``, or ``SystemExit`` with the shell's
    status of a process that the signal ended."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SIGTERMException(128 + number)
