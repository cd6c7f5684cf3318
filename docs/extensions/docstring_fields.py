"""Makes the one-line fields of our docstrings (Precision:, Determinism:, ...) paragraphs of their own on the page."""

import re
from typing import Any

import griffe

FIELDS = re.compile(r"^(Precision|Determinism|Raises|Source): (?=\S)", re.MULTILINE)


class DocstringFields(griffe.Extension):
    """Runs once for each object, before its docstring is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a blank line before each field and its name in bold."""
        if obj.docstring:
            obj.docstring.value = FIELDS.sub(r"\n**\1:** ", obj.docstring.value)
