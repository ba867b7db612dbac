"""`ngn-bench ablate`."""

from __future__ import annotations

import argparse
from typing import Any

from ..lab import ablate, figures
from ..lab.paper import BETAS
from ..lab.train import RunSpec
from . import lab, shared


def add(commands: shared.Commands) -> None:
    parser = commands.add_parser(
        "ablate",
        help="the paper's ablations of betas and weight decay",
        description=(
            "The paper's ablations on a task of choice, over lr 3e-4 … 3e-2: betas for Adam and "
            "NGN-MDv1, weight decay for AdamW, Momo-Adam, Dec-NGN-MDv1 and NGN-MDv1W."
        ),
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--betas", action="store_true", help="β₁ at β₂ = 0.95, and β₂ at β₁ = 0.9")
    what.add_argument("--weight-decay", action="store_true", help="λ")
    parser.add_argument("--optimizers", metavar="NAMES", help="others than the paper's")
    for option, values, text in (
        ("--lr", "3e-4,1e-3,3e-3,1e-2,3e-2", "step sizes"),
        ("--beta1", ",".join(map(str, BETAS["β₁"])), "values of β₁"),
        ("--beta2", ",".join(map(str, BETAS["β₂"])), "values of β₂"),
        ("--decay", "0,1e-3,1e-2,1e-1", "values of λ"),
    ):
        parser.add_argument(
            option, default=values, metavar="LIST", help=f"{text} (default: {values})"
        )
    lab.add_running(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    figures.pyplot()
    default = ablate.BETA_OPTIMIZERS if args.betas else ablate.DECAY_OPTIMIZERS
    names, missing = lab.selected(args.optimizers or default)
    common = lab.common_spec(args)
    lrs, chosen_seeds = lab.step_sizes(args.lr), lab.seeds(args.seeds)
    if args.betas:
        pairs = ablate.beta_pairs(
            lab.numbers(args.beta1, "--beta1"), lab.numbers(args.beta2, "--beta2")
        )
        variants: list[dict[str, Any]] = [{"betas": pair} for pair in pairs]
    else:
        variants = [{"weight_decay": decay} for decay in lab.numbers(args.decay, "--decay")]
    specs = [
        RunSpec(**common, optimizer=name, lr=lr, seed=seed, **variant)
        for seed in chosen_seeds
        for variant in variants
        for name in names
        for lr in lrs
    ]
    folder = lab.folder_of(args, f"{args.task}-{'betas' if args.betas else 'weight-decay'}")
    if args.report_only:
        key = "betas" if args.betas else "weight_decay"
        values = [variant[key] for variant in variants]
        runs = lab.recorded(folder, common, lambda spec: spec[key] in values)
    else:
        runs = lab.train_missing(args, specs, folder)
    shown, drawn = (ablate.betas if args.betas else ablate.weight_decay)(runs)
    lab.publish(args, folder, f"Ablation: {args.task}", shown, drawn, runs)
    for line in missing:
        print(line)
    return 0
