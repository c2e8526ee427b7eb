"""SIGTERM and Ctrl-C: leave a resumable state, whatever the run is doing."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, NoReturn


class Stopped(BaseException):
    """Raised where nothing needs saving; carries the signal.

    Not an `Exception`, so that no handler for errors swallows it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + signal."""
        return 128 + self.signum


class StopRequest:
    """Context manager that listens for SIGTERM and SIGINT.

    Before `guard` a signal raises `Stopped` at once. After it, when state must not be torn, it only
    sets `signum`; the loop asks `requested` at its seams. A second Ctrl-C raises anyway.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._guarded = False
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signum is not None

    def guard(self) -> None:
        """From here on signals wait to be asked for."""
        self._guarded = True

    def leave(self) -> NoReturn:
        """Raise `Stopped` for the signal that has come."""
        assert self.signum is not None
        raise Stopped(self.signum)

    def __enter__(self) -> StopRequest:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        again = self.signum is not None and signum == signal.SIGINT
        self.signum = signum
        if again or not self._guarded:
            raise Stopped(signum)
