"""Every link of the built site leads somewhere: to a file that is there and to an anchor that is in it. Addresses on
the network are only checked for their form, and nothing that a page needs to be shown may come from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
WITHOUT_EFFECT = {"canonical", "author", "index", "search", "next", "prev"}  # links that load nothing


class Page(HTMLParser):
    """The anchors and the links of one file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, bool]] = []  # address, and whether the browser loads it to show the page
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.update(value for key in ("id", "name") if (value := found.get(key)))
        for key in ("href", "src"):
            address = found.get(key)
            if address:
                self.links.append((address, (tag, key) in LOADED and found.get("rel") not in WITHOUT_EFFECT))

    handle_startendtag = handle_starttag


def broken(site: Path) -> Iterator[str]:
    """One line for each link that leads nowhere."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for address, loaded in page.links:
            wrong = _wrong(address, loaded, path, pages, site.resolve())
            if wrong:
                yield f"{path.relative_to(site.resolve())}: {address}: {wrong}"


def _wrong(address: str, loaded: bool, path: Path, pages: dict[Path, Page], site: Path) -> str:
    parts = urlsplit(address)
    if parts.scheme in ("mailto", "data"):
        return ""
    if parts.scheme or parts.netloc:
        if loaded:
            return "is loaded from the network; the site must open offline"
        good = parts.scheme in ("http", "https") and "." in parts.netloc and " " not in address
        return "" if good else "is not an address of the network"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if site not in (target, *target.parents):
        return "leads out of the site"
    if not target.is_file():
        return "there is no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "there is no such anchor"
    return ""
