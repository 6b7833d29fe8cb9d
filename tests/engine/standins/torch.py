"""As much of torch as a bias on logits needs."""

from __future__ import annotations

float32 = "float32"


class Tensor(list[float]):
    """One dimension, of a type that is remembered."""

    dtype: str = ""


def zeros(size: int, *, dtype: str) -> Tensor:
    tensor = Tensor([0.0] * size)
    tensor.dtype = dtype
    return tensor
