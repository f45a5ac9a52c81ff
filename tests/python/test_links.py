"""Links between the pages, and from the sources to the pages, lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("bindings", "examples", "include", "lab", "python", "src", "tests", "tools")
SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".py")

if not (ROOT / "README.md").is_file():
    pytest.skip("there is no documentation here", allow_module_level=True)


def pages():
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def anchors(text):
    """Those that GitHub gives to the headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    names = []
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.append(f"{slug}-{names.count(slug)}" if slug in names else slug)
    return names


def broken_links(page):
    text = page.read_text()
    broken = []
    images = re.findall(r'<(?:img|source) [^>]*?src(?:set)?="([^"]+)"', text)
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *images]:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            broken.append(target)
    return broken


def test_there_are_pages():
    assert {"README.md", "docs/autoencoder.md", "docs/journal/autoencoder.md"} <= set(pages())


@pytest.mark.parametrize("page", pages())
def test_links_of_a_page(page):
    assert broken_links(ROOT / page) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# One `two` + three\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#one-two--three) [b](missing.md) [c](other.md#two) [d](#none)\n")
    assert broken_links(page) == ["missing.md", "other.md#two", "#none"]
    page.write_text('<source srcset="none.svg">\n<img src="other.md">\n')
    assert broken_links(page) == ["none.svg"]


def test_sources_name_pages_that_exist():
    sources = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES
    ]
    named = {
        page
        for path in sources
        for page in re.findall(r"\bdocs/(?!results/)[\w/-]+\.md\b", path.read_text())
    }
    assert "docs/specification.md" in named
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []
