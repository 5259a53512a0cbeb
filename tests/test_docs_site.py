"""The site of the documentation: generated pages are up to date, all pages are in the navigation, and it builds."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest
from docs_parts import ROOT

DOCS = ROOT / "docs"
GUIDE_WORDS = 1_500


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="help texts are those of Python 3.11")
def test_generated_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "")  # restored afterwards
    pages = runpy.run_path(str(ROOT / "dev" / "reference.py"))["pages"]()
    differing = [name for name, text in pages.items() if (DOCS / "reference" / name).read_text() != text]
    assert not differing, "run python dev/reference.py"


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_guides_are_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in (DOCS / "guides").glob("*.md")}
    assert not {name: count for name, count in words.items() if count > GUIDE_WORDS}


def test_the_site_builds_without_warnings_and_loads_nothing_from_other_hosts() -> None:
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    done = subprocess.run([sys.executable, ROOT / "dev" / "site.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((ROOT / ".site" / "html").rglob("*.html"))
    assert len(pages) > 30 and (ROOT / ".site" / "html" / "search.json").exists()
    loaded = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?https?:|<link[^>]*rel=\"?stylesheet[^>]*href=\"?https?:")
    assert not [page.name for page in pages if loaded.search(page.read_text())]
