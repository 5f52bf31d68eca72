"""Turn the README into the package's page: links into this repository become absolute."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(link: re.Match[str]) -> str:
    """Return a link or a picture of the README with the address of its file in the repository."""
    picture, text, target = link.groups()
    return f"{picture}{text}({REPOSITORY}/{'raw' if picture else 'blob'}/v{PROJECT['version']}/{target})"


setup(
    long_description=RELATIVE.sub(absolute, (ROOT / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
)
