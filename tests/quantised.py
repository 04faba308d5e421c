"""A tensor class as Transformer Engine and torchao have them: a wrapper without memory of its own, which
holds its values as int8 with a scale and computes with what `dequantize()` gives.
"""

from __future__ import annotations

from typing import Any

import torch


class Quantised(torch.Tensor):
    """Shows the shape and dtype of the tensor it was made of. `copy_` quantises again, with a new scale."""

    values: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )

    def __init__(self, tensor: torch.Tensor) -> None:
        self.set(tensor)

    def set(self, tensor: torch.Tensor) -> None:
        self.scale = max(float(tensor.abs().max()), 1e-30) / 127
        self.values = (tensor / self.scale).round().to(torch.int8)

    def dequantize(self) -> torch.Tensor:
        return self.values.to(self.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            twin = cls.__new__(cls, args[0])
            twin.values, twin.scale = args[0].values, args[0].scale
            return twin
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].set(args[1])
            return args[0]
        plain = [a.dequantize() if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))
