"""A whole job whose agent is a program with the real OpenAI client: rewards and conversations reach the updates."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from tests.mpi.lab import Lab, metrics, on

pytestmark = pytest.mark.ci_world(2)

pytest.importorskip("openai")

# Random weights end few turns: a program whose response is full gets an error for its next request, and returns.
AGENT = """
import openai

from hpcrl.api import AgentEnvironment

class Agent(AgentEnvironment):
    async def run(self, record, base_url, api_key):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": "1"}]
        if self.seed % 7 == 0:
            raise ValueError("a bad move")
        texts = []
        try:
            while len(texts) < 4:
                found = await client.chat.completions.create(model="x", messages=messages)
                texts.append(found.choices[0].message.content)
                again = {"role": "user", "content": str(len(texts))}
                messages = [again] if len(texts) == 2 else [*messages, found.choices[0].message, again]
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
        return sum(map(ord, texts[0])) % 7 / 7, {"turns": len(texts)}
"""


def test_a_job_with_an_agent(world: Any, lab: Lab) -> None:
    if world.rank == 0:
        (lab.folder / "agent.py").write_text(AGENT)
    world.barrier()
    environment = {"path": str(lab.folder / "agent.py"), "name": "Agent"}
    run = lab.run(
        "agent",
        on(world, tp=min(2, world.size)),
        rollout={"multi_turn": {"enable": True, "environment": environment}},
        data={"train_batch_size": 4, "max_response_length": 64},
        algorithm={"adv_estimator": "grpo", "use_kl_in_reward": False},
        actor={"ppo_mini_batch_size": 4},
        reward={"custom_reward_function": {"path": None}},
        trainer={"total_training_steps": 2},
    )
    for step, line in metrics(run).items():
        _, samples, _ = read_step(step_path(run / "rollouts", step), ["response_mask"])
        reasons, turns = samples["finish_reason"].tolist(), samples["num_turns"]
        good = np.array([reason != "error" for reason in reasons])
        assert line["env/steps"] == turns[good].sum() > good.sum() > 0
        assert line["env/errors"] == (~good).sum()
        for extras, count in zip(samples["extras"][good], turns[good], strict=True):
            assert json.loads(extras)["turns"] == count
        assert line["actor/grad_norm"] > 0 and len(set(samples["score"][good].tolist())) > 1
