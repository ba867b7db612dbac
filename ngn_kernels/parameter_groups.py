"""The groups that most training scripts make by hand: with weight decay and without, and Muon's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
# Names of a model's last layer, and parts of the names of parameters that are tables of vectors.
HEADS = ("lm_head", "head", "classifier", "score")
TABLES = ("embed", "position", "token", "table")


def groups(
    model: nn.Module, weight_decay: float, *, decay_embeddings: bool = True, **values: Any
) -> list[dict[str, Any]]:
    """A model's parameters in a group with weight decay and one without, for any optimizer.

    Norms, vectors and scalars have no decay; matrices and what has more dimensions have it. A parameter
    of several dimensions of which only one is larger than 1, such as a class token, is a vector. Frozen
    parameters are left out, and a tied weight is there once.

    Args:
        model: the module to train.
        weight_decay: of the first group.
        decay_embeddings: False: the weights of ``nn.Embedding`` have none either, and neither has
            a head that is tied to one.
        values: further values of both groups, such as ``lr``.
    """
    if "params" in values:
        raise ValueError(
            "params of the groups are what groups finds: freeze parameters to leave them out, or "
            "change the groups that it returns"
        )
    trained = _trained(model, "groups")
    undecayed = _of_kind(model, NORMS if decay_embeddings else NORMS + EMBEDDINGS)
    decayed: list[tuple[str, Tensor]] = []
    others: list[tuple[str, Tensor]] = []
    for name, param in trained:
        bare = _is_vector(param) or id(param) in undecayed
        (others if bare else decayed).append((name, param))
    return _not_empty(
        [
            {"params": decayed, "weight_decay": weight_decay, **values},
            {"params": others, "weight_decay": 0.0, **values},
        ]
    )


def muon_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    head: str | None = None,
    diagonal: Iterable[str] = (),
    diagonal_lr: float | None = None,
    **values: Any,
) -> list[dict[str, Any]]:
    """A model's parameters in the groups of ``NGNMuon``.

    Spectral are hidden matrices, convolutions, whose matrices are flat, and stacks of matrices, such as
    the weights of experts. Embeddings, the head and what is tied to them, norms, vectors and scalars are
    diagonal: they step along g / D. Norms, vectors and scalars have no weight decay; a parameter of several
    dimensions of which only one is larger than 1, such as a class token, is a vector. Of parameters that
    are in no module of torch.nn, tables of vectors are diagonal, too: those with "embed", "position",
    "token" or "table" in their name, and stacks of one matrix, such as positions of 1 x 197 x 64. Frozen
    parameters are left out, and a tied weight is there once.

    Args:
        model: the module to train.
        weight_decay: of all groups but that of vectors and scalars; by default the optimizer's.
        head: the name of the module whose weights are diagonal as the model's last ones; by default every
            ``nn.Linear`` whose own name is lm_head, head, classifier or score, or else the last one of the
            model; "" for a model without a head.
        diagonal: names of other modules or parameters that are diagonal, such as the first convolution.
        diagonal_lr: lr of the diagonal groups, if it is another one.
        values: further values of all groups, such as ``lr``.
    """
    if taken := {"params", "spectral"} & set(values):
        raise ValueError(
            f"{' and '.join(sorted(taken))} of the groups are what muon_groups finds: name modules and "
            "parameters in head= and diagonal=, or change the groups that it returns"
        )
    if isinstance(diagonal, str):
        raise TypeError(f"diagonal={diagonal!r}: must be a list of names, such as [{diagonal!r}]")
    trained = _trained(model, "muon_groups")
    apart = _of_kind(model, EMBEDDINGS) | _tables(model)
    apart |= _named(model, [*_heads(model, head), *diagonal])
    norms = _of_kind(model, NORMS)
    convolutions = _of_kind(model, _ConvNd)
    found: dict[str, list[tuple[str, Tensor]]] = {
        kind: [] for kind in ("matrices", "flat", "stack", "diagonal", "vectors")
    }
    for name, param in trained:
        if _is_vector(param) or id(param) in norms:
            kind = "vectors"
        elif id(param) in apart:
            kind = "diagonal"
        elif id(param) in convolutions:
            kind = "flat"
        else:
            kind = "matrices" if param.ndim == 2 else "stack"
        found[kind].append((name, param))
    of_diagonal = values if diagonal_lr is None else {**values, "lr": diagonal_lr}
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    spectral: dict[str, bool | str] = {"matrices": True, "flat": "flat", "stack": "stack"}
    return _not_empty(
        [
            {
                "params": params,
                **({"weight_decay": 0.0} if kind == "vectors" else decay),
                "spectral": spectral.get(kind, False),
                **(values if kind in spectral else of_diagonal),
            }
            for kind, params in found.items()
        ]
    )


def _trained(model: nn.Module, function: str) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are not frozen, with their names."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{function} takes the model itself, a torch.nn.Module, not {type(model).__name__}"
        )
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    for name, param in trained:
        if is_lazy(param):
            raise ValueError(
                f"{name} has no shape yet: give the model a batch, then make the groups"
            )
    return trained


def _of_kind(model: nn.Module, kind: type | tuple[type, ...]) -> set[int]:
    """The parameters of modules of a kind; of parametrized ones those that the weight is made of."""
    return {id(p) for m in model.modules() if isinstance(m, kind) for p in m.parameters()}


def _is_vector(param: Tensor) -> bool:
    return sum(size > 1 for size in param.shape) < 2


def _tables(model: nn.Module) -> set[int]:
    """The parameters of modules of the user's own that are vectors side by side, and no matrix."""
    return {
        id(param)
        for module in model.modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, param in module.named_parameters(recurse=False)
        if any(word in name.lower() for word in TABLES) or (param.ndim > 2 and param.shape[0] == 1)
    }


def _heads(model: nn.Module, name: str | None) -> list[str]:
    """The names of the model's last layers, as they are given or usual."""
    if name is not None:
        return [name] if name else []
    linear = [n for n, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [n for n in linear if n.split(".")[-1] in HEADS] or linear[-1:]


def _named(model: nn.Module, names: Iterable[str]) -> set[int]:
    """The parameters with these names, and those of modules with these names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    found = set()
    for name in names:
        if name in modules:
            found |= {id(param) for param in modules[name].parameters()}
        elif name in params:
            found.add(id(params[name]))
        else:
            raise ValueError(f"the model has no module or parameter {name!r}")
    return found


def _not_empty(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [group for group in found if group["params"]]
    if not found:
        raise ValueError("the model has no parameter that requires a gradient")
    return found
