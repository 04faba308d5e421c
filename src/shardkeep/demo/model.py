"""A small, real Megatron job: GPTModel + DDP + DistributedOptimizer + LR scheduler.

    megatron_cpu.enable()                         # no GPU here? see that module
    torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
    job = build(ModelConfig(tp=2))                # on every rank; dp is world size / tp
    state = sharded_state_dict(job)               # what shardkeep, or dist_checkpointing.save, takes
    load_state_dict(job, loaded)                  # what a load returned for such a state

The state is laid out as training frameworks lay it out: "model" (ShardedTensors), "optimizer" in
the `fully_reshardable` format (loads on any TP and DP size) and "scheduler" (plain values).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

# How Megatron lays out the optimizer's state. "Fully reshardable": one tensor per parameter and
# moment, in the parameter's own shape, so that another TP or DP size can load it.
CONTENT_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes, parallel layout and schedule; data-parallel size is world size / `tp`."""

    tp: int = 1
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    vocab_size: int = 16
    max_sequence_length: int = 16
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    decay_steps: int = 1000
    adam_beta2: float = 0.999
    clip_grad: float = 1.0
    seed: int = 1234


@dataclass(slots=True, kw_only=True)
class MegatronJob:
    """What one rank trains, and therefore what a checkpoint must hold."""

    config: ModelConfig
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build(config: ModelConfig) -> MegatronJob:
    """Build this rank's part; collective over the default process group, which must exist.

    The same seed gives the same full weights on every layout: Megatron's CPU initialisation draws
    each full weight and keeps this rank's slice.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.tp)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
    model = _wrap_in_ddp(_gpt(config))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            min_lr=config.learning_rate / 10,
            weight_decay=0.01,
            adam_beta2=config.adam_beta2,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    return MegatronJob(
        config=config, model=model, optimizer=optimizer, scheduler=_scheduler(config, optimizer)
    )


def sharded_state_dict(job: MegatronJob, *, is_loading: bool | None = None) -> dict[str, Any]:
    """The state to save, or the template to load into; collective over the data-parallel group.

    `is_loading` tells Megatron to allocate moments rather than to gather them. Left out, it follows
    from the optimizer: one that has not stepped yet has nothing to gather.
    """
    if is_loading is None:
        is_loading = not _has_moments(job.optimizer)
    metadata = dict(CONTENT_METADATA)  # Megatron adds this layout's process group to the one it gets
    model = job.model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": job.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
        "scheduler": job.scheduler.state_dict(),
    }


def load_state_dict(job: MegatronJob, state: dict[str, Any]) -> None:
    """Put a loaded `sharded_state_dict(job)` back into the model, optimizer and scheduler."""
    job.model.module.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    # Megatron's scheduler adds the saved count to its own: set it back before, or a second load
    # into a job that has trained would count the steps twice.
    job.scheduler.num_steps = 0
    job.scheduler.load_state_dict(state["scheduler"])


def forward(job: MegatronJob, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (batch, length, vocab) of `tokens` (batch, length), whole on every TP rank."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, length)
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    logits: torch.Tensor = job.model(tokens, positions, future)
    return logits


def device() -> torch.device:
    """Where this process trains: its current GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _gpt(config: ModelConfig) -> GPTModel:
    transformer = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        tensor_model_parallel_size=config.tp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_sequence_length,
        parallel_output=False,
    ).to(device())


def _wrap_in_ddp(model: GPTModel) -> DistributedDataParallel:
    return DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False),
        module=model,
    )


def _scheduler(config: ModelConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.learning_rate / 10,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def _has_moments(optimizer: MegatronOptimizer) -> bool:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return all(len(part.optimizer.state) > 0 for part in parts)


def data_parallel() -> tuple[int, int]:
    """(rank, size) of this process in its data-parallel group."""
    return (
        parallel_state.get_data_parallel_rank(),
        dist.get_world_size(parallel_state.get_data_parallel_group()),
    )
