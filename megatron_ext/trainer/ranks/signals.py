"""A run that is asked to stop: signals, noted until all ranks can stop at the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""They ask a run to stop: schedulers end jobs with the first, a terminal sends the second, and
Slurm can send the third some time before a job's limit."""

_IMPATIENT = {signal.SIGTERM, signal.SIGINT}

STOPS_SOON = "{}: the run ends after this step; a second SIGINT or SIGTERM ends it at once\n"
"""Message of a launcher that has passed on a signal to its ranks: their step may take minutes."""

ENDED_AT_ONCE = "ended at once by {}; nothing more was saved\n"
"""Message about a run that a signal ended in the middle of a step, or before the first."""


def exit_status(stop: signal.Signals) -> int:
    """Return the exit status of a program that a signal ended, as shells report it."""
    return 128 + stop


def ends_at_once(noted: Sequence[signal.Signals]) -> bool:
    """Return whether the run ends in the middle of a step, as it was asked to end twice.

    A scheduler's early notice does not count: it leaves time.
    """
    return sum(each in _IMPATIENT for each in noted) > 1


def heed(act: Callable[[signal.Signals], None]) -> None:
    """Have a thread act on the signals that ask to stop, but those that this process ignores.

    Python's own handlers wait for the main thread, which may be in a wait of C++ for minutes. The
    main thread calls this, once in a process.
    """
    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    come, note = os.pipe()
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note)
    for each in heard:
        signal.signal(each, lambda *_: None)

    def watch() -> None:
        while numbers := os.read(come, 1):
            if numbers[0] in heard:  # Others, as torch's, have handlers of their own.
                act(signal.Signals(numbers[0]))

    threading.Thread(target=watch, name="signals", daemon=True).start()


class Stopped(SystemExit):
    """A rank leaves because its run was asked to stop; all its ranks leave after the same step."""

    def __init__(self, stop: signal.Signals, step: int, saved: Path | None) -> None:
        super().__init__(exit_status(stop))
        outcome = f"saved {saved}" if saved else "nothing was saved"
        self.said = f"stopped by {stop.name} after step {step}: {outcome}"


class StopRequest:
    """Notes the signals that ask a rank to stop, and learns whether any rank was asked.

    The ranks learn it together, from a sum that they make in each step anyway.
    """

    agreed: signal.Signals | None = None
    """The signal after which all ranks stop, once they know of it."""

    def __init__(self) -> None:
        self._asked = dict.fromkeys(STOP_SIGNALS, False)

    def listen(self) -> None:
        """Note signals from now to the end of this process, but those that it ignores."""
        for each in STOP_SIGNALS:
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def votes(self) -> list[float]:
        """Return for each signal whether this rank was asked, as numbers to sum over ranks."""
        return [float(asked) for asked in self._asked.values()]

    def decide(self, votes: Sequence[float]) -> None:
        """Take the sums of all ranks' votes; the same on all ranks."""
        given = (each for each, asked in zip(STOP_SIGNALS, votes, strict=True) if asked)
        self.agreed = next(given, None)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._asked[signal.Signals(number)] = True


def nothing_to_stop() -> None:
    """Ignore the signals from now on: this rank has done its work, and only leaves."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def can_be_told(pid: int) -> bool:
    """Return whether a signal that asks to stop does no harm to a rank that this process started.

    The rank notes signals (`StopRequest.listen`), or has done its work (`nothing_to_stop`), or has
    ended. Python by itself catches no SIGTERM.
    """
    # Ranks inherit what their launcher ignores.
    inherited = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    masks = ("SigCgt",) if inherited else ("SigCgt", "SigIgn")
    return not Path(f"/proc/{pid}").exists() or any(
        _has(pid, mask, signal.SIGTERM) for mask in masks
    )


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of a signal; False if it has ended."""
    return _has(pid, "SigCgt", number)


def _has(pid: int, mask: str, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    line = next((each for each in status.splitlines() if each.startswith(f"{mask}:")), "none 0")
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
