"""A hook of mkdocs: files outside docs/ that pages link to are part of the site, so links work there and on GitHub.

DESIGN.md becomes `repository/DESIGN.md`, deploy/kproxy.toml `repository/deploy/kproxy.toml`. A folder has no page in
the site: a link to one leads to the list of its files, which is made here.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages of the site beside those of docs/.
PAGES = ("README.md", "CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md", "dashboards/README.md", "bench/FIGURES.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def place_in_repository(source: str) -> PurePosixPath:
    """Where a file of the site is in the repository."""
    path = PurePosixPath(source)
    return path.relative_to("repository") if path.parts[0] == "repository" else "docs" / path


def place_in_site(path: str) -> str:
    """Where a file or folder of the repository is in the site."""
    inside = PurePosixPath(path)
    if inside.parts[0] == "docs":
        return str(inside.relative_to("docs"))
    return f"repository/{inside}" + ("/files.txt" if (ROOT / inside).is_dir() else "")


def linked(source: str, text: str) -> set[str]:
    """What a page links to outside docs/, as far as it is there."""
    folder = place_in_repository(source).parent
    paths = {os.path.normpath(folder / found[1]) for found in LINK.finditer(FENCE.sub("", text))}
    return {path for path in paths if not path.startswith(("docs/", "..")) and (ROOT / path).exists()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and files outside docs/."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    texts |= {f"repository/{page}": (ROOT / page).read_text() for page in PAGES}
    for path in sorted({*PAGES}.union(*(linked(source, text) for source, text in texts.items()))):
        target = ROOT / path
        if target.is_dir():
            names = sorted(str(name.relative_to(target)) for name in target.rglob("*") if name.is_file())
            names = [name for name in names if "__pycache__" not in name]
            files.append(File.generated(config, place_in_site(path), content="\n".join(names) + "\n"))
        else:
            files.append(File.generated(config, place_in_site(path), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of the repository become links of the site; one that leads nowhere stays, for the strict build to name."""
    source = page.file.src_uri
    folder = place_in_repository(source).parent

    def moved(found: re.Match[str]) -> str:
        target = place_in_site(os.path.normpath(folder / found[1]))
        if files.get_file_from_path(target) is None:
            return found[0]
        return os.path.relpath(target, PurePosixPath(source).parent) + (found[2] or "")

    return LINK.sub(moved, markdown)
