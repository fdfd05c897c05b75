"""The documentation site: `make docs` builds it into `site/`, with warnings as errors.

Everything that a page needs is in `site/`: nothing is loaded from the network.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import re

project = "remat"
author = "the authors of remat"
project_copyright = f"2026, {author}"
version = release = importlib.metadata.version("remat")
html_title = f"remat {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["README.md"]
smartquotes_action = "D"  # dashes only: "8GiB" is code

# Pages

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Docstrings: Google's sections, with text in `backticks`, which link where there is something.

default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Reference", "References"]
autodoc_typehints = "none"  # in the signature they hide it; the docstrings name what matters
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88

# The theme

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it is fetched, which browsers refuse for local files
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db4f0", "color-brand-content": "#7db4f0"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


# Docstrings are written for people: a span in backticks may be followed by letters or be broken over
# lines, and an asterisk is an asterisk. reStructuredText wants to be told so.

_SPAN = re.compile(r"(``[^`]+``|`[^`]+`)(\w)?")


def _text(paragraph: str) -> str:
    parts, end = [], 0
    for span in _SPAN.finditer(paragraph):
        parts.append(paragraph[end : span.start()].replace("*", r"\*"))
        code = re.sub(r"\s*\n\s*", " ", span[1])
        if not re.fullmatch(r"`{1,2}[A-Za-z_][\w.]*`{1,2}", code):
            code = f"``{code.strip('`')}``"  # no name to link
        parts.append(code + (r"\ " + span[2] if span[2] else ""))
        end = span.end()
    parts.append(paragraph[end:].replace("*", r"\*"))
    return "".join(parts)


def as_restructured_text(app, what, name, obj, options, lines: list[str]) -> None:
    """Rewrite a docstring's paragraphs; leave examples, literal blocks and lists of `*` alone.

    What is indented in a module's docstring is a drawing or a grammar, to be shown as it is.
    """
    written: list[str] = []
    paragraph: list[str] = []
    literal: int | None = None

    def flush() -> None:
        if paragraph:
            example = paragraph[0].lstrip().startswith(">>>")
            bullets = any(line.lstrip().startswith("* ") for line in paragraph)
            if what == "module" and paragraph[0].startswith("    "):
                written.extend(["::", ""])
                example = True
            own = example or bullets or paragraph[0].lstrip().startswith((".. ", ":", "**"))
            text = "\n".join(paragraph)
            written.extend((text if own else _text(text)).split("\n"))
            paragraph.clear()

    for line in lines:
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is not None:
            written.append(line)
        elif not line.strip():
            ends = paragraph[-1] if paragraph else ""
            flush()
            written.append(line)
            if ends.endswith("::"):
                literal = len(ends) - len(ends.lstrip())
        else:
            paragraph.append(line)
    flush()
    lines[:] = written


def prepared_page(app, docname: str, source: list[str]) -> None:
    """Leave out the blank line that ends an example, and in the navigation patterns (`cli*`) that no
    page matches yet."""
    source[0] = source[0].replace("\n\n```\n", "\n```\n")
    if docname == "index":
        pages = app.env.found_docs
        source[0] = "\n".join(
            line
            for line in source[0].split("\n")
            if not re.fullmatch(r"[\w/-]+\*", line) or fnmatch.filter(pages, line)
        )


def setup(app) -> None:
    app.connect("source-read", prepared_page)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)
