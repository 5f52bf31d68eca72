"""Reject phrases that this project does not use in docstrings, comments, messages and pages.

    python tools/lint_english.py

Rules for prose: start a docstring with an imperative verb ("Return", "Raise"), name the subject of each
sentence, and prefer the words of the field. `BANNED` has the phrases that break these rules most often, with
a replacement for each.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BANNED = {
    r"told": "write which value or function is meant",
    r"beside": 'write "next to", or "in addition to"',
    r"as ever": 'write "as before"',
    r"anew": 'write "again"',
    r"whoever": "name the caller",
    r"thereof": 'write "of it"',
    r"comes? of": 'write "results from"',
    r"the way there": "name the steps",
    r"leaves with \d": 'write "exits with"',
    r"(?<!there )(?:is|are) no (?!longer|more|less|later)": 'write "is not a"',
}
_BANNED = re.compile("|".join(rf"(?P<r{i}>\b{phrase}\b)" for i, phrase in enumerate(BANNED)), re.IGNORECASE)
_OPENING = re.compile(r"\s*(What|Whether|Which|Who|How)\b")
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

Finding = tuple[int, str]


def phrases(text: str, line: int) -> Iterator[Finding]:
    for match in _BANNED.finditer(re.sub(r"\s", " ", text)):
        advice = list(BANNED.values())[int(str(match.lastgroup)[1:])]
        yield line + text.count("\n", 0, match.start()), f"{match.group()!r}: {advice}"


def in_python(source: str) -> Iterator[Finding]:
    """Yield what is wrong in comments, strings and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from phrases(token.string, token.start[0])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            opening = _OPENING.match(ast.get_docstring(node) or "")
            if opening:
                yield node.body[0].lineno, f"a docstring begins with {opening[1]!r}: begin with a verb"


def in_page(text: str) -> Iterator[Finding]:
    yield from phrases(_CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text), 1)


def main() -> int:
    """Print findings as `path:line: message`; return 1 if there are any."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    failed = 0
    for name in listed.split():
        path = ROOT / name
        check = {".py": in_python, ".md": in_page, ".html": in_page, ".toml": in_page}.get(path.suffix)
        if check is None or path == Path(__file__) or not path.exists():
            continue
        for line, message in sorted(check(path.read_text())):
            print(f"{name}:{line}: {message}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
