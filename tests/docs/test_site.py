"""The site of the documents: it is built as ``make docs`` builds it, and every link of every page leads somewhere."""

import importlib.util
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts/docs_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id"))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("link", "script", "img", "iframe"):
            self.loads.append(found.get("src") or (tag == "link" and found.get("href")) or "")


def test_every_page_is_there_and_every_link_leads_somewhere(site, hooks):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) == len(hooks.sources()) + 1  # and the list of decisions
    checked = 0
    for path, page in pages.items():
        assert not [load for load in page.loads if "://" in str(load)], f"{path}: fetches from elsewhere"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target in pages, f"{path}: {link}"
            fragment = unescape(unquote(parts.fragment))
            assert not fragment or fragment in pages[target].ids, f"{path}: {link}"
            checked += 1
    assert checked > 1000


def test_no_fence_is_left_in_a_page(site):
    for path in site.rglob("*.html"):
        assert "```" not in path.read_text(), path
    assert 'class="highlight"' in (site / "guide/first-run/index.html").read_text()


def test_a_new_page_finds_its_place_by_itself(hooks):
    nav = hooks.navigation([*hooks.sources(), "docs/guide/aaa.md", "docs/decisions/9999-a.md", "docs/zzz.md"])
    sections = {name: pages for entry in nav for name, pages in entry.items()}
    assert sections["Guide"][:2] == ["guide/install.md", "guide/first-run.md"]
    assert sections["Guide"][-1] == "guide/aaa.md"
    assert sections["Reference"][-1] == "zzz.md"
    assert sections["Inside"][-1]["Decisions"][-1] == "decisions/9999-a.md"
    listed = re.findall(r"'([\w./-]+\.md)'", str(hooks.navigation(hooks.sources())))
    assert sorted(listed) == sorted([*map(hooks.place, hooks.sources()), "decisions/index.md"])


def test_every_guide_has_a_place_and_every_place_a_guide(hooks):
    assert sorted(hooks.GUIDES) == sorted(path.stem for path in (ROOT / "docs/guide").glob("*.md"))


@pytest.mark.parametrize(
    ("source", "link", "leads"),
    [
        ("README.md", "docs/guide/plan.md#top", "guide/plan.md#top"),
        ("README.md", "docs/decisions", "decisions/index.md"),
        ("docs/guide/plan.md", "../../examples/README.md", "../examples/README.md"),
        ("docs/guide/plan.md", "../decisions/0002-dependencies.md", "../decisions/0002-dependencies.md"),
        ("docs/guide/plan.md", "../../README.md", "../README.md"),
        ("examples/README.md", "../docs/guide/plan.md", "../guide/plan.md"),
        ("docs/guide/plan.md", "#top", "#top"),
        ("docs/guide/plan.md", "https://semver.org", "https://semver.org"),
        ("docs/guide/plan.md", "nothing.md", "nothing.md"),
    ],
)
def test_links_are_led_to_the_pages_of_the_site(source, link, leads, hooks):
    assert hooks.relinked(f"a [b]({link}) c", source, hooks.sources()) == f"a [b]({leads}) c"


def test_a_link_to_a_file_that_is_no_page_becomes_text(hooks):
    assert hooks.relinked("a [b](../../pyproject.toml) c", "docs/guide/plan.md", hooks.sources()) == "a b c"


def test_every_fact_about_others_names_its_source():
    page = (ROOT / "docs/beside-others.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and line[2] not in "|-"]
    assert len(rows) > 30
    for row in rows:
        assert "](http" in row or row.startswith(("| kway", "| DDP, torch's")), row
        assert "](" in row or row.startswith(("| kway | this one", "| DDP, torch's")), row
