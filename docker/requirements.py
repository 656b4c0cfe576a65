"""Prints the requirements in pyproject.toml, one per line, except those named: `requirements.py [name ...]`."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
left_out = set(sys.argv[1:])
wanted = {re.split(r"[^\w.-]", text)[0]: text for text in project["dependencies"]}
if unknown := left_out - wanted.keys():
    sys.exit(f"requirements.py: not among the dependencies in pyproject.toml: {', '.join(sorted(unknown))}")
print("\n".join(text for name, text in wanted.items() if name not in left_out))
