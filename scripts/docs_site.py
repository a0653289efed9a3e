"""What mkdocs asks of this project: which pages the site has, in which order, and where their links lead.

Pages stay where readers of the repository look for them: in docs/, and beside the code. A page keeps its path,
without ``docs/`` before it; a link to another page leads there, and one to a file that is no page becomes plain text.
A new page is found by itself: guides are shown in the order of ``GUIDES``, others after them.
"""

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# The order in which a new user needs them.
GUIDES = (
    "install", "first-run", "your-own-model", "your-own-loop", "devices", "data", "batch-size", "launch", "exactness",
    "stop-and-go-on", "errors", "trackers", "map", "plan", "measure", "profile", "cost", "elsewhere", "speed",
    "timeline", "threads", "records",
)  # fmt: skip
DECISIONS = "docs/decisions"
BESIDE = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
FENCE = re.compile(r"^(```)(\S*)[^\n]*\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def sources() -> list[str]:
    """List the paths of all pages that are files, from the root of the repository."""
    folders = ("docs", "examples", "benchmarks")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.md"))]
    pages = [path.relative_to(ROOT).as_posix() for path in found]
    own = [page for page in pages if page.startswith("docs/") or page.endswith("/README.md")]
    return ["README.md", *BESIDE, *own]


def place(source: str) -> str:
    """Return the path within the site's sources of a page or folder of the repository."""
    return source.removeprefix("docs/")


def on_files(files: "Files", *, config: "MkDocsConfig") -> "Files":
    """Add the pages that are not in docs/, and put all in order."""
    from mkdocs.structure.files import File

    pages = sources()
    for source in pages:
        if not source.startswith("docs/"):
            files.append(File.generated(config, source, abs_src_path=str(ROOT / source)))
    index = f"{place(DECISIONS)}/index.md"
    files.append(File.generated(config, index, content=decisions(pages)))
    config["nav"] = navigation(pages)
    return files


def navigation(pages: list[str]) -> list[dict[str, Any]]:
    """Return what the site lists, as mkdocs has it in ``nav``; titles are those of the pages."""
    guides = [page for page in pages if page.startswith("docs/guide/")]
    order = {name: number for number, name in enumerate(GUIDES)}
    guides.sort(key=lambda page: (order.get(Path(page).stem, len(order)), page))
    facts = [page for page in pages if page.startswith("docs/") and page.count("/") == 1]
    records = [page for page in pages if page.startswith(f"{DECISIONS}/")]
    beside = [page for page in pages if page.startswith(("examples/", "benchmarks/"))]
    return [
        {"kway": "README.md"},
        {"Guide": [place(page) for page in guides]},
        {"Reference": [place(page) for page in facts]},
        {"Examples and benchmarks": beside},
        {"Inside": [*BESIDE, {"Decisions": [f"{place(DECISIONS)}/index.md", *map(place, records)]}]},
    ]


def decisions(pages: list[str]) -> str:
    """Return the page that lists all decisions by their titles."""
    rows = []
    for page in (page for page in pages if page.startswith(f"{DECISIONS}/")):
        title = (ROOT / page).read_text().partition("\n")[0].lstrip("# ")
        rows.append(f"* [{title}]({Path(page).name})")
    return "\n".join(["# Decisions", "", *rows, ""])


def on_page_markdown(markdown: str, *, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Lead links to where pages stand in the site, and leave of a block's first line its language."""
    there = sources()
    generated = page.file.src_uri == f"{place(DECISIONS)}/index.md"
    source = next((name for name in there if place(name) == page.file.src_uri), "")
    if not source and not generated:
        raise ValueError(f"{page.file.src_uri} is a page that no source is known of")
    if generated:
        return markdown
    parts, end = [], 0
    for block in FENCE.finditer(markdown):
        text = block[0]
        parts += [
            relinked(markdown[end : block.start()], source, there),
            block[1] + block[2],
            text[text.index("\n") :],
        ]
        end = block.end()
    return "".join([*parts, relinked(markdown[end:], source, there)])


def relinked(text: str, source: str, there: list[str]) -> str:
    """Return ``text`` of the page ``source`` with the links of the site."""

    def lead(match: re.Match[str]) -> str:
        said, target = match[1], match[2]
        path, hash_, heading = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if wanted not in there:
            folder = {DECISIONS: f"{DECISIONS}/index.md"}.get(wanted, f"{wanted}/README.md")
            if folder not in (*there, f"{DECISIONS}/index.md"):
                # mkdocs says what is wrong with a link to nothing.
                return said if (ROOT / wanted).exists() else match[0]
            wanted = folder
        return f"[{said}]({posixpath.relpath(place(wanted), posixpath.dirname(place(source)) or '.')}{hash_}{heading})"

    return LINK.sub(lead, text)
