"""`ngn-bench train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from .. import environment, report
from ..errors import BenchError
from ..pages import plots
from ..timing.train import TrainSettings, run_train, select_optimizers, train_tables
from . import shared

LOOP_MODELS = ("mlp", "small-transformer")


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="time an iteration and its optimizer update in a training loop",
        description="Train copies of a model with each optimizer in turns; show the time of an "
        "iteration and of the optimizer's part. Batches are sized to the machine unless given.",
    )
    parser.add_argument(
        "--model", type=shared.names, metavar="NAMES", help="default: transformer++-70m"
    )
    parser.add_argument(
        "--preset", choices=("loops",), help="loops: an MLP and a small Transformer"
    )
    optimizers: dict[str, Any] = {"type": shared.names, "metavar": "NAMES", "default": ["ngnmdv1"]}
    parser.add_argument("--optimizers", **optimizers, help="besides fused AdamW")
    parser.add_argument(
        "--batch", type=shared.positive(int, 2**40), help="sequences or images in a batch"
    )
    parser.add_argument("--context", type=shared.positive(int, 2**24), help="tokens in a sequence")
    parser.add_argument(
        "--clip", type=shared.positive(float), help="clip the gradient norm to this"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on the bytes of this file")
    parser.add_argument(
        "--autocast",
        action=argparse.BooleanOptionalAction,
        help="bfloat16 autocast (default: on a GPU only)",
    )
    shared.add_measurement_options(parser, 60.0)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    device = shared.prepare(args)
    if args.preset and args.model:
        raise BenchError("--preset loops fixes the models; leave out --model")
    chosen = LOOP_MODELS if args.preset == "loops" else args.model or ("transformer++-70m",)
    machine = environment.describe(device)
    backend = environment.fastest_backend(device, torch.float32)
    contenders = select_optimizers(args.optimizers, backend)
    autocast = device.type == "cuda" if args.autocast is None else args.autocast
    settings = TrainSettings(
        device, args.seconds, args.batch, args.context, args.clip, autocast, args.text
    )
    print(environment.machine_line(machine))
    with report.progress_bar("training") as progress:
        rows, completed = run_train(list(dict.fromkeys(chosen)), contenders, settings, progress)
    record = report.record("train", args.command, machine, rows=rows, interrupted=not completed)
    record = report.as_plain(record)
    for table in train_tables(record):
        report.print_table(table)
    drawn = any(row["time"] for row in record["rows"])
    shared.write_outputs(args, record, plots.plot_train if drawn else None)
    return shared.exit_status(not completed, record["rows"])
