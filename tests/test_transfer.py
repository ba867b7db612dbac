"""Numbers that the host writes for a device other than a GPU, on a device that can be looked at."""

from __future__ import annotations

import numpy as np
import torch

from ngn_kernels.planning.transfer import Copied


def test_numbers_are_sent_when_they_have_changed() -> None:
    target, values = torch.zeros(3, dtype=torch.float64), np.zeros(3)
    numbers = Copied(target, values)
    for sent in ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], [0.0, 0.0, 0.0]):
        values[:] = sent
        numbers.send()
        assert target.tolist() == sent
    target[1] = 7.0
    numbers.send()
    assert target.tolist() == [0.0, 7.0, 0.0], "what has not changed is not sent again"
