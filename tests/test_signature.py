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

from ngn_kernels.planning import signature
from ngn_kernels.planning.signature import PythonSignature

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


LOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
DEVICE_ID = 12  # where DLPack's tensor has the number of its device


def test_a_gradient_on_another_device_is_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to assign one, so DLPack is made to tell of one."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    api = ExchangeApi.from_buffer_copy(
        ctypes.string_at(get(getattr(torch.Tensor, ATTRIBUTE), NAME), ctypes.sizeof(ExchangeApi))
    )
    real = LOOK(api.rest[4])
    elsewhere: set[int] = set()

    def look(tensor: int, out: int) -> int:
        answer = real(tensor, out)
        if tensor in elsewhere:
            ctypes.c_int32.from_address(out + DEVICE_ID).value += 1
        return answer

    kept = LOOK(look)
    api.rest[4] = ctypes.cast(kept, ctypes.c_void_p).value
    monkeypatch.setattr(torch.Tensor, ATTRIBUTE, capsule_of(api, NAME))
    optimizer = fresh(NGNMDv1, "reference")
    optimizer.step(loss=1.0)
    native = optimizer._plan.signature
    assert isinstance(native, signature.NativeSignature)
    assert native.check(optimizer.param_groups, optimizer.state) == signature.SAME
    elsewhere.add(id(params_of(optimizer)[1].grad))
    assert native.check(optimizer.param_groups, optimizer.state) == signature.UNUSUAL


def test_a_gradient_on_another_device_is_looked_at_in_python() -> None:
    """Without elements it has no address that would give it away."""
    here = torch.empty(0)
    row = signature.SignatureRow(here, here, {}, (), here)
    assert signature._gradient_address(row, torch.empty(0)) == signature.EMPTY_ADDRESS
    elsewhere = torch.empty(0, device="meta")
    assert signature._gradient_address(row, elsewhere) == signature.UNUSUAL_ADDRESS


def test_parameters_of_another_class_are_looked_at_in_python() -> None:
    class Named(Parameter):
        pass

    p = Named(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = NGNMDv1.simple([p], backend="reference")
    optimizer.step(loss=1.0)
    assert isinstance(optimizer._plan.signature, PythonSignature)
