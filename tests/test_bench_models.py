"""The models of the benchmarks and the lab: their sizes, their names, what they may see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ngn_bench import models


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("mlp", 6, 89_610),
        ("resnet20", 59, 269_722),
        ("resnet18", 62, 11_689_512),
        ("vgg16", 32, 15_245_130),
        ("vit-tiny", 152, 5_717_416),
        ("gpt2", 148, 124_439_808),
        ("transformer++-70m", 39, 70_760_960),
    ],
)
def test_models_have_their_published_sizes(name: str, tensors: int, parameters: int) -> None:
    shapes = models.parameter_shapes(name)
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_transformer_plus_hidden_sizes() -> None:
    for size, hidden in {"70m": 1408, "160m": 2048, "410m": 2816, "1b": 5504}.items():
        shapes = models.parameter_shapes(f"transformer++-{size}")
        assert shapes["blocks.0.down.weight"][1] == hidden
        assert shapes["blocks.0.gate_up.weight"][0] == 2 * hidden
        assert shapes["embed.weight"] == shapes["head.weight"]
        assert not any(key.endswith("bias") for key in shapes)


IMAGE = (2, 3, 32, 32)
SMALL_MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": ({"inputs": 12, "hidden": [5, 4]}, (2, 3, 4), (2, 10)),
    "resnet20": ({"width": 4}, IMAGE, (2, 10)),
    "resnet110": ({"width": 2}, IMAGE, (2, 100)),
    "resnet18": ({"width": 4, "classes": 7}, (2, 3, 64, 64), (2, 7)),
    "resnet18-32": ({"width": 4, "classes": 7}, IMAGE, (2, 7)),
    "vgg16": ({"width": 4, "batch_norm": True}, IMAGE, (2, 10)),
    "vit-cifar": ({"dim": 16, "depth": 2, "mlp_dim": 8}, IMAGE, (2, 10)),
    "vit-tiny": ({"dim": 64, "depth": 1, "image": 32, "classes": 5}, IMAGE, (2, 5)),
    "char-transformer": ({"layers": 2, "vocab": 11}, (2, 6), (2, 6, 11)),
    "word-lstm": ({"vocab": 11, "embed": 6, "hidden": 8}, (2, 6), (2, 6, 11)),
    "gpt2": ({"layers": 1, "dim": 24, "vocab": 11}, (2, 6), (2, 6, 11)),
    "transformer++-70m": ({"layers": 1, "dim": 32, "vocab": 11}, (2, 6), (2, 6, 11)),
}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_models_run_forwards_and_backwards(name: str) -> None:
    sizes, input_shape, output_shape = SMALL_MODELS[name]
    model = models.build(name, **sizes)
    is_text = len(input_shape) == 2
    inputs = torch.randint(11, input_shape) if is_text else torch.randn(input_shape)
    output = model(inputs)
    logits = output[0] if isinstance(output, tuple) else output
    assert tuple(logits.shape) == output_shape
    logits.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_modules_have_the_names_the_lab_observes() -> None:
    resnet = dict(models.build("resnet20").named_parameters())
    assert {f"layer{stage}.0.conv1.weight" for stage in (1, 2, 3)} <= set(resnet)
    vit = models.parameter_shapes("vit-cifar")
    assert {f"blocks.{block}.attn.qkv.weight" for block in (0, 3, 5)} <= set(vit)


@pytest.mark.parametrize("name", ["char-transformer", "gpt2", "transformer++-70m"])
def test_language_models_do_not_see_the_future(name: str) -> None:
    model = models.build(name, layers=2, dim=32, heads=2, vocab=11, context=8).eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    with pytest.raises(ValueError, match="do not fit the model's context of 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_rotary_attention_depends_on_distance_only() -> None:
    from ngn_bench.models.attention import rotate

    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
    cos, sin = angles.cos(), angles.sin()
    q = rotate(torch.ones(8, 4), cos, sin)
    k = rotate(torch.full((8, 4), 0.5), cos, sin)
    scores = q @ k.T
    torch.testing.assert_close(scores[5, 3], scores[7, 5])
    assert not torch.isclose(scores[5, 3], scores[5, 4])


def test_bad_model_sizes() -> None:
    with pytest.raises(ValueError, match="6n"):
        models.cifar_resnet(depth=21)
    with pytest.raises(ValueError, match="heads"):
        models.gpt2(dim=10, heads=3)
    with pytest.raises(ValueError, match="unknown Transformer"):
        models.transformer_plus("7b")
    with pytest.raises(ValueError, match="unknown model"):
        models.build("resnet")
