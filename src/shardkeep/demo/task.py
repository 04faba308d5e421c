"""The task: sort a few digits. A reward that anyone can verify, and no data to download.

A prompt is "3 1 2 =", the right answer "1 2 3". The reward is the share of positions that are
right, so that a policy that knows nothing still earns some and has a slope to climb.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

VOCABULARY = [*"0123456789", "=", "<pad>"]
TOKEN_OF = {token: number for number, token in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Token ids of blank-separated tokens; KeyError for one that is not in the vocabulary."""
    return [TOKEN_OF[token] for token in text.split()]


def decode(tokens: list[int]) -> str:
    """The text of token ids, blank-separated."""
    return " ".join(VOCABULARY[token] for token in tokens)


def reward(prompt: list[int], completion: list[int]) -> float:
    """Share of the answer's positions that are right, 0.0 to 1.0."""
    answer = sorted(prompt[:-1])
    return sum(a == c for a, c in zip(answer, completion, strict=True)) / len(answer)


@dataclass(slots=True, kw_only=True)
class PromptLoader:
    """Endless shuffled batches of prompts; `state_dict` is its place, to the prompt."""

    num_digits: int
    batch_size: int
    num_prompts: int = 512
    seed: int = 0
    epoch: int = 0
    position: int = 0
    _prompts: list[list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self._prompts = [
            [*(draw.randrange(10) for _ in range(self.num_digits)), TOKEN_OF["="]]
            for _ in range(self.num_prompts)
        ]

    def next_batch(self) -> list[list[int]]:
        """The next `batch_size` prompts, each of num_digits + 1 tokens."""
        if self.position + self.batch_size > self.num_prompts:
            self.epoch, self.position = self.epoch + 1, 0
        order = list(range(self.num_prompts))
        random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        chosen = order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        return [self._prompts[number] for number in chosen]

    def state_dict(self) -> dict[str, int]:
        """Where the loader is."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go back to where `state_dict` was taken."""
        self.epoch, self.position = state["epoch"], state["position"]


def huggingface_files() -> dict[str, bytes]:
    """A model's config.json and tokenizer.json as Hugging Face lays them out, to lie beside its weights."""
    config = {"architectures": ["GPTModel"], "model_type": "megatron-gpt", "vocab_size": len(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": TOKEN_OF, "unk_token": "<pad>"},
    }
    files = {"config.json": config, "tokenizer.json": tokenizer}
    return {name: json.dumps(content, indent=2).encode() for name, content in files.items()}
