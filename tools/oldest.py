"""Constraints that hold every dependency at the lowest version that pyproject.toml allows: for `make test-oldest`."""

from __future__ import annotations

import re
from pathlib import Path


def lowest(text: str) -> list[str]:
    """Of the requirements in the text of pyproject.toml: `name>=1.2` → `name==1.2`."""
    project = text.split("[project]")[1].split("[project.scripts]")[0]
    return sorted({f"{name}=={version}" for name, version in re.findall(r'"([\w.-]+)>=([\w.]+)"', project)})


if __name__ == "__main__":
    print("\n".join(lowest((Path(__file__).parents[1] / "pyproject.toml").read_text())))
