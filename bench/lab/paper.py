"""The paper's best scores, mean and standard deviation over its seeds, for the tables beside ours.

Accuracy in per cent, or perplexity. A single run has no deviation.
"""

from __future__ import annotations

from pathlib import Path

Score = tuple[float, float | None]

PAPER: dict[str, dict[str, Score]] = {
    "cifar10-resnet20": {
        "ngn": (88.30, 0.20),
        "sgdm": (85.42, 0.70),
        "ngn-m": (88.76, 0.05),
        "momsps": (87.20, 0.38),
        "momo": (88.86, 0.14),
        "alr-smag": (88.88, 0.19),
        "adam": (86.96, 0.70),
        "momo-adam": (89.41, 0.36),
        "ngn-mdv1": (89.53, 0.11),
        "ngn-mdv2": (87.80, 0.16),
        "lion": (88.09, 0.27),
        "adabelief": (87.47, 0.48),
        "adabound": (85.00, 0.56),
        "adagrad": (85.90, 0.30),
        "rmsprop": (86.71, 0.64),
        "ngn-d": (86.98, 0.15),
    },
    "cifar100-resnet110": {
        "ngn": (64.76, 0.26),
        "sgdm": (57.16, 2.06),
        "ngn-m": (64.98, 0.29),
        "momsps": (63.37, 0.71),
        "momo": (64.81, 0.33),
        "alr-smag": (64.73, 1.81),
        "adam": (64.12, 0.94),
        "momo-adam": (67.10, 0.53),
        "ngn-mdv1": (66.10, 0.45),
        "ngn-mdv2": (64.33, 0.40),
        "lion": (61.85, 0.77),
        "adabelief": (65.32, 0.43),
        "adabound": (61.28, 0.39),
    },
    "cifar10-vgg16": {
        "ngn": (90.21, 0.10),
        "sgdm": (89.67, 0.43),
        "ngn-m": (90.42, 0.06),
        "momsps": (87.26, 0.21),
        "momo": (90.43, 0.17),
        "alr-smag": (90.49, 0.35),
        "adam": (90.26, 0.23),
        "momo-adam": (90.95, 0.28),
        "ngn-mdv1": (90.64, 0.18),
        "ngn-mdv2": (90.07, 0.37),
    },
    "mnist-mlp": {
        "ngn": (98.04, 0.07),
        "sgdm": (97.63, 0.10),
        "ngn-m": (97.97, 0.08),
        "momsps": (97.73, 0.09),
        "momo": (97.97, 0.04),
        "alr-smag": (97.64, 0.06),
        "adam": (97.44, 0.19),
        "momo-adam": (97.96, 0.10),
        "ngn-mdv1": (98.10, 0.06),
        "ngn-mdv2": (97.67, 0.17),
    },
    "cifar10-vit": {
        "ngn": (83.34, 0.24),
        "sgdm": (83.74, 0.11),
        "ngn-m": (84.95, 0.29),
        "momsps": (83.77, 0.27),
        "momo": (85.47, 0.27),
        "alr-smag": (85.54, 0.39),
        "adam": (85.96, 0.23),
        "momo-adam": (85.74, 0.12),
        "ngn-mdv1": (85.65, 0.10),
        "ngn-mdv2": (86.56, 0.11),
        "lion": (86.89, 0.19),
        "adabelief": (85.05, 0.47),
        "adabound": (80.32, 0.47),
    },
    "imagenet32-resnet18": {
        "ngn": (48.63, None),
        "sgdm": (48.56, None),
        "ngn-m": (48.29, None),
        "momo": (48.68, None),
        "adam": (48.11, None),
        "momo-adam": (48.09, None),
        "ngn-mdv1": (48.06, None),
        "ngn-mdv2": (47.55, None),
    },
    "imagenet1k-resnet18": {
        "ngn": (67.00, None),
        "sgdm": (66.73, None),
        "ngn-m": (67.12, None),
        "momo": (67.09, None),
        "adam": (67.17, None),
        "momo-adam": (67.06, None),
        "ngn-mdv1": (67.15, None),
        "ngn-mdv2": (67.32, None),
    },
    "imagenet1k-vit-tiny": {
        "adam": (71.05, 0.16),
        "momo-adam": (71.22, 0.36),
        "ngn-mdv1": (71.345, 0.22),
    },
    "shakespeare-transformer": {
        "ngn": (9.27, 0.19),
        "sgdm": (8.73, 0.13),
        "ngn-m": (7.67, 0.12),
        "momo": (8.80, 0.19),
        "adam": (6.80, 0.06),
        "momo-adam": (6.80, 0.05),
        "ngn-mdv1": (6.89, 0.06),
        "ngn-mdv2": (6.82, 0.05),
        "adagrad": (7.77, 0.05),
        "rmsprop": (7.00, 0.13),
        "ngn-d": (6.90, 0.05),
    },
    "rotten-tomatoes-transformer": {
        "ngn": (9.01, 0.22),
        "sgdm": (8.75, 0.04),
        "ngn-m": (7.12, 0.03),
        "momo": (8.65, 0.03),
        "adam": (6.80, 0.07),
        "momo-adam": (6.81, 0.05),
        "ngn-mdv1": (6.90, 0.05),
        "ngn-mdv2": (6.83, 0.05),
        "adagrad": (7.77, 0.02),
        "rmsprop": (6.87, 0.05),
        "ngn-d": (6.92, 0.03),
    },
    "ptb-lstm": {
        "adam": (70.95, 0.08),
        "momo-adam": (71.09, 0.05),
        "ngn-mdv1": (70.84, 0.20),
        "ngn-mdv2": (71.37, 0.17),
        "adagrad": (99.24, 2.13),
        "rmsprop": (69.00, 0.17),
        "ngn-d": (71.54, 0.11),
    },
    "wikitext2-lstm": {
        "ngn": (75.33, 0.15),
        "sgdm": (82.07, 0.16),
        "ngn-m": (75.51, 0.22),
        "momo": (76.09, 0.40),
        "adam": (81.49, 1.49),
        "momo-adam": (82.23, 0.64),
        "ngn-mdv1": (75.24, 0.21),
        "ngn-mdv2": (81.99, 0.78),
        "adagrad": (113.19, 4.36),
        "rmsprop": (79.48, 0.45),
        "ngn-d": (75.44, 0.12),
    },
    "lm-transformer++ 70m": {
        "adam": (34.38, 0.12),
        "momo-adam": (34.96, 0.11),
        "ngn-mdv1": (33.84, 0.33),
    },
    "lm-transformer++ 160m": {
        "adam": (24.03, 0.02),
        "momo-adam": (24.29, 0.10),
        "ngn-mdv1": (23.32, 0.06),
    },
    "lm-transformer++ 410m": {
        "adam": (16.65, 0.03),
        "momo-adam": (17.07, 0.05),
        "ngn-mdv1": (16.48, 0.03),
    },
    "lm-transformer++ 1b": {
        "adam": (13.09, None),
        "ngn-mdv1": (13.11, None),
    },
}
"""The language models were trained on SlimPajama."""

BETAS = {"β₁": (0.6, 0.8, 0.9, 0.99), "β₂": (0.6, 0.8, 0.9, 0.95, 0.999)}
"""The paper's grids: each β₁ at β₂ = 0.95, each β₂ at β₁ = 0.9."""

BETA_ABLATION: dict[tuple[str, str], dict[float, tuple[str, ...]]] = {
    ("ngn-mdv1", "β₁"): {
        3e-4: ("49.9 ± 0.2", "47.4 ± 0.2", "47.0 ± 0.2", "49.7 ± 0.3"),
        1e-3: ("41.5 ± 0.2", "39.9 ± 0.2", "38.6 ± 0.1", "40.2 ± 0.3"),
        3e-3: ("40 ± 1", "36.9 ± 0.3", "35.9 ± 0.1", "37.2 ± 0.1"),
        1e-2: ("54 ± 16", "37 ± 2", "34.7 ± 0.3", "35.9 ± 0.1"),
        3e-2: ("278 ± 6", "129 ± 2", "34.6 ± 0.1", "35.6 ± 0.1"),
    },
    ("ngn-mdv1", "β₂"): {
        3e-4: ("51.8 ± 0.6", "49.2 ± 0.4", "47.8 ± 0.3", "47.0 ± 0.2", "47.0 ± 0.2"),
        1e-3: ("42.6 ± 0.3", "40.5 ± 0.1", "39.3 ± 0.2", "38.6 ± 0.1", "38.9 ± 0.1"),
        3e-3: ("39.4 ± 0.2", "37.5 ± 0.2", "36.3 ± 0.1", "35.9 ± 0.1", "36.5 ± 0.4"),
        1e-2: ("37.8 ± 0.2", "35.9 ± 0.1", "35.1 ± 0.3", "34.7 ± 0.3", "35.0 ± 0.3"),
        3e-2: ("37.8 ± 0.3", "35.8 ± 0.1", "34.9 ± 0.1", "34.6 ± 0.1", "250 ± 50"),
    },
    ("adam", "β₁"): {
        3e-4: ("49.4 ± 0.2", "46.5 ± 0.1", "46.2 ± 0.3", "57 ± 1"),
        1e-3: ("41.4 ± 0.2", "39.6 ± 0.1", "38.5 ± 0.1", "45.0 ± 0.2"),
        3e-3: ("40.7 ± 0.1", "37.0 ± 0.1", "36.0 ± 0.1", "220 ± 70"),
        1e-2: ("160 ± 60", "41 ± 2", "36 ± 2", "210 ± 110"),
        3e-2: ("420 ± 20", "340 ± 50", "320 ± 60", "330 ± 130"),
    },
    ("adam", "β₂"): {
        3e-4: ("46.1 ± 0.2", "46.6 ± 0.1", "46.5 ± 0.2", "46.2 ± 0.3", "46.5 ± 0.1"),
        1e-3: ("38.8 ± 0.1", "39.0 ± 0.2", "38.9 ± 0.1", "38.5 ± 0.1", "39.5 ± 0.6"),
        3e-3: ("38.8 ± 0.3", "36.3 ± 0.1", "36.1 ± 0.2", "36.0 ± 0.1", "36.7 ± 0.8"),
        1e-2: ("35.4 ± 0.2", "35.0 ± 0.1", "34.9 ± 0.3", "36 ± 2", "41 ± 3"),
        3e-2: ("550 ± 250", "120 ± 80", "160 ± 5", "210 ± 60", "500 ± 20"),
    },
}
"""Test perplexity by optimizer and β, then by step size, one value per β. A 70M language model on
FineWeb, 4800 batches of 128, 3 seeds."""


def paper_scores(task: str, options: dict[str, str]) -> dict[str, Score]:
    """The paper's best scores on a task, by optimizer; empty if it has none.

    A perplexity by byte is not comparable with the paper's by token.
    """
    if task == "lm-transformer++":
        text = options.get("text")
        if "tokenizer" not in options and not (text and Path(text).is_dir()):
            return {}
        task = f"{task} {options.get('size', '70m')}"
    return PAPER.get(task, {})
