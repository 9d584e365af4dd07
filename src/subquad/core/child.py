"""Python in a process of its own that imports nothing from the working folder.

`python -m module` puts the working folder first on the path, so that a file of the user's called accelerate.py would be
executed in place of the library. `-P` and PYTHONSAFEPATH exist from Python 3.11 on only, and `-I` forgets PYTHONPATH.
"""

from __future__ import annotations

import os
import sys

IMPORTS = "SUBQUAD_IMPORT"  # modules that processes of ours import first, comma-separated
TOLD = "SUBQUAD_TOLD"  # a folder in which processes of ours note what one of them has told the user
AGAIN = "SUBQUAD_AGAIN"  # how what has started a process of ours is resumed, in words
LINES = "SUBQUAD_LINES"  # set: progress is printed in lines, because processes of ours share the terminal

# Before the path is clean only modules are imported that were loaded when the interpreter started. What comes before
# the standard library is the working folder and PYTHONPATH, in which an empty item means the working folder too.
_ENTRY = """\
import os, sys
named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
here, library = os.path.realpath(os.getcwd()), os.path.dirname(os.__file__)
before = sys.path.index(library) if library in sys.path else len(sys.path)
sys.path[:before] = [path for path in sys.path[:before] if path and (os.path.realpath(path) != here or path in named)]
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def first_to_tell(what: str) -> bool:
    """Whether none of the processes that were started together has told it yet; this one tells it now."""
    folder = os.environ.get(TOLD)
    if not folder:
        return True
    try:
        os.close(os.open(os.path.join(folder, what), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:  # the folder is gone
        pass
    return True


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module as `python -m` does, without the working folder on its path."""
    return [sys.executable, "-c", _ENTRY, module, *arguments]


def paths(*, working_folder: bool) -> str:
    """This process's path, for PYTHONPATH of a child: with the working folder last, or without it."""
    here = os.path.realpath(os.getcwd())
    named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in sys.path if path and (os.path.realpath(path) != here or path in named)]
    return os.pathsep.join([*others, here] if working_folder else others)
