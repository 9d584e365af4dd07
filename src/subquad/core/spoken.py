"""Arguments as the caller writes them: `--resume` on the command line, `resume=True` in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_on_command_line: ContextVar[bool] = ContextVar("on the command line", default=False)


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Inside, messages speak of flags."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def argument(name: str) -> str:
    """--out, or `out`."""
    return f"--{name}" if _on_command_line.get() else f"`{name}`"


def given(name: str, value: object = True) -> str:
    """--resume or resume=True; --seeds 3 or seeds=3; of several texts --rates 3e-3,1e-3 or rates=[3e-3, 1e-3]."""
    if isinstance(value, tuple):
        value = ",".join(value) if _on_command_line.get() else f"[{', '.join(value)}]"
    if not _on_command_line.get():
        return f"{name}={value}"
    return f"--{name}" if value is True else f"--{name} {value}"


def again(what: str = "") -> str:
    """Run the same command again, or call it again, perhaps with one more argument (`resume`)."""
    again = "run the same command again" if _on_command_line.get() else "make the same call again"
    return again + (f" with {given(what)}" if what else "")
