"""Where commands print: results to stdout, progress and errors to stderr.

Texts are printed as they are: a path such as z[/b] is no markup.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.text import Text

WIDE = 120  # columns of a table that goes to a file or a pipe


def out() -> Console:
    """The console for results; made anew, so that a redirected stdout is honoured."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=WIDE if piped else None, highlight=False, markup=False, emoji=False)


def err() -> Console:
    """The console for progress and errors."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def complain(message: str) -> int:
    """One red line on stderr; returns the exit code of a wrong request."""
    line = " ".join(message.split())
    err().print(Text(f"error: {line}", style="bold red"), soft_wrap=True)
    return 2
