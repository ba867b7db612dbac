"""Bad input: an error that names the argument, the value and what is valid; nothing changes."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from algorithms import (
    ALGORITHMS,
    EVERY,
    NGN,
    NGND,
    NGND_RMS,
    NGNM,
    Algorithm,
    DecNGNMDv1,
    NGNMDv1,
    NGNMDv2,
)
from helpers import (
    GPU_ENGINES,
    assert_unchanged,
    params_of,
    random_columns,
    random_gradients,
    snapshot,
    unchanged,
    with_grad,
)
from layouts import LAYOUTS
from pair import Pair
from steps import train
from torch.nn import Parameter

from ngn_kernels import SkippedStepWarning
from ngn_kernels.backends import availability
from ngn_kernels.planning import signature

NAN, INF = float("nan"), float("inf")

# Algorithm, argument, bad value, what the message must say besides the argument's name.
HYPER_PARAMETERS: list[tuple[Algorithm, str, Any, str]] = [
    *((algorithm, "lr", -0.5, r"-0\.5") for algorithm in ALGORITHMS),
    *((algorithm, "weight_decay", -0.25, r"-0\.25") for algorithm in ALGORITHMS),
    (NGN, "lr", NAN, "nan"),
    (NGN, "lr", INF, "inf"),
    (NGN, "lr", "fast", "fast"),
    (NGN, "lr", torch.tensor([0.1, 0.2]), ""),
    (NGN, "lr", torch.tensor(-0.5), r"-0\.5"),
    (NGN, "weight_decay", NAN, "nan"),
    (NGNM, "momentum", 1.0, r"1\.0"),
    (NGNM, "momentum", -0.1, r"-0\.1"),
    (NGNM, "momentum", NAN, "nan"),
    (NGNMDv1, "betas", (1.0, 0.999), r"1\.0"),
    (NGNMDv1, "betas", (0.9, 1.0), r"1\.0"),
    (NGNMDv2, "betas", (-0.1, 0.999), r"-0\.1"),
    (NGNMDv2, "betas", (0.9, NAN), "nan"),
    (NGNMDv2, "betas", (0.9,), r"0\.9"),
    (NGNMDv2, "betas", 0.9, r"0\.9"),
    (NGNMDv1, "eps", 0.0, r"0\.0"),
    (DecNGNMDv1, "eps", -1e-8, "-1e-08"),
    (NGND_RMS, "eps", NAN, "nan"),
    (NGND_RMS, "beta2", 1.5, r"1\.5"),
    (NGND_RMS, "beta2", -0.5, r"-0\.5"),
]
OPTIONS: list[tuple[str, Any, str]] = [
    ("max_grad_norm", -1.0, r"-1\.0"),
    ("max_grad_norm", NAN, "nan"),
    ("loss_floor", NAN, "nan"),
    ("loss_floor", INF, "inf"),
    ("backend", "gpu", "gpu"),
]
# What each error says is allowed.
RANGES = {
    "lr": "must be in [0, inf)",
    "weight_decay": "must be in [0, inf)",
    "momentum": "must be in [0, 1)",
    "beta2": "must be in [0, 1)",
    "betas": "in [0, 1)",
    "eps": "must be in (0, inf)",
    "max_grad_norm": "must be None or in (0, inf)",
    "loss_floor": "must be a finite number",
    "backend": "choose one of 'auto', 'cuda', 'triton', 'cpu', 'reference'",
}


def good(algorithm: Algorithm, backend: str, **options: Any) -> Any:
    """An optimizer after one step, with gradients for the next."""
    columns = random_columns([[(3,), (5, 7)], [(40,)]])
    optimizer = algorithm.build(columns, backend=backend, **options)
    for k in range(2):
        random_gradients(params_of(optimizer), seed=k)
        if k == 0:
            optimizer.step(loss=1.0)
    return optimizer


@pytest.mark.parametrize(
    ("algorithm", "argument", "value", "says"),
    HYPER_PARAMETERS,
    ids=lambda value: str(value).replace("\n", " "),
)
@pytest.mark.parametrize("place", ["constructor", "group", "add_param_group"])
def test_hyper_parameters(
    algorithm: Algorithm, argument: str, value: Any, says: str, place: str
) -> None:
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(3))
    optimizer = algorithm.simple([q])
    kinds = ValueError if isinstance(value, float) else (ValueError, TypeError)
    with pytest.raises(kinds, match=rf"(?s){argument}.*{says}") as caught:
        if place == "constructor":
            algorithm.simple([p], **{argument: value})
        elif place == "group":
            algorithm.simple([{"params": [p], argument: value}])
        else:
            optimizer.add_param_group({"params": [p], argument: value})
    several = isinstance(value, torch.Tensor) and value.numel() > 1
    wanted = "must be one floating-point number" if several else RANGES[argument]
    assert str(caught.value).endswith(wanted)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("argument", "value", "says"), OPTIONS, ids=str)
@pytest.mark.parametrize("algorithm", [NGN, NGNMDv1, NGNMDv2], ids=str)
def test_options(algorithm: Algorithm, argument: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){argument}.*{says}") as caught:
        algorithm.simple([Parameter(torch.ones(2))], **{argument: value})
    assert str(caught.value).endswith(RANGES[argument])


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gpu") as caught:
        NGN.simple([Parameter(torch.ones(2))], backend="gpu")
    for name in ("auto", *availability()):
        assert name in str(caught.value)


@pytest.mark.parametrize("name", availability())
def test_backend_that_cannot_run_raises_with_the_reason(name: str) -> None:
    reason = availability()[name]
    if reason is None:
        pytest.skip("it can run here")
    p = with_grad(torch.ones(2))
    with pytest.raises((RuntimeError, ValueError, ImportError)) as caught:
        NGN.simple([p], backend=name).step(loss=1.0)
    assert name in str(caught.value) and reason in str(caught.value)
    assert torch.equal(p, torch.ones(2))


def test_unknown_preconditioner() -> None:
    with pytest.raises(ValueError, match=r"(?s)preconditioner.*adam.*rms"):
        NGND.simple([Parameter(torch.ones(2))], preconditioner="adam")


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match="nesterov"):
        NGNM.simple([Parameter(torch.ones(2))], nesterov=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("loss_floor", 1.0),
        ("max_grad_norm", 1.0),
        ("backend", "reference"),
        ("preconditioner", "other"),
        ("replicas", 1),
    ],
)
@pytest.mark.parametrize("algorithm", [NGND, NGNMDv1], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["constructor", "add_param_group"])
def test_option_of_the_optimizer_in_a_group(
    algorithm: Algorithm, option: str, value: Any, late: bool
) -> None:
    group = {"params": [Parameter(torch.ones(2))], option: value}
    optimizer = algorithm.simple([Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=option):
        optimizer.add_param_group(group) if late else algorithm.simple([group])
    assert len(optimizer.param_groups) == 1


TYPOS = {
    "weight_decy": "did you mean weight_decay?",
    "wieght_decay": "did you mean weight_decay?",
    "LR": "did you mean lr?",
    "beta": "did you mean betas?",
    "step_caps": "did you mean step_cap?",
    "loss_targets": "did you mean loss_target?",
    "max_grad_nrom": "did you mean max_grad_norm?",
    "learning_rate": "it is lr here",
    "fused": "leave it out: every step is fused",
    "foreach": "leave it out: every step is fused",
    "capturable": "leave it out",
    "momentum_decay": "leave it out: it is an option of another optimizer",
    "rho": "leave it out: it is an option of another optimizer",
}


@pytest.mark.parametrize(("name", "says"), TYPOS.items(), ids=TYPOS)
@pytest.mark.parametrize("value", [True, None, 0.1])
def test_a_group_with_a_name_that_nobody_reads(name: str, says: str, value: Any) -> None:
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(3))
    optimizer = NGNMDv1.simple([q])
    told = rf"^NGNMDv1 has no option {name}, which a group has: {re.escape(says)}"
    with pytest.raises(TypeError, match=told):
        NGNMDv1.simple([{"params": [p], name: value}])
    with pytest.raises(TypeError, match=told):
        optimizer.add_param_group({"params": [p], name: value})
    assert len(optimizer.param_groups) == 1


OWN_NAMES = (
    *("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "base_momentum"),
    *("lr_scale", "lr_mult", "wd_mult", "name", "group_name", "layer_id", "is_bias", "tags"),
    *("no_weight_decay", "weight_decay_scale", "stage", "depth", "step"),
)


def test_a_group_may_have_names_of_the_users_own(backend: str) -> None:
    """What schedulers, trainers and layer-wise rates keep there; and what another group says."""
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(3))
    optimizer = NGNMDv1.simple([{"params": [p], **dict.fromkeys(OWN_NAMES, 0.5)}], backend=backend)
    optimizer.add_param_group({**optimizer.param_groups[0], "params": [q]})
    for saved in (optimizer.param_groups, optimizer.state_dict()["param_groups"]):
        again = NGNMDv1.simple([{**g, "params": [p]} for g in saved[:1]], backend=backend)
        assert {name: again.param_groups[0][name] for name in OWN_NAMES} == dict.fromkeys(
            OWN_NAMES, 0.5
        )
    random_gradients([p, q], seed=0)
    optimizer.step(loss=1.0)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(loss=1.0)
    assert all(group["lr_scale"] == 0.5 for group in optimizer.param_groups)


LOSSES: dict[str, tuple[Any, str]] = {
    "two elements": (torch.tensor([1.0, 2.0]), r"element|scalar|mean|sum"),
    "no elements": (torch.tensor([]), r"element|scalar|mean|sum"),
    "matrix": (torch.ones(2, 2), r"element|scalar|mean|sum"),
    "negative": (-1.0, "loss_floor"),
    "negative tensor": (torch.tensor(-1.0), "loss_floor"),
    "string": ("0.5", "str|number"),
    "list": ([1.0], "list|number"),
    "dict": ({"loss": 1.0}, "dict|number"),
    "complex": (1 + 2j, "complex|number|real"),
    "complex tensor": (torch.tensor(1 + 2j), "complex|number|real"),
}


@pytest.mark.parametrize("algorithm", [NGN, NGNMDv1, NGNMDv2], ids=str)
@pytest.mark.parametrize(("loss", "says"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("way", ["keyword", "closure", "set_loss"])
def test_bad_loss(algorithm: Algorithm, backend: str, loss: Any, says: str, way: str) -> None:
    optimizer = good(algorithm, backend)
    before = snapshot(optimizer)
    with pytest.raises((TypeError, ValueError), match=rf"(?s)loss.*({says})|({says}).*loss"):
        if way == "keyword":
            optimizer.step(loss=loss)
        elif way == "closure":
            optimizer.step(lambda: loss)
        else:
            optimizer.set_loss(loss)
            optimizer.step()
    assert_unchanged(optimizer, before)
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("weight", [-1.0, NAN, "heavy"])
def test_bad_weight_of_set_loss(backend: str, weight: Any) -> None:
    optimizer = good(NGNMDv1, backend)
    with pytest.raises(ValueError, match=rf"^weight={weight!r}: must be in \(0, inf\)"):
        optimizer.set_loss(1.0, weight=weight)
    optimizer.step(loss=1.0)  # nothing is pending


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
@EVERY
def test_non_finite_loss_says_so(algorithm: Algorithm, backend: str, loss: float) -> None:
    optimizer = good(algorithm, backend)
    with unchanged(optimizer), pytest.warns(SkippedStepWarning, match=": the loss is not finite"):
        optimizer.step(loss=loss)


@pytest.mark.parametrize("value", [NAN, INF])
@EVERY
def test_non_finite_gradient_says_so(algorithm: Algorithm, backend: str, value: float) -> None:
    optimizer = good(algorithm, backend)
    params_of(optimizer)[1].grad[2, 3] = value
    with pytest.warns(RuntimeWarning, match="gradient"):
        optimizer.step(loss=1.0)


@EVERY
def test_sparse_gradient(algorithm: Algorithm, backend: str) -> None:
    """The error names the parameter; the dense parameters beside it do not move either."""
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    dense = Parameter(torch.ones(4))
    params = [("encoder.table", embedding.weight), ("head", dense)]
    optimizer = algorithm.simple(params, backend=backend)
    (embedding(torch.tensor([1, 3])).sum() + dense.sum()).backward()
    before = snapshot(optimizer)
    told = r"^parameter 'encoder\.table' 0 of group 0 .* has a gradient of layout torch\.sparse_coo"
    with pytest.raises(TypeError, match=told):
        optimizer.step(loss=1.0)
    assert_unchanged(optimizer, before)


def test_sparse_gradient_without_names(backend: str) -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = NGNMDv1.simple(
        [{"params": [Parameter(torch.ones(2))]}, {"params": embedding.parameters()}],
        backend=backend,
    )
    embedding(torch.tensor([1, 3])).sum().backward()
    before = snapshot(optimizer)
    told = r"^parameter 0 of group 1 \(shape \(5, 3\)\) has a gradient of layout torch\.sparse_coo"
    with pytest.raises(TypeError, match=told):
        optimizer.step(loss=1.0)
    assert_unchanged(optimizer, before)


KINDS = {
    "complex with a real gradient": (torch.complex64, torch.float32, r"param\.grad\.to\("),
    "double complex": (torch.complex128, torch.float64, r"param\.grad\.to\("),
    "complex with a double gradient": (torch.complex64, torch.float64, r"param\.grad\.to\("),
    "real with a complex gradient": (torch.float32, torch.complex64, r"param\.grad\.real"),
    "double with a complex gradient": (torch.float64, torch.complex128, r"param\.grad\.real"),
}


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch refuses them itself")
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize(("kind", "other", "says"), KINDS.values(), ids=KINDS)
def test_a_gradient_that_is_complex_where_its_parameter_is_not(
    backend: str,
    kind: torch.dtype,
    other: torch.dtype,
    says: str,
    layout: str,
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the first step, and between steps that have gradients of the parameter's own kind."""
    if backend in GPU_ENGINES and torch.float64 in (kind.to_real(), other.to_real()):
        pytest.skip("it has no float64")
    if not native:
        monkeypatch.setattr(signature, "NativeSignature", None)
    p = Parameter(LAYOUTS[layout](torch.ones(9, dtype=kind)))
    q = Parameter(torch.ones(4, dtype=kind.to_real()))
    p.grad_dtype = None
    optimizer = NGNMDv1.simple([("p", p), ("q", q)], backend=backend)
    for k in range(5):
        pair = Pair(NGNMDv1, optimizer)
        random_gradients([p, q], seed=k)
        grad = p.grad
        before = snapshot(optimizer)
        p.grad = torch.ones(9, dtype=other)
        with pytest.raises(TypeError, match=rf"parameter 'p' 0 of .* its gradient {other}.*{says}"):
            optimizer.step(loss=1.0)
        assert_unchanged(optimizer, before)
        if k > 1:  # steps with and without a refused one between them
            p.grad = grad
            for _ in range(2):
                pair.checked_step(1.0)


class Wrapper(torch.Tensor):
    """A tensor that has a shape but no memory."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, shape)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def freed(shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("make", [Wrapper, freed])
def test_gradient_without_memory(make: Any, backend: str) -> None:
    """At the first step and at a later one."""
    for steps in (0, 1):
        optimizer = good(NGNMDv1, backend)
        for _ in range(steps):
            optimizer.step(loss=1.0)
        before = snapshot(optimizer)
        p = params_of(optimizer)[1]
        p.grad = make(tuple(p.shape))
        with pytest.raises(TypeError, match="gradient without memory"):
            optimizer.step(loss=1.0)
        assert_unchanged(optimizer, before)


def test_parameter_without_memory(backend: str) -> None:
    optimizer = good(NGNMDv1, backend)
    optimizer.step(loss=1.0)
    p = params_of(optimizer)[1]
    p.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="no memory"):
        optimizer.step(loss=1.0)


def negated(shape: tuple[int, ...]) -> torch.Tensor:
    """The only lazily negated tensors there are: imaginary parts of conjugates."""
    result = torch.complex(torch.zeros(shape), -torch.ones(shape)).conj().imag
    assert result.is_neg()
    return result


def test_a_lazily_negated_gradient_of_one_element(backend: str) -> None:
    """It is dense, as one of several elements never is."""
    results = []
    for make in (negated, torch.ones):
        p = torch.nn.Parameter(torch.zeros(()))
        optimizer = NGNMDv1.simple([p], backend=backend)
        for _ in range(2):
            p.grad = make(())
            optimizer.step(loss=1.0)
        results.append(float(p))
    assert results[0] == results[1] < 0


@pytest.mark.parametrize("lazy", [torch._efficientzerotensor, negated])
def test_gradient_with_lazy_values(lazy: Any, backend: str) -> None:
    """torch's zeros without memory and its lazily negated tensors count as what they show."""
    optimizer, plain = good(NGNMDv1, backend), good(NGNMDv1, backend)
    for opt, make in ((optimizer, lazy), (plain, lambda shape: lazy(shape).clone())):
        opt.step(loss=1.0)
        p = params_of(opt)[1]
        p.grad = make(tuple(p.shape))
        opt.step(loss=1.0)
    assert snapshot(optimizer) == snapshot(plain)


def of_another_algorithm(backend: str) -> dict[str, Any]:
    return good(NGNMDv2, backend).state_dict()


def with_wrong_shapes(backend: str) -> dict[str, Any]:
    saved = copy.deepcopy(good(NGNMDv1, backend).state_dict())
    saved["state"][1]["exp_avg_sq"] = torch.zeros(7, 5)
    return saved


def with_more_groups(backend: str) -> dict[str, Any]:
    optimizer = good(NGNMDv1, backend)
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
    return optimizer.state_dict()


def with_other_groups(backend: str) -> dict[str, Any]:
    columns = random_columns([[(3,)], [(5, 7), (40,)]])
    return NGNMDv1.build(columns, backend=backend).state_dict()


def of_adamw(backend: str) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(
        [{"params": column} for column in random_columns([[(3,), (5, 7)], [(40,)]])]
    )
    random_gradients(params_of(optimizer), seed=0)
    optimizer.step()
    return optimizer.state_dict()


BAD_CHECKPOINTS = {
    of_another_algorithm: "NGNMDv2(.|\n)*NGNMDv1|NGNMDv1(.|\n)*NGNMDv2",
    with_wrong_shapes: "exp_avg_sq",
    with_more_groups: "group",
    with_other_groups: "group",
    of_adamw: "write optimizer.load_adamw_state_dict",
}


@pytest.mark.parametrize(
    ("bad", "says"), BAD_CHECKPOINTS.items(), ids=lambda v: getattr(v, "__name__", "")
)
def test_state_dict_that_does_not_fit(backend: str, bad: Any, says: str) -> None:
    optimizer = good(NGNMDv1, backend)
    before = snapshot(optimizer)
    groups = copy.deepcopy([{**g, "params": None} for g in optimizer.param_groups])
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(bad(backend))
    assert_unchanged(optimizer, before)
    assert [{**g, "params": None} for g in optimizer.param_groups] == groups
    optimizer.step(loss=1.0)


def test_ngnd_checkpoints_know_their_preconditioner(backend: str) -> None:
    """Plain NGN-D has no second moment: loading it under RMS would restart it in silence."""
    plain, rms = good(NGND, backend), good(NGND_RMS, backend)
    with unchanged(rms), pytest.raises(ValueError):
        rms.load_state_dict(plain.state_dict())


def build_and_step(params: Any, backend: str) -> None:
    """Construct and step; one of the two must refuse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = NGNMDv1.simple(params, backend=backend)
    train(optimizer, 0)


def shared(first: slice, second: slice) -> list[tuple[str, torch.Tensor]]:
    base = torch.zeros(10)
    return [("left", Parameter(base[first])), ("right", Parameter(base[second]))]


OVERLAPS = {
    "a common element": shared(slice(0, 6), slice(5, 10)),
    "one inside the other": shared(slice(0, 10), slice(2, 4)),
    "the same memory": shared(slice(0, 10), slice(0, 10)),
    "strided on dense": shared(slice(0, 10, 2), slice(3, 6)),
}


@pytest.mark.parametrize("params", OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_parameters(backend: str, params: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(ValueError, match=r"(?s)left.*right|right.*left"):
        build_and_step(params, backend)
    assert all((p == 0).all() for _, p in params)


def test_parameter_that_overlaps_itself(backend: str) -> None:
    p = Parameter(torch.zeros(1).expand(4))
    with pytest.raises(ValueError, match="wide"):
        build_and_step([("wide", p)], backend)
    assert (p == 0).all()


def test_overlap_that_appears_later(backend: str) -> None:
    """Swapping `.data` can make parameters overlap after the optimizer was built."""
    optimizer = good(NGNMDv1, backend)
    params = params_of(optimizer)
    params[2].data = params[1].data.view(-1)[:30]
    params[2].grad = torch.ones(30)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError):
        optimizer.step(loss=1.0)
    assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True))


@pytest.mark.parametrize("layout", ["one group", "two groups", "add_param_group"])
def test_the_same_parameter_twice(backend: str, layout: str) -> None:
    p = Parameter(torch.zeros(4))
    with pytest.raises(ValueError):
        if layout == "one group":
            build_and_step([p, p], backend)
        elif layout == "two groups":
            build_and_step([{"params": [p]}, {"params": [p]}], backend)
        else:
            NGNMDv1.simple([p], backend=backend).add_param_group({"params": [p]})
    assert (p == 0).all()


def test_integer_parameters(backend: str) -> None:
    p = torch.ones(3, dtype=torch.int64)
    optimizer = NGN.simple([p], backend=backend)
    p.grad = torch.ones(3, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 .* is torch\.int64"):
        optimizer.step(loss=1.0)
    assert p.tolist() == [1, 1, 1] and not optimizer.state


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        NGN.simple([])


def test_scheduler_that_breaks_a_value(backend: str) -> None:
    """Values are checked again at the step, since schedulers and users write into groups."""
    optimizer = good(NGNMDv1, backend)
    before = snapshot(optimizer)
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"(?s)lr.*-1\.0"):
        optimizer.step(loss=1.0)
    assert_unchanged(optimizer, before)
