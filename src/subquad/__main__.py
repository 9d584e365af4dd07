"""The command `subquad`, also as `python -m subquad`."""

import os
import signal
import sys
from types import FrameType

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP threads wait for work
STOPPED = 130  # exit code after Ctrl-C


def main() -> None:
    """The entry point. Ctrl-C ends it with code 130, also while it is still importing.

    Threads of torch wait passively: spinning ones cost a factor of 3 to 10 on a machine with a busy neighbour.
    OpenMP reads its settings when torch is loaded, so this comes first.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from subquad.cli import app

        app(prog_name="subquad")
    except KeyboardInterrupt:
        stopped()
    except SystemExit as end:
        if end.code == STOPPED:
            stopped()
        raise


def stopped() -> None:
    """Exit after Ctrl-C. It may come twice, from the terminal and through a parent process: at the end of the
    interpreter nothing can catch the second one, so it is ignored.
    """
    if signal.getsignal(signal.SIGINT) is interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(STOPPED)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. Where an exception would be swallowed, the program ends at once: inside the import system, whose
    callbacks do so, and inside `__del__`.
    """
    if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        os._exit(STOPPED)
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
