"""What mkdocs.yml makes pages of: files of the repository, at their places in it."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from ngn_bench.cli import _parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "examples/README.md")
FOLDERS = ("docs/*.md", "docs/api/*.md", "docs/images/*", "docs/site.css")
# `make site` writes it there, with its pictures, from examples/tour.ipynb.
NOTEBOOK = ROOT / "build" / "notebook"
COMMANDS = """\
# Commands

`python -m ngn_kernels` prints versions, the machine, and which backends run here or why they do
not: what a bug report needs. `ngn-bench` measures and experiments; [its page](../../bench/README.md)
says how it measures, and [the lab](../lab.md) how to try a task of your own.
"""
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Pages and pictures, and the sources that pages link to."""
    own = [ROOT / name for name in PAGES]
    own += [path for pattern in FOLDERS for path in sorted(ROOT.glob(pattern))]
    linked = {
        (path.parent / link).resolve()
        for path in own
        if path.suffix == ".md"
        for link in LINK.findall(path.read_text(encoding="utf-8"))
    }
    own += sorted(path for path in linked - set(own) if path.is_file() and path.suffix != ".ipynb")
    found = [_file(path.relative_to(ROOT), ROOT, config) for path in own]
    pages = sorted(path for path in NOTEBOOK.rglob("*") if path.is_file())
    found += [_file(path.relative_to(NOTEBOOK), NOTEBOOK, config) for path in pages]
    found.append(File.generated(config, "docs/api/commands.md", content=_commands()))
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*found, *theme])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to a folder lead to its README, and links to a notebook to its page."""
    return LINK.sub(lambda match: match[0].replace(".ipynb", ".md"), markdown)


def _file(path: Path, folder: Path, config: Any) -> File:
    return File(path.as_posix(), str(folder), config.site_dir, config.use_directory_urls)


def _commands() -> str:
    """A page of what each command says of itself."""
    os.environ["COLUMNS"] = "86"
    parser = _parser()
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return COMMANDS + "".join(
        f"\n## {command.prog}\n\n```text\n{command.format_help()}```\n"
        for command in (parser, *action.choices.values())
    )
