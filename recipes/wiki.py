"""Articles of a MediaWiki dump as plain text, a line of JSON each: python wiki.py DUMP.xml.bz2 OUT.jsonl"""

from __future__ import annotations

import bz2
import html
import json
import re
import sys
from pathlib import Path

GONE = re.compile(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<(gallery|math|table|timeline)\b.*?</\1>", re.DOTALL)
LINK = re.compile(r"\[\[(?:[^][|]*:[^][]*|(?:[^][|]*\|)?([^][|]*))\]\]")  # of pages; what links to files is dropped
SHORTEST = 400  # characters of an article


def plain(markup: str) -> str:
    """The paragraphs of an article, without links, templates, tables, lists and headings."""
    text = re.sub(r"<[^>]*>", "", GONE.sub("", markup))
    before = ""
    while before != text:  # the innermost ones first
        before = text
        text = LINK.sub(r"\1", re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", text))
    text = re.sub(r"\[https?:\S+ ?([^]]*)\]", r"\1", text)
    text = re.sub(r"\(\s*[,;]*\s*\)", "", re.sub(r"'{2,}|&nbsp;", "", text))
    lines = (line.strip() for line in text.split("\n"))
    return "\n\n".join(line for line in lines if line and line[0] not in "=*#:;|{}!")


def main(dump: Path, out: Path) -> None:
    data = bz2.decompress(dump.read_bytes()).decode("utf-8")
    articles = (plain(html.unescape(text)) for text in re.findall(r"<text[^>]*>(.*?)</text>", data, re.DOTALL))
    with out.open("w", encoding="utf-8") as file:
        for article in articles:
            if len(article) > SHORTEST:
                file.write(json.dumps({"text": article, "kind": "encyclopaedia"}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
