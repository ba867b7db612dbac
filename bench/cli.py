"""The entry of `ngn-bench`: reads the command line, runs a command, turns errors into a status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from .errors import INTERRUPTED, BenchError

USAGE_ERROR = 2

DESCRIPTION = """\
What does an NGN step cost compared with AdamW's, and what does the memory
bandwidth allow? How far from the best step size does each optimizer still train?

  ngn-bench step                          the table, in about a minute
  ngn-bench step --workload gpt2 --contenders ngnmdv1,ngnm
  ngn-bench train --model transformer++-70m
  ngn-bench roofline --plot roofline.png
  ngn-bench ranks --ranks 1,2,4
  ngn-bench compare old.json new.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    # Neither torch's allocator nor its profiler should write between our lines.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    words = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(words)
    args.command = _recorded_command(words)
    _interrupt_on_terminate()
    try:
        return int(args.func(args) or 0)
    except BenchError as error:
        print(f"ngn-bench: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("ngn-bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _recorded_command(words: Sequence[str]) -> list[str]:
    """The command for the record, without the options that only name files to write."""
    kept = ["ngn-bench"]
    skip_value = False
    for word in words:
        if skip_value:
            skip_value = False
        elif word in ("--json", "--plot"):
            skip_value = True
        elif not word.startswith(("--json=", "--plot=")):
            kept.append(word)
    return kept


def _interrupt_on_terminate() -> None:
    """Let SIGTERM end a run as Ctrl-C does, so that what was measured is kept."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        return


def _parser() -> argparse.ArgumentParser:
    # Imported here, because they import torch, which reads the environment that `main` sets.
    from ngn_kernels import __version__

    from .commands import ablate, compare, info, ranks, roofline, step, summary, sweep, toy, train
    from .commands.shared import Parser

    parser = Parser(
        prog="ngn-bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ngn_kernels {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (step, train, roofline, ranks, compare, info, toy, sweep, ablate, summary):
        command.add(commands)
    return parser
