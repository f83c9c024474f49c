"""Text from outside stays text: neither Markdown nor HTML reads anything else into it.

The terminal's part is ``log.printable``.
"""

from __future__ import annotations

import html

from deepspec.log import printable

MARKDOWN = frozenset("\\`*_<>[]|#!&~$")


def markdown_text(text: str) -> str:
    """Return ``text`` on one line, with a backslash before whatever Markdown could take for markup."""
    line = " ".join(printable(text).split())
    return "".join(f"\\{c}" if c in MARKDOWN else c for c in line)


def markdown_code(text: str) -> str:
    """Return ``text`` as an indented code block of Markdown, in which nothing is markup."""
    return "\n".join(f"    {line}" for line in printable(text).splitlines())


def html_text(text: str) -> str:
    """Return ``text`` for the inside of an HTML element or a quoted attribute."""
    return html.escape(printable(text))
