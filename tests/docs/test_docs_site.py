"""The site of the documentation: every page in it, every link and anchor, and nothing from the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; a link or anchor that leads nowhere fails."""
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra dev)")
    there = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(there)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return there


def test_every_page_of_the_documentation_is_in_the_site_and_found_by_its_search(site: Path) -> None:
    """The index of the search lies beside the pages."""
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}

    assert {page.replace("README.html", "index.html") for page in pages} - found <= {"index.html"}
    assert len(pages) > 30


def test_a_page_asks_nothing_of_the_network(site: Path) -> None:
    """It is read on clusters without one."""
    asked = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(https?://[^"'\s>]+)""")
    pages = list(site.rglob("*.html"))

    assert {url for page in pages for url in asked.findall(page.read_text())} == set()
    assert len(pages) > 30


def test_a_link_to_a_file_of_the_repository_becomes_its_path(site: Path) -> None:
    """The site has no such file, and does not pretend to."""
    text = (site / "index.html").read_text()

    assert "<code>CONTRIBUTING.md</code>" in text
    assert 'href="../' not in text
