"""A real Megatron GPT of any size under any TP x PP x DP layout: GPTModel, DDP, DistributedOptimizer.

On a GPU it trains in bf16 with fp32 main weights and moments; on the CPU in fp32, with `demo.megatron_cpu`.
The optimizer's state is laid out in one of two ways: "dp_reshardable" is the optimizer's own memory, without
a copy, which is what a trainer's stall is measured on; "fully_reshardable" loads under any layout and is
gathered by Megatron itself before the save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

FAST, ANY_LAYOUT = "dp_reshardable", "fully_reshardable"

_PIECE_NUMEL = 1 << 24
_MIX = 0x5DEECE66D
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes; DP is what is left of the world."""

    tp: int = 1
    pp: int = 1

    def name(self, world_size: int) -> str:
        return f"TP{self.tp} x PP{self.pp} x DP{world_size // (self.tp * self.pp)}"


def layouts(world_size: int) -> list[Layout]:
    """TP over all, TP 2 x DP, PP 2 x DP, as far as a world of this size has them."""
    found = [Layout(tp=world_size)]
    if world_size % 2 == 0:
        found += [Layout(tp=2), Layout(pp=2)]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the model. Vocabulary and heads divide by any TP size up to 8."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    sequence_length: int
    batch_size: int
    """Samples per data-parallel rank and micro-batch."""

    @property
    def num_heads(self) -> int:
        return max(8, self.hidden_size // 128)

    @classmethod
    def of_params(cls, billions: float) -> Size:
        """A GPT of about so many parameters, with an even number of layers, so that PP 2 splits it."""
        if billions < 0.01:
            return cls(num_layers=2, hidden_size=64, vocab_size=128, sequence_length=16, batch_size=2)
        hidden = 1024 if billions < 0.7 else 2048 if billions < 4 else 4096
        vocab = 32_000
        num_layers = round((billions * 1e9 - 2 * vocab * hidden) / (12 * hidden**2) / 2) * 2
        return cls(
            num_layers=max(2, num_layers),
            hidden_size=hidden,
            vocab_size=vocab,
            sequence_length=1024,
            batch_size=4,
        )


class Job:
    """What one rank trains under a layout. Building one is collective, and ends the one before."""

    def __init__(self, size: Size, layout: Layout, device: str, seed: int = 1) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.size, self.layout, self._device = size, layout, device
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp
        )
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.gpt = self._gpt()
        self.model = self._ddp(self.gpt)
        self.optimizer = self._adam()

    def _gpt(self) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        on_gpu = self._device == "cuda"
        config = TransformerConfig(
            num_layers=self.size.num_layers,
            hidden_size=self.size.hidden_size,
            num_attention_heads=self.size.num_heads,
            tensor_model_parallel_size=self.layout.tp,
            pipeline_model_parallel_size=self.layout.pp,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=not on_gpu,
            bf16=on_gpu,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=self.size.vocab_size,
            max_sequence_length=self.size.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        ).to(self._device)

    def _ddp(self, gpt: Any) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        config = gpt.config
        return DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=False
            ),
            module=Float16Module(config, gpt) if config.bf16 else gpt,
        )

    def _adam(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                weight_decay=0.01,
                bf16=self._device == "cuda",
                params_dtype=self.dtype,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )

    # ---- training

    def forward_backward(self, seed: int, *, forward_only: bool = False) -> float | None:
        """One batch that depends on the seed and the data-parallel rank; the loss on the last stage."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        if not forward_only:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=self._batches(seed),
            model=[self.model],
            num_microbatches=self.layout.pp,
            seq_length=self.size.sequence_length,
            micro_batch_size=self.size.batch_size,
            forward_only=forward_only,
        )
        if not forward_only:
            self.model.finish_grad_sync()
        return float(sum(each["loss"].item() for each in losses) / len(losses)) if losses else None

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def _batches(self, seed: int) -> Iterator[torch.Tensor]:
        from megatron.core import parallel_state

        draw = torch.Generator().manual_seed(1000 * seed + parallel_state.get_data_parallel_rank())
        shape = (self.size.batch_size, self.size.sequence_length + 1)
        for _ in range(self.layout.pp):
            yield torch.randint(self.size.vocab_size, shape, generator=draw).to(self._device)

    def _forward_step(self, batches: Iterator[torch.Tensor], model: Any) -> tuple[Any, Callable[..., Any]]:
        tokens = next(batches)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        length = inputs.shape[1]
        positions = torch.arange(length, device=inputs.device).expand_as(inputs)
        future = torch.ones(1, 1, length, length, dtype=torch.bool, device=inputs.device).triu(1)
        return model(inputs, positions, future, labels=labels), _mean_loss

    # ---- state

    def state(self, optimizer_layout: str, *, is_loading: bool = False) -> dict[str, Any]:
        """The sharded state to save, or to load into; collective."""
        metadata = {"distrib_optim_sharding_type": optimizer_layout}
        model = self.gpt.sharded_state_dict(metadata=dict(metadata))
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(metadata))
        return {"model": model, "optimizer": optimizer}

    def take_over(self, loaded: dict[str, Any]) -> None:
        """Put a loaded state to use."""
        self.gpt.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.float().mean()
    return mean, {"loss": mean.detach()}


def digests(state: Any) -> dict[str, int]:
    """A number per sharded tensor that no layout changes, the same on every rank. Collective.

    Each element's bits count, times a number made of its index in the whole tensor; sums wrap at 64 bits.
    """
    mine: dict[str, int] = {}
    for shard in shards(state, main_only=True):
        mine[shard.key] = _wrapped(mine.get(shard.key, 0) + _digest(shard))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    total: dict[str, int] = {}
    for part in every:
        for key, number in part.items():
            total[key] = _wrapped(total.get(key, 0) + number)
    return total


def shards(state: Any, *, main_only: bool = False) -> Iterator[Any]:
    """The sharded tensors of a state that this rank holds; without the copies of other ranks' on request."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    if isinstance(state, ShardedTensor):
        if state.data is not None and (is_main_replica(state.replica_id) or not main_only):
            yield state
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from shards(value, main_only=main_only)


def _digest(shard: Any) -> int:
    """Piece by piece along the first axis, so that the indices of a large tensor never exist at once."""
    data = shard.data.detach()
    strides = [math.prod(shard.global_shape[axis + 1 :]) for axis in range(len(shard.global_shape))]
    start = sum(offset * stride for offset, stride in zip(shard.global_offset, strides, strict=True))
    strides = strides[len(strides) - data.dim() :]
    data = data if data.dim() else data.reshape(1)
    num_rows = max(1, _PIECE_NUMEL // max(1, data[0].numel()))
    total = 0
    for first in range(0, len(data), num_rows):
        piece = data[first : first + num_rows]
        indices = torch.tensor(start + first * (strides[0] if strides else 0), device=data.device)
        for axis, stride in enumerate(strides):
            place = [-1 if other == axis else 1 for other in range(piece.dim())]
            indices = indices + (torch.arange(piece.shape[axis], device=data.device) * stride).view(place)
        bits = piece.contiguous().view(_INTEGERS[piece.element_size()]).long()
        total = _wrapped(total + int((bits * (indices * _MIX + 1)).sum()))
    return total


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
