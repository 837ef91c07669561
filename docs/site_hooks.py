"""Hooks of the site: its contents are those of docs/README.md, and links out of docs/ lead to pages as well.

Pages link to each other and to files of the repository by relative paths, which a repository's browser follows. Files
outside of docs/ to which a page links become pages below repository/, texts as they are and code as a block.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
CODE = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
IMAGES = (".svg", ".png")


def on_config(config: MkDocsConfig) -> None:
    """Take the contents from the headings and links of docs/README.md."""
    contents: list[dict] = [{"Manual": "README.md"}]
    for line in (ROOT / "docs" / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            depth, title = len(line.split()[0]), line.lstrip("# ")
            if depth == 2:
                part: list[dict] = []
                contents.append({title: part})
                pages = part
            elif depth == 3:
                pages = []
                part.append({title: pages})
        else:
            for title, path in _pages_of(line):
                pages.append({title: _folder(path) if path.endswith("/README.md") else path})
    config.nav = contents


def _pages_of(text: str) -> list[tuple[str, str]]:
    """The title and path of the pages to which a text links, as far as they lie beside it or below."""
    found = re.findall(r"\[([^\]]+)\]\(((?!\.\./)[^)#:]+\.md)\)", text)
    return [(title.replace("`", ""), path) for title, path in dict.fromkeys(found)]


def _folder(path: str) -> list:
    """The contents of a folder: its README, and the pages that it lists."""
    readme = ROOT / "docs" / path
    below = _pages_of(readme.read_text(encoding="utf-8"))
    return [path, *({title: f"{PurePosixPath(path).parent}/{page}"} for title, page in below)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository to which pages link, and those to which these link."""
    left = [file.src_uri for file in files.documentation_pages()]
    while left:
        page = left.pop()
        found = files.get_file_from_path(page)
        if found is None or _path(page).suffix in CODE:
            continue
        for link in LINK.findall(found.content_string):
            target = _target(page, link)
            uri = _uri(target) if target is not None else ""
            if not uri.startswith("repository/") or files.get_file_from_path(uri):
                continue
            if target.suffix in IMAGES:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
                continue
            files.append(File.generated(config, uri, content=_content(target), inclusion=InclusionLevel.NOT_IN_NAV))
            left.append(uri)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/, and those of the repository's pages, to pages of the site."""
    here = page.file.src_uri
    if here.startswith("repository/") and _path(here).suffix in CODE:
        return markdown

    def led(match: re.Match[str]) -> str:
        target = _target(here, match[1])
        return match[0] if target is None else os.path.relpath(_uri(target), PurePosixPath(here).parent)

    return LINK.sub(led, markdown)


def _path(uri: str) -> Path:
    """The file of the repository that a page of the site shows."""
    if not uri.startswith("repository/"):
        return ROOT / "docs" / uri
    path = ROOT / uri.removeprefix("repository/")
    return path if path.exists() else path.with_suffix("")  # code as a page


def _target(page: str, link: str) -> Path | None:
    """The file to which a link of a page leads, or None."""
    path = Path(os.path.normpath(_path(page).parent / link))
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _uri(target: Path) -> str:
    """The page of the site that shows a file, or a folder by its README."""
    if (target / "README.md").exists():
        target /= "README.md"
    path = target.relative_to(ROOT).as_posix()
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" + ".md" * (target.suffix not in (".md", *IMAGES))


def _content(target: Path) -> str:
    """The text of a page that shows a file or a folder of the repository."""
    if target.suffix == ".md":
        return target.read_text(encoding="utf-8")
    title = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        below = "\n".join(f"- [{path.name}]({target.name}/{path.name})" for path in sorted(target.glob("*.*")))
    else:
        below = f"````{CODE.get(target.suffix, 'text')}\n{target.read_text(encoding='utf-8')}\n````"
    return f"---\nsearch: {{exclude: true}}\n---\n# {title}\n\n{below}\n"
