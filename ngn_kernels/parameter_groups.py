"""The two groups that most training scripts make by hand: with weight decay and without."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def groups(
    model: nn.Module, weight_decay: float, *, decay_embeddings: bool = True, **values: Any
) -> list[dict[str, Any]]:
    """A model's parameters in a group with weight decay and one without, for any optimizer.

    Vectors and scalars (biases, the weights of norms) have no decay, matrices and what has more
    dimensions have it. Frozen parameters are left out, and a tied weight is there once.

    Args:
        model: the module to train.
        weight_decay: of the first group.
        decay_embeddings: False: the weights of ``nn.Embedding`` have none either, and neither has
            a head that is tied to one.
        values: further values of both groups, such as ``lr``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"groups takes the model itself, a torch.nn.Module, not {type(model).__name__}"
        )
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    decayed: list[tuple[str, Tensor]] = []
    others: list[tuple[str, Tensor]] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            embedding = id(param) in embeddings and not decay_embeddings
            (others if param.ndim < 2 or embedding else decayed).append((name, param))
    found = [
        {"params": decayed, "weight_decay": weight_decay, **values},
        {"params": others, "weight_decay": 0.0, **values},
    ]
    found = [group for group in found if group["params"]]
    if not found:
        raise ValueError("the model has no parameter that requires a gradient")
    return found
