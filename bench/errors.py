"""Errors a user can act on. The command line prints them without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

INTERRUPTED = 130  # the exit status of a run that Ctrl-C ends


class BenchError(Exception):
    """A request that cannot be met; the message says what to do instead."""


def missing_package(what: str, package: str) -> BenchError:
    """An error for an optional dependency; with ngn_kernels installed pip only adds the extra."""
    return BenchError(
        f"{what} needs {package}: pip install {package}, or everything that ngn-bench uses by "
        "default: pip install 'ngn_kernels[bench]'"
    )


def unknown_name(
    kind: str, name: str, known: Iterable[str], note: str = "", listed: Iterable[str] = ()
) -> BenchError:
    """An error for a name that is not in `known`, with the nearest one as a suggestion.

    `listed` are the names to show where `known` has too many to read.
    """
    names = list(known)
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
    shown = ", ".join(listed or names)
    extra = f"\n{note}" if note else ""
    return BenchError(f"unknown {kind} {name!r}.{suggestion}\nKnown: {shown}{extra}")
