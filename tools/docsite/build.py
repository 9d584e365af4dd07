"""Build the site: gather the pages, make those that are made, run the tutorials, call Sphinx, check every link.

    PYTHONPATH=tools python -m docsite OUT

OUT/site is the site: it opens from the file system and is published by copying the folder. OUT/source is what Sphinx
reads: the pages of docs/ as they are, the tutorials with what they print, and the pages that are made from the code.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

from docsite import api, mechanisms
from docsite.blocks import with_output
from docsite.links import broken
from docsite.navigation import toctrees

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TUTORIALS = "tutorials"
GALLERY = "<!-- gallery -->"  # where the first page shows all mechanisms


def build(out: Path) -> Path:
    """The folder of the site. Raises SystemExit with what is wrong."""
    source, site = out / "source", out / "site"
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
    gather(source)
    say("running the tutorials")
    for path in sorted((ROOT / "docs" / TUTORIALS).glob("*.md")):
        run_tutorial(path, source / TUTORIALS / path.name)
    say("making the pages of the mechanisms")
    mechanisms.write_all(source / "mechanisms", ROOT / "docs" / "results")
    write_reference(source / "api")
    finish_first_page(source / "index.md")
    (source / "linked.json").write_text(json.dumps(linked_names()))
    say("calling Sphinx")
    sphinx(source, site, out / "doctrees")
    wrong = list(broken(site))
    if wrong:
        raise SystemExit("\n".join(["broken links:", *wrong]))
    say(f"{len(list(site.rglob('*.html')))} pages, no broken link: {site / 'index.html'}")
    return site


def say(what: str) -> None:
    print(f"docs: {time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def gather(source: Path) -> None:
    """The pages as they are. Two pages of the project's root are part of the site, so links between them change."""
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("results"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        (source / name.lower()).write_text(re.sub(r"\]\(docs/", "](", text), encoding="utf-8")
    for path in source.rglob("*.md"):
        path.write_text(moved(path.read_text(encoding="utf-8")), encoding="utf-8")


def moved(text: str) -> str:
    """Links from docs/ to a page of the root lead to its place in the site."""
    root = r"\]\(((?:\.\./)*)\.\./(CONTRIBUTING|CHANGELOG)\.md"
    return re.sub(root, lambda found: f"]({found[1]}{found[2].lower()}.md", text)


def run_tutorial(path: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target.write_text(moved(with_output(path, Path(folder))), encoding="utf-8")


def write_reference(folder: Path) -> None:
    folder.mkdir()
    (folder / "index.md").write_text(api.index(), encoding="utf-8")
    for name in api.MODULES:
        (folder / f"{name}.md").write_text(api.page(name), encoding="utf-8")


def finish_first_page(path: Path) -> None:
    """The gallery and the navigation."""
    text = path.read_text(encoding="utf-8")
    files = {
        name: f"{name}-{mechanisms.directions(mechanisms.mechanism(name))[0]}.png" for name in mechanisms.available()
    }
    shown = mechanisms.thumbnails(list(files), {name: {file: ""} for name, file in files.items()}, "mechanisms/")
    path.write_text(f"{text.replace(GALLERY, shown)}\n{toctrees(path.parent)}", encoding="utf-8")


def linked_names() -> list[str]:
    """Mechanisms whose name in code means nothing else: no option and no value of an option is called so."""
    other = set()
    for name in mechanisms.available():
        for field in mechanisms.fields(mechanisms.mechanism(name).Options):
            other |= {field.name, *(value for kind in (field.type, *get_args(field.type)) for value in get_args(kind))}
            other |= {field.type, *get_args(field.type)}
    return [name for name in mechanisms.available() if name not in other]


def sphinx(source: Path, site: Path, doctrees: Path) -> None:
    """A warning is an error."""
    options = ["-W", "--keep-going", "-q", "-E", "-b", "html", "-c", str(HERE / "theme"), "-d", str(doctrees)]
    done = subprocess.run([sys.executable, "-m", "sphinx", *options, str(source), str(site)])
    if done.returncode:
        raise SystemExit(done.returncode)
