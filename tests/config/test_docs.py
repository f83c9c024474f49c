"""The generated page is current."""

from __future__ import annotations

import re

from deepspec.config.docs import FILE, config_markdown
from deepspec.config.resolve import known_keys
from deepspec.drafters.dspark.config import DSparkConfig


def test_the_page_of_keys_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == config_markdown(), "run python -m deepspec.config.docs"


def test_the_page_has_every_key_with_its_meaning() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", config_markdown(), flags=re.MULTILINE))
    leaves = [key for key in known_keys(DSparkConfig) if "." in key]
    assert not [key for key in leaves if not rows.get(key)]
