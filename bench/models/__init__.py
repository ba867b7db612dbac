"""Every model of the benchmarks and the lab, by name, in plain torch.

`build("resnet20", classes=100)` makes a model; `parameter_shapes("gpt2")` gives its parameters'
shapes without allocating them. All sizes are arguments, so that any model can be cut down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .text import (
    TRANSFORMER_PLUS_SIZES,
    WordLSTM,
    char_transformer,
    gpt2,
    transformer_plus,
)
from .text import TransformerPlus as TransformerPlus
from .vision import MLP, VGG16, ViT, cifar_resnet, resnet18, vit_tiny
from .vision import SmallCNN as SmallCNN

ModelFactory = Callable[..., nn.Module]

MODELS: dict[str, ModelFactory] = {
    "mlp": MLP,
    "resnet20": functools.partial(cifar_resnet, depth=20),
    "resnet110": functools.partial(cifar_resnet, depth=110, classes=100),
    "resnet18": resnet18,
    "resnet18-32": functools.partial(resnet18, small=True),
    "vgg16": VGG16,
    "vit-cifar": ViT,
    "vit-tiny": vit_tiny,
    "char-transformer": char_transformer,
    "word-lstm": WordLSTM,
    "gpt2": gpt2,
    **{
        f"transformer++-{size}": functools.partial(transformer_plus, size=size)
        for size in TRANSFORMER_PLUS_SIZES
    },
}


def build(name: str, **sizes: Any) -> nn.Module:
    """Make the model `name`; `sizes` go to its factory."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name](**sizes)


def shapes_of(factory: Callable[[], nn.Module], device: str = "meta") -> dict[str, tuple[int, ...]]:
    """Parameter names and shapes of what `factory` builds; on the meta device nothing is
    allocated. Tied parameters appear once, frozen ones not at all."""
    with torch.device(device):
        model = factory()
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def parameter_shapes(name: str, **sizes: Any) -> dict[str, tuple[int, ...]]:
    """Parameter names and shapes of the model `name`, without allocating it."""
    return shapes_of(lambda: build(name, **sizes))
