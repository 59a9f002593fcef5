"""Sphinx settings. The pages are Markdown (MyST); a library's page is its README and its API."""

from pathlib import Path

from sphinx.application import Sphinx

project = "Burnish"
author = copyright = "The Burnish contributors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Burnish"

myst_heading_anchors = 3

# Docstrings read as plain text: `code` in single backticks.
default_role = "code"
add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_numpy_docstring = False


def front_page(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """What a library's README links to, from where the documentation includes it."""
    content[0] = content[0].replace("(../../README.md)", "(../index.md)")
    content[0] = content[0].replace("(examples/", f"(../../libs/{path.parent.name}/examples/")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("include-read", front_page)
