"""The documentation as it is built: what a reader's browser gets, not what the pages' sources say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from documentation import build

ROOT = Path(__file__).resolve().parent.parent
HOST = "http://site/"
VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])


@dataclass
class Page(HTMLParser):
    """One page: its article's words outside code, its examples, headings, links, pictures and anchors."""

    url: str
    words: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    without_text: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    navigation: list[str] = field(default_factory=list)
    _open: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        classes = given.get("class", "")
        if "id" in given:
            self.anchors.add(given["id"])
        if self._inside("article"):
            self.classes.update(classes.split())
            if re.fullmatch("h[1-6]", tag):
                self.headings.append(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(urljoin(self.url, given["href"]))
            if self._inside("nav"):
                self.navigation.append(urldefrag(self.links[-1])[0])
        if tag in ("img", "script") and "src" in given:
            self.sources.append(urljoin(self.url, given["src"]))
        if tag == "img" and not given.get("alt"):
            self.without_text.append(given.get("src", ""))
        if tag not in VOID:
            self._open.append((tag, classes))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside("article"):
            (self.code if self._inside("code") or self._inside("pre") else self.words).append(data)

    def _inside(self, tag: str) -> bool:
        return any(name == tag for name, _ in self._open)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Page]:
    def read() -> Iterator[Page]:
        for path in sorted(folder.rglob("index.html")):
            page = Page(urljoin(HOST, str(path.relative_to(folder)).removesuffix("index.html")))
            page.feed(path.read_text())
            yield page

    return {page.url: page for page in read()}


def test_no_markup_is_left_over(pages: dict[str, Page]) -> None:
    """A role of Sphinx's, a fence that did not close, an example that became a paragraph or a box."""
    left = re.compile(r":(class|func|meth|mod|exc|attr|data):|``|>>>|\]\(|!\[|^:::", re.M)
    found = {url: found for url, page in pages.items() if (found := left.findall("".join(page.words)))}
    assert not found
    assert not {url for url, page in pages.items() if {"example", "examples"} & page.classes}


def test_every_example_of_the_reference_is_code(pages: dict[str, Page]) -> None:
    reference = {url: page for url, page in pages.items() if "/reference/" in url}
    examples = "".join("".join(page.code) for page in reference.values()).count(">>> ")
    documented = sum(text.count(">>> ") for text in map(Path.read_text, (ROOT / "src").rglob("*.py")))
    assert 0 < examples <= documented
    for url, page in reference.items():
        assert "gp" in page.classes or ">>>" not in "".join(page.code), f"{url}: an example without highlighting"


def test_the_reference_shows_what_users_call(pages: dict[str, Page]) -> None:
    names = [name for url, page in pages.items() if "/reference/" in url for name in page.headings]
    assert len(names) > 200
    assert not [name for name in names if re.search(r"\._|\.(note_written|copied|await_end)$", name)]


def test_every_page_is_reached_from_the_first(pages: dict[str, Page]) -> None:
    assert set(pages[HOST].navigation) >= set(pages)


def test_no_link_is_broken(folder: Path, pages: dict[str, Page]) -> None:
    broken = []
    for page in pages.values():
        for link in (*page.links, *page.sources):
            url, anchor = urldefrag(link)
            if not url.startswith(HOST):
                continue
            if url in pages:
                found = not anchor or unquote(anchor) in pages[url].anchors
            else:
                found = (folder / unquote(url.removeprefix(HOST))).is_file()
            if not found:
                broken.append((page.url, link))
    assert not broken


def test_every_picture_has_words_for_those_who_do_not_see_it(pages: dict[str, Page]) -> None:
    assert any(page.sources for page in pages.values())
    assert not [(url, page.without_text) for url, page in pages.items() if page.without_text]


def test_search_ranks_the_inside_last(folder: Path) -> None:
    entries = json.loads((folder / "search/search_index.json").read_text())["docs"]
    inside = re.compile("(decisions|internals|protocol)/")
    assert any(inside.match(entry["location"]) for entry in entries)
    for entry in entries:
        assert (entry.get("boost", 1) < 1) == bool(inside.match(entry["location"])), entry["location"]
