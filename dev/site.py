"""Build the site of the documentation in .site/html: `make docs`. Needs the extra `docs`, and no network.

Search needs a server, because browsers do not run workers of local files: python -m http.server -d .site/html
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / ".site" / "pages"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)[^)\s]*\)")


def without_outer_links(page: Path) -> str:
    """The text of a page; links to files that are not in docs/ become the path of the file, as code."""

    def replaced(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target or (page.parent / target).resolve().is_relative_to(PAGES):
            return link[0]
        path = target.replace("../", "")
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return LINK.sub(replaced, page.read_text())


def main() -> int:
    shutil.rmtree(ROOT / ".site", ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for page in PAGES.rglob("*.md"):
        page.write_text(without_outer_links(page))
    return subprocess.run([Path(sys.executable).with_name("zensical"), "build", "--strict"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
