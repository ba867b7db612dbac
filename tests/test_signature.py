"""Which form of the signature a plan gets: the native one only where it understands torch's tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from algorithms import NGNMDv1
from helpers import fresh, params_of, random_gradients
from pair import Pair
from torch.nn import Parameter

from ngn_kernels import signature
from ngn_kernels.signature import PythonSignature

ATTRIBUTE = "__dlpack_c_exchange_api__"

pytestmark = pytest.mark.skipif(
    signature.NativeSignature is None or not hasattr(torch.Tensor, ATTRIBUTE),
    reason="the C++ signature is not built, or switched off, or this torch has no exchange API",
)


class ExchangeApi(ctypes.Structure):
    """As far as a reader of any version may look: the version, then another one's functions."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("rest", ctypes.c_void_p * 6),
    )


def capsule_of(api: ExchangeApi, name: bytes) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return new(ctypes.addressof(api), name, None)


NAME = b"dlpack_exchange_api"
NOWHERE = (ctypes.c_void_p * 6)(*[1] * 6)
NEWER, EMPTY, KNOWN = ExchangeApi(2, 0, NOWHERE), ExchangeApi(1, 3), ExchangeApi(1, 3, NOWHERE)
OTHERS = {
    "another major version": capsule_of(NEWER, NAME),
    "no way to look at a tensor": capsule_of(EMPTY, NAME),
    "another kind of capsule": capsule_of(KNOWN, b"something_else"),
    "an address": ctypes.addressof(KNOWN),
    "None": None,
}


def of_a_step() -> Any:
    """The signature of an optimizer that took two steps beside the oracle."""
    optimizer = fresh(NGNMDv1, "reference")
    pair = Pair(NGNMDv1, optimizer)
    for k in range(2):
        random_gradients(params_of(optimizer), seed=k)
        pair.step(1.0)
        pair.check_trajectory()
    return optimizer._plan.signature


def test_this_torch_is_understood() -> None:
    assert isinstance(of_a_step(), signature.NativeSignature)


@pytest.mark.parametrize("api", OTHERS.values(), ids=OTHERS)
def test_another_exchange_api_falls_back(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, ATTRIBUTE, api)
    assert isinstance(of_a_step(), PythonSignature)


def test_parameters_of_another_class_are_looked_at_in_python() -> None:
    class Named(Parameter):
        pass

    p = Named(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = NGNMDv1.simple([p], backend="reference")
    optimizer.step(loss=1.0)
    assert isinstance(optimizer._plan.signature, PythonSignature)
