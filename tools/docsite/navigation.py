"""The order of the pages in the navigation. A page that does not exist yet is left out, a page that is not named here
stands under "More": nothing of docs/ is ever missing.
"""

from __future__ import annotations

from pathlib import Path

ORDER = {
    "Tutorials": (
        "tutorials/swap", "tutorials/compare", "tutorials/convert", "tutorials/stream", "tutorials/prove",
        "tutorials/write", "tutorials/processes",
    ),
    "Choose": ("mechanisms/index", "explorer", "advise", "performance"),
    "Mechanisms": ("patterns", "combiner", "composite-slice", "sbm", "baselines"),
    "Use": ("models", "conversion", "streaming", "training", "tasks", "distributed", "gpu"),
    "Understand": ("theory", "experiments"),
    "Reference": ("api/index", "contributing", "changelog"),
}  # fmt: skip
OWN = {"index"}  # the first page, which has the navigation


def toctrees(source: Path) -> str:
    """The navigation of the pages in `source`, as hidden toctrees."""
    there = {str(path.relative_to(source).with_suffix("")) for path in source.rglob("*.md")}
    sections = {title: [name for name in names if name in there] for title, names in ORDER.items()}
    placed = {name for names in sections.values() for name in names} | OWN
    inside = {name for name in there if Path(name).parts[0] in ("mechanisms", "api")}  # their index has them
    sections["More"] = sorted(there - placed - inside)
    return "\n".join(_toctree(title, names) for title, names in sections.items() if names)


def _toctree(title: str, names: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```", ""])
