"""Everything that can be set, with the checks that tell a wrong setting in one line."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


class WrongOption(ValueError):
    """A setting that cannot be used; the message is one line and names the option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Settings of `shardkeep demo`; each of the first group is an option of the command line."""

    steps: int = 50
    """Training steps from start to finish."""
    save_every: int = 10
    """Steps between saves."""
    kill_at: int | None = None
    """Step whose save an actor does not survive; the default is the save past the middle."""
    keep: int = 3
    """Committed steps to keep; older ones are pruned."""
    seed: int = 1
    """Seed of weights, prompts and sampling."""
    root: Path | None = None
    """A new or empty directory for checkpoints and report; default: a fresh one in ./shardkeep-demo."""

    def __post_init__(self) -> None:
        if self.save_every < 1:
            raise WrongOption(f"--save-every must be at least 1, got {self.save_every}")
        if self.steps < 3 * self.save_every:
            raise WrongOption(
                f"--steps must be at least three times --save-every ({3 * self.save_every}), got {self.steps}"
            )
        if self.keep < 1:
            raise WrongOption(f"--keep must be at least 1, got {self.keep}")
        if self.seed < 0:
            raise WrongOption(f"--seed must not be negative, got {self.seed}")
        if self.kill_step % self.save_every or not 2 * self.save_every <= self.kill_step < self.steps:
            raise WrongOption(
                f"--kill-at must be a multiple of --save-every from {2 * self.save_every} to before --steps, "
                f"got {self.kill_step}"
            )
        if self.root is not None and self.root.exists() and (self.root.is_file() or any(self.root.iterdir())):
            raise WrongOption(f"--root must be a new or empty directory, got {self.root}")

    @property
    def kill_step(self) -> int:
        """The step whose save is interrupted."""
        if self.kill_at is not None:
            return self.kill_at
        return max(2, round(0.75 * self.steps / self.save_every)) * self.save_every

    @property
    def resume_step(self) -> int:
        """The last step that is committed when the actor dies."""
        return self.kill_step - self.save_every

    def fresh_root(self) -> Path:
        """The directory to work in, created."""
        root = self.root or Path("shardkeep-demo") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        root.mkdir(parents=True, exist_ok=True)
        return root.resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig:
    """The training recipe: small enough for two cores, large enough for the reward to rise in 50 steps."""

    num_digits: int = 3
    prompts_per_step: int = 32
    group_size: int = 8
    updates_per_step: int = 2
    learning_rate: float = 2.5e-3
    adam_beta2: float = 0.95
    decay_updates: int = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How two processes share the model."""

    tp: int
    dp: int

    def __str__(self) -> str:
        return f"TP={self.tp} x DP={self.dp}"
