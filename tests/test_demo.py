"""The main job: its parts by value, its command line, and the whole story end to end."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardkeep import cli
from shardkeep.demo import grpo, task
from shardkeep.demo.config import DemoConfig, WrongOption
from shardkeep.demo.events import EventLog


def test_reward_is_the_share_of_right_positions() -> None:
    prompt = task.encode("3 1 2 =")
    assert task.reward(prompt, task.encode("1 2 3")) == 1.0
    assert task.reward(prompt, task.encode("1 3 2")) == pytest.approx(1 / 3)
    assert task.reward(prompt, task.encode("= <pad> 0")) == 0.0


def test_tokens_decode_to_what_was_encoded() -> None:
    assert task.decode(task.encode("9 0 = <pad>")) == "9 0 = <pad>"


def test_tokenizer_file_names_every_token() -> None:
    vocabulary = json.loads(task.huggingface_files()["tokenizer.json"])["model"]["vocab"]
    assert vocabulary == {token: number for number, token in enumerate(task.VOCABULARY)}


def test_loader_continues_where_its_state_was_taken_also_across_an_epoch() -> None:
    loader = task.PromptLoader(num_digits=3, batch_size=16, num_prompts=40, seed=7)
    loader.next_batch()
    state = loader.state_dict()
    expected = [loader.next_batch() for _ in range(5)]
    assert loader.epoch == 2

    resumed = task.PromptLoader(num_digits=3, batch_size=16, num_prompts=40, seed=7)
    resumed.load_state_dict(state)
    assert [resumed.next_batch() for _ in range(5)] == expected


def test_loader_shows_every_prompt_once_an_epoch() -> None:
    loader = task.PromptLoader(num_digits=2, batch_size=8, num_prompts=32, seed=1)
    first, second = ([loader.next_batch() for _ in range(4)] for _ in range(2))
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
    assert first != second


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    torch.testing.assert_close(
        grpo.advantages(rewards), torch.tensor([[-1.0, 1.0], [0.0, 0.0]]), atol=1e-3, rtol=0
    )


def test_loss_stops_pulling_once_the_ratio_leaves_the_clip_range() -> None:
    old = torch.zeros(2, 1)
    new = torch.tensor([[0.1], [1.0]], requires_grad=True)
    grpo.loss(new, old, torch.ones(2)).backward()
    assert new.grad is not None
    assert new.grad[0].item() == pytest.approx(-torch.tensor(0.1).exp().item() / 2)
    assert new.grad[1].item() == 0.0


def test_samples_come_with_their_log_probabilities() -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    tokens, old = grpo.sample(lambda t: table[t], torch.zeros(4, 2, dtype=torch.long), 3, lambda drawn: None)
    assert tokens.shape == (4, 5)
    torch.testing.assert_close(old, grpo.log_probs(lambda t: table[t], tokens, 3))


def test_followers_of_the_record_see_whole_lines_once(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    events.emit("step", step=1)
    seen, position = events.new_events(0)
    with events.path.open("a") as file:
        file.write('{"kind": "half')
    assert [event["step"] for event in seen] == [1]
    assert events.new_events(position) == ([], position)


def test_default_kill_leaves_a_step_to_resume_from() -> None:
    for steps in range(3, 70):
        config = DemoConfig(steps=steps, save_every=1)
        assert 1 <= config.resume_step < config.kill_step < steps


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--steps 5", "--steps must be at least three times --save-every (30), got 5"),
        ("--steps many", 'Invalid value for --steps: unable to convert "many" into int.'),
        ("--save-every 0", "--save-every must be at least 1, got 0"),
        ("--kill-at 13", "--kill-at must be a multiple of --save-every from 20 to before --steps, got 13"),
        ("--kill-at 50", "--kill-at must be a multiple of --save-every from 20 to before --steps, got 50"),
        ("--keep 0", "--keep must be at least 1, got 0"),
        ("--seed -1", "--seed must not be negative, got -1"),
        ("--root .", "--root must be a new or empty directory, got ."),
        ("--colour red", "Unknown option: --colour."),
    ],
)
def test_wrong_option_gives_one_line(
    arguments: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["demo", *arguments.split()]) == cli.WRONG_USE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"shardkeep: {expected}")
    assert err.count("\n") == 1


def test_wrong_option_error_is_a_value_error() -> None:
    with pytest.raises(WrongOption, match="--steps"):
        DemoConfig(steps=1)
    assert issubclass(WrongOption, ValueError)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.megatron
@pytest.mark.timeout(300)
def test_demo_end_to_end(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "shardkeep.cli",
            "demo",
            "--steps",
            "12",
            "--save-every",
            "3",
            "--root",
            str(root),
        ],
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    events = list(EventLog(root / "events.jsonl"))
    checks = [event for event in events if event["kind"] == "check"]
    assert len(checks) == 8
    assert all(event["held"] for event in checks)
    assert [event["step"] for event in events if event["kind"] == "killed"] == [9]
    assert [event["step"] for event in events if event["kind"] == "resumed"] == [6, 6]
    assert [event["step"] for event in events if event["kind"] == "saved"] == [3, 6, 9, 12]
    for shown in ("resumed from here", "rank 1 killed; not committed", "8 of 8 checks held"):
        assert shown in done.stdout
    assert (root / "reward.png").read_bytes().startswith(b"\x89PNG")
