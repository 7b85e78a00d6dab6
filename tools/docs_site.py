"""Hooks of mkdocs that make the docs' relative links to files outside docs/ work on the site.

PAGES become pages, other linked files are copied as text, and folders as lists of files. A missing file is a
warning, on which `mkdocs build --strict` fails.
"""

from __future__ import annotations

import logging
import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # path in the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
SOURCES = {site: path for path, site in PAGES.items()}
LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\))")  # without a scheme
FENCE = re.compile(r"^( *```.*?^ *```)", flags=re.M | re.S)

log = logging.getLogger("mkdocs.hooks.docs_site")


def on_files(files: Files, config: Any) -> Files:
    """Add PAGES, and every source file that a page links."""
    for path, site in PAGES.items():
        files.append(File.generated(config, site, content=(ROOT / path).read_text(encoding="utf-8")))
    linked = {path for file in files.documentation_pages() for path in linked_sources(file)}
    for path in sorted(linked):
        files.append(File.generated(config, site_path(path), content=read_source(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages and copies of source files."""
    page_path = repository_path(page.file.src_uri)

    def rewrite_link(link: re.Match[str]) -> str:
        target, fragment = resolve(page_path, link[1]), link[2] or ""
        if not (ROOT / target).exists():
            log.warning("%s links %s, which does not exist", page_path, link[1])
        return os.path.relpath(site_path(target), os.path.dirname(page.file.src_uri)) + fragment

    pieces = FENCE.split(markdown)  # odd ones are code
    return "".join(LINK.sub(rewrite_link, piece) if i % 2 == 0 else piece for i, piece in enumerate(pieces))


def linked_sources(file: File) -> list[str]:
    """Return existing files outside PAGES and docs/ that a page links."""
    page_path = repository_path(file.src_uri)
    paths = (resolve(page_path, link[1]) for link in LINK.finditer(FENCE.sub("", file.content_string)))
    return [path for path in paths if site_path(path).startswith("source/") and (ROOT / path).exists()]


def repository_path(site: str) -> str:
    return SOURCES.get(site, f"docs/{site}")


def resolve(here: str, target: str) -> str:
    """Return the path in the repository of a relative link in `here`."""
    return os.path.normpath(os.path.join(os.path.dirname(here), target))


def site_path(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    names = (name.lstrip(".") for name in path.split("/"))  # mkdocs ignores hidden files
    return f"source/{'/'.join(names)}.txt"


def read_source(path: Path) -> str:
    """Return a file's text, or a folder's file names."""
    if path.is_dir():
        names = (str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        return "".join(f"{name}\n" for name in sorted(names) if "__pycache__" not in name)
    return path.read_text(encoding="utf-8")
