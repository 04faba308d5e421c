"""GRPO: sample a group of answers to each prompt, reward them, push up what beat its group.

Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2) with the clipped ratio of
PPO; no value model and, as the rewards are exact, no KL term.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Logits (batch, length, vocab) of tokens (batch, length)."""


@torch.no_grad()
def sample(
    forward: Forward, prompts: torch.Tensor, num_tokens: int, agree: Callable[[torch.Tensor], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `num_tokens` after each prompt from the process's default generator.

    Sequences are a few tokens long, so each token takes one forward pass over the whole sequence.
    `agree` makes the ranks of a tensor-parallel group hold the same draw.

    Returns:
        Tokens (batch, prompt + num_tokens) and the log-probabilities (batch, num_tokens) of the
        drawn ones.
    """
    tokens, old = prompts, []
    for _ in range(num_tokens):
        log_probabilities = forward(tokens)[:, -1].log_softmax(-1)
        drawn = torch.multinomial(log_probabilities.exp(), 1)
        agree(drawn)
        tokens = torch.cat([tokens, drawn], dim=1)
        old.append(log_probabilities.gather(-1, drawn))
    return tokens, torch.cat(old, dim=1)


def log_probs(forward: Forward, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Log-probabilities (batch, num_tokens) of the last `num_tokens` of each sequence."""
    logits = forward(tokens[:, :-1])[:, -num_tokens:]
    drawn = tokens[:, -num_tokens:].unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, drawn).squeeze(-1)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Each reward (groups, group size) against its group's mean, in units of the group's spread."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + 1e-4)


def loss(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: float = 0.2) -> torch.Tensor:
    """Clipped policy-gradient loss, a mean over tokens; `new` and `old` are (batch, num_tokens)."""
    ratio = (new - old).exp()
    weight = advantage.unsqueeze(-1)
    return -torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight).mean()
