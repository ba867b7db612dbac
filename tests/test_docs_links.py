"""Relative links, anchors and pictures of README, the pages of docs and the notebook lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")),
    *(ROOT / "examples" / name for name in ("README.md", "tour.ipynb")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SCHEME = re.compile(r"[a-z]+:")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = found.get(slug, -1) + 1
        found[slug] = count
        if count:
            found[f"{slug}-{count}"] = 0
    return set(found)


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if SCHEME.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    assert broken_links(page) == []


def test_every_page_and_picture_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if not SCHEME.match(link)
    }
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "images").iterdir()]
    assert [path.name for path in files if path not in linked] == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One `thing`, two\n\n## Same\n\n## Same\n\n```\n# Code\n```\n")
    links = ("b.md", "b.md#one-thing-two", "b.md#same-1", "https://example.org/x")
    wrong = ("c.md", "b.md#code", "b.md#same-2", "#nothing")
    page = tmp_path / "a.md"
    page.write_text("\n".join(f"[text]({link})" for link in (*links, *wrong)))
    assert broken_links(page) == list(wrong)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
