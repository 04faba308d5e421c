"""Let an unmodified Megatron-core train on a machine without a GPU.

Megatron-core names the CUDA device outright in about fifty places, and without Transformer Engine
or Apex its distributed optimizer cannot load what it saved. `enable()` fills both gaps, once per
process, and leaves alone what the machine already has:

- no CUDA: factories given device="cuda" build on the CPU, `Tensor.type()` reports torch.cuda.*, and
  the few torch.cuda calls on the training path get CPU counterparts. The patches are plain
  functions, not a TorchFunctionMode: a mode is local to one thread, and a Ray actor has many.
  Megatron's fused kernels, unused here, are not handed to torch.compile: that saves 3 s of imports.
- no fused Adam: `StepInGroupAdam` takes its place, and Megatron's flags say that a fused one is in
  use. torch's own Adam keeps `step` per parameter, which 0.16's `fully_reshardable` load does not
  expect (KeyError: 'step').

What remains for the caller: the local layer spec, use_cpu_initialization, dropout 0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


def enable() -> None:
    """Prepare this process for Megatron; call before importing or building a model. Safe to call again."""
    if not torch.cuda.is_available():
        _stand_in_for_cuda()
    if not any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex")):
        _stand_in_for_fused_adam()


class StepInGroupAdam(torch.optim.Optimizer):
    """AdamW that counts steps in the param group, as Apex's and Transformer Engine's FusedAdam do."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("StepInGroupAdam decouples weight decay; got adam_w_mode=False")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update from `.grad`; `closure` is refused, since Megatron passes none."""
        if closure is not None:
            raise ValueError("StepInGroupAdam takes no closure")
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for p in params:
                self._update(p, group)

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[p], p.grad
        assert grad is not None
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denom = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["exp_avg"], denom, value=-group["lr"] / (1 - beta1 ** group["step"]))


def _stand_in_for_fused_adam() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = StepInGroupAdam, False
    distrib_optimizer.Adam = StepInGroupAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


@functools.cache
def _stand_in_for_cuda() -> None:
    with _nothing_compiled():
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    type_of = torch.Tensor.type

    def cuda_type(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_of(self, dtype, **kwargs)
        return type_of(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    _stand_in_for_cuda_rng()


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    compile_function = torch.compile
    torch.compile = lambda model=None, **options: model if model else (lambda function: function)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return build


def _stand_in_for_cuda_rng() -> None:
    """One CPU generator plays the CUDA generator, so that Megatron's tracker has real states."""
    from megatron.core.tensor_parallel import random as megatron_random

    generator = torch.Generator()

    @contextlib.contextmanager
    def no_fork(self: Any, name: str = "") -> Iterator[None]:
        yield  # dropout is 0 on the CPU: nothing draws from the tracked states

    torch.cuda.manual_seed = generator.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda device="cuda": generator.get_state()
    torch.cuda.set_rng_state = lambda state, device="cuda": generator.set_state(state)  # type: ignore[assignment]
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: generator.set_state(state)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: generator.get_state()
    megatron_random.CudaRNGStatesTracker.fork = no_fork
