"""Sphinx: Markdown through MyST, the theme Furo. `docsite.build` calls it on OUT/source."""

import json
from pathlib import Path

from docutils import nodes

from subquad import __version__

project, author, release = "subquad", "the subquad developers", __version__
project_copyright = f"{author}, Apache-2.0"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
maximum_signature_line_length = 88
add_module_names = smartquotes = False
toc_object_entries = False
highlight_language = "text"  # blocks without a language are for the shell, or show what it prints
pygments_style, pygments_dark_style = "friendly", "github-dark-high-contrast"

html_theme = "furo"
html_title = "subquad"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = html_show_sphinx = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses for files
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f4e9c", "color-brand-content": "#1f4e9c"},
    "dark_css_variables": {"color-brand-primary": "#8fb4f2", "color-brand-content": "#8fb4f2"},
}


def link_mechanisms(app, doctree, docname):
    """`combiner-fixed` in code leads to its page: the first time in a section, not in headings and links."""
    names = set(json.loads((Path(app.srcdir) / "linked.json").read_text()))
    done = set()
    for code in list(doctree.findall(nodes.literal)):
        name, section = code.astext(), next(iter(_sections(code)), None)
        if name not in names or docname == f"mechanisms/{name}" or (name, section) in done or _is_inside(code):
            continue
        done.add((name, section))
        uri = app.builder.get_relative_uri(docname, f"mechanisms/{name}")
        code.replace_self(nodes.reference("", "", code.deepcopy(), internal=True, refuri=uri))


def _sections(node):
    while node := node.parent:
        if isinstance(node, nodes.section):
            yield id(node)


def _is_inside(node):
    while node := node.parent:
        if isinstance(node, nodes.title | nodes.reference):
            return True
    return False


def setup(app):
    app.connect("doctree-resolved", link_mechanisms)
