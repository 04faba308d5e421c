"""The main job, `shardkeep demo`: GRPO on a Megatron model in Ray actors, killed and resumed."""
