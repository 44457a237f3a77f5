"""How Sphinx builds the documentation: ``make docs``. Nothing is fetched, and a warning is an error."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

from ds_galore import __version__  # noqa: E402 - found through the path above

project = "ds_galore"
author = "the authors of ds_galore"
copyright = f"2026, {author}"
release = version = __version__

extensions = ["myst_parser", "sphinx_click", "config_reference"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_ext"]
nitpicky = True
smartquotes = False  # would make dashes of the hyphens of options
# Blocks without a language are no Python; those with one are highlighted, and a syntax error in them is a warning.
highlight_language = "none"

myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 3  # links such as optimizers.md#stages-and-precisions, as GitHub makes them

html_theme = "furo"
html_title = f"ds_galore {version}"
html_copy_source = False
html_show_sphinx = False
