"""CONTRIBUTING.md's path of a step is the path that a step takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import with_grad

import ngn_kernels
from ngn_kernels import NGNMDv1

PAGE = Path(__file__).parent.parent / "CONTRIBUTING.md"
SOURCES = str(Path(ngn_kernels.__file__).parent)


def documented() -> list[str]:
    """The functions that begin an item, in the order of the page."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## The path of a step") : text.index("## Where to change what")]
    return re.findall(r"^ *(?:\d+\.|-) `([\w.]+)`", section, re.M)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
def test_the_page_follows_a_step() -> None:
    p = with_grad(torch.ones(3))
    optimizer = NGNMDv1([p])
    optimizer.step(loss=1.0)
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES):
            called.append(code.co_qualname)  # type: ignore[attr-defined]

    sys.setprofile(note)
    try:
        optimizer.step(loss=1.0)
    finally:
        sys.setprofile(None)
    names = documented()
    assert len(names) >= 11
    assert [name for name in names if name not in called] == []
    places = [called.index(name) for name in names]
    assert places == sorted(places), "the page has another order"
