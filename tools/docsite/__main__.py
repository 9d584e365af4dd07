"""`python -m docsite OUT` builds the site in OUT/site."""

import os
import sys
from pathlib import Path


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
    from docsite.build import build

    build(Path(sys.argv[1] if len(sys.argv) > 1 else "out/docs").resolve())


if __name__ == "__main__":
    main()
