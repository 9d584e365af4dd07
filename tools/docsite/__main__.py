"""`python tools/docsite OUT` builds the site in OUT/site."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
sys.path[0] = str(Path(__file__).parents[1])  # the folder of this package, not the package itself

from docsite.build import build

build(Path(sys.argv[1] if len(sys.argv) > 1 else "out/docs").resolve())
