"""Tasks and agents of Prime Intellect's verifiers (https://github.com/PrimeIntellect-ai/verifiers), version 0.4."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

from hpcrl.rollout.environments.agent_environment import AgentEnvironment


class VerifiersEnvironment(AgentEnvironment):
    """A taskset of the API `verifiers.v1`, whose harness draws turns from the endpoint. Needs the extra `verifiers`.

    The row has the position of the task in its extra_info: `{"index": 3}`. The reward is the sum over the traces of the
    episode; metrics and rewards are the info.

    Args:
        taskset, harness, runtime: ids of these; a taskset is an importable module.
        config: JSON with further keys of verifiers' environment, as `{"taskset": {...}, "agent": {...}}`.
    """

    def __init__(self, taskset: str, harness: str = "null", runtime: str = "subprocess", config: str = "{}") -> None:
        given = json.loads(config)
        agent = {"harness": {"id": harness}, "runtime": {"type": runtime}, **given.get("agent", {})}
        self.config = {**given, "taskset": {"id": taskset, **given.get("taskset", {})}, "agent": agent}

    @classmethod
    def check(cls) -> None:
        import verifiers.v1  # noqa: F401  loads it once for all trajectories; an ImportError names what is missing

    async def run(self, record: dict[str, Any], base_url: str, api_key: str) -> tuple[float, Mapping[str, float | str]]:
        from verifiers import v1
        from verifiers.v1.utils import loaders

        os.environ["HPCRL_API_KEY"] = api_key  # programs that verifiers starts do not get variables named API_KEY
        endpoint = v1.EvalClientConfig(base_url=base_url, api_key_var="HPCRL_API_KEY")
        env = loaders.load_environment(loaders.resolve_env_config(self.config))
        index = int(record["extra_info"]["index"])
        task = next(itertools.islice(env.taskset, index, None), None)
        if task is None:
            raise IndexError(f"extra_info.index is {index}, and the taskset has fewer tasks")
        async with env.serving():
            context = v1.ModelContext(client=endpoint, model="policy", sampling=v1.SamplingConfig())
            episode = await env.run_episode(task, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            lines = errors[-1].message.strip().splitlines() if errors else ["the episode failed"]
            raise RuntimeError(": ".join(dict.fromkeys((lines[0][:90], lines[-1][:90]))))  # a traceback is between them
        info: dict[str, float | str] = {}
        for trace in episode.traces:
            info |= {name: value for name, value in trace.metrics.items() if value is not None}
            info |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return sum(trace.reward for trace in episode.traces), info
