"""One HTML page from which a reviewer learns why a model was promoted, or why not.

`render` turns what evaluation, judgement and training wrote down into one self-contained page; `markdown_summary` says
the same in a few lines. Both are pure: no clock, no files, no network; the same inputs give the same bytes. Neither
imports TensorFlow, so a task that only writes the report starts at once.
"""

from trainer.report.markdown import markdown_summary
from trainer.report.page import render

__all__ = ["markdown_summary", "render"]
