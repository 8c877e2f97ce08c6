"""The only module that imports vLLM: its engine core on this rank, and what differs between releases (0.28 to 0.32)."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.rollout.sampling import Drawn, KeyedSampler
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ENVIRONMENT = {  # read when vLLM is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are the job's
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go to the handlers of this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def import_vllm() -> None:
    """Import what a rank runs of vLLM. On a CPU, functions that vLLM compiles stay as they are: torch.compile costs a
    minute and needs a C++ compiler at run time."""
    os.environ.update(ENVIRONMENT)
    for name in ("vllm.renderers.base", "vllm.v1.engine.input_processor"):
        logging.getLogger(name).setLevel(logging.ERROR)  # hints at how prompts are passed
    with _without_compiler(), _quiet():
        import vllm._custom_ops
        import vllm.engine.arg_utils
        import vllm.model_executor.models.registry
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.cpu_worker
        import vllm.v1.worker.gpu_worker  # noqa: F401


@dataclass(frozen=True)
class Place:
    """This rank's place in a replica. tp: the group of the replica. own: the group of this rank."""

    rank: int
    ranks: tuple[int, ...]
    tp: ProcessGroup
    own: ProcessGroup

    @property
    def tp_rank(self) -> int:
        return self.ranks.index(self.rank)


class EngineCore:
    """vLLM on one rank of a replica. Construction is collective over the replica.

    Weights are random until they are written.

    Args:
        config: config.json of the model.
        options: options of vLLM's EngineArgs.
    """

    def __init__(self, config: Mapping[str, Any], place: Place, device: torch.device, **options: Any) -> None:
        import_vllm()
        if device.type == "cpu" and config.get("num_experts"):
            _leave_experts_unpacked()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        with tempfile.TemporaryDirectory(prefix="hpcrl_vllm_") as folder, _in_job(place, device):
            (Path(folder) / "config.json").write_text(json.dumps(config))
            arguments = EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=len(place.ranks),
                async_scheduling=False,
                disable_log_stats=True,
                **options,
            )
            try:
                self._engine = LLMEngine.from_engine_args(arguments)
            except ValueError as error:  # such as a cache that is too small for one sequence
                why = " ".join(str(error).split())
                raise InputError(f"rollout.engine=vllm: {why}; or use rollout.engine=native") from error
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
        self._requests: dict[str, Drawn] = {}  # by the name in vLLM's batch
        self._inside: dict[str, str] = {}  # our name of a request -> that name
        self._number = 0
        self.sampler: KeyedSampler | None = None
        self._runner.sampler = _sampler(self, self._runner, self._requests)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield vLLM's own parameters, which the next step reads; of a tensor x of experts, x[0], x[1]..."""
        for name, parameter in self._runner.model.named_parameters():
            name = name.replace(".routed_experts.", ".")  # of 0.30 and newer
            if parameter.dim() < 3:
                yield name, parameter.data
            else:
                yield from ((f"{name}[{expert}]", matrix) for expert, matrix in enumerate(parameter.data))

    def add(self, token_ids: Sequence[int], drawn: Drawn, stop: Sequence[int]) -> str:
        """Queue a request that draws `drawn.limit` tokens at most, until one of `stop`, and return its name."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=drawn.limit,
            ignore_eos=True,
            stop_token_ids=list(stop) or None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name, self._number = str(self._number), self._number + 1
        inside = self._engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params)
        self._inside[name] = inside if isinstance(inside, str) else name  # vLLM appends to names since 0.13
        self._requests[self._inside[name]] = drawn
        return name

    def step(self) -> list[tuple[str, int, bool]]:
        """Run one step. Returns the name, the number of tokens, and whether a stop token ended it, of each request that
        has ended."""
        ended = [output for output in self._engine.step() if output.finished and output.request_id in self._inside]
        for output in ended:
            self._forget(output.request_id)
        return [(it.request_id, len(it.outputs[0].token_ids), it.outputs[0].finish_reason == "stop") for it in ended]

    def count(self, name: str) -> int:
        """Return the number of tokens that an open request has drawn."""
        state = self._runner.requests.get(self._inside[name])
        return 0 if state is None else len(state.output_token_ids)

    def cancel(self, names: Sequence[str]) -> None:
        """End open requests without a result."""
        self._engine.abort_request(list(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        for name in names:
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._requests[self._inside.pop(name)]

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def cache_storages(self) -> list[torch.UntypedStorage]:
        """Return the memory of the KV cache, of which layers may share parts."""
        storages = [cache.untyped_storage() for cache in self._runner.kv_caches]
        return list({storage.data_ptr(): storage for storage in storages}.values())


def _sampler(core: EngineCore, runner: Any, requests: Mapping[str, Drawn]) -> Any:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.sampler import Sampler

    class Keyed(Sampler):
        def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
            assert core.sampler is not None
            batch, count = runner.input_batch, len(logits)
            rows = [requests[name] for name in batch.req_ids[:count]]
            token_ids = core.sampler.draw(logits, rows, [len(ids) for ids in batch.req_output_token_ids[:count]])
            return SamplerOutput(sampled_token_ids=token_ids.to(torch.int32).unsqueeze(1), logprobs_tensors=None)

    return Keyed()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without vLLM's warnings of settings that this package chooses. Later ones go to the rank's log."""
    logger = logging.getLogger("vllm")
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(logging.WARNING)


@contextmanager
def _without_compiler() -> Iterator[None]:
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            plain = lambda function=None, **_: function or (lambda wrapped: wrapped)  # noqa: E731
            stack.enter_context(patch.object(torch, "compile", plain))
        yield


@contextmanager
def _in_job(place: Place, device: torch.device) -> Iterator[None]:
    """Context in which vLLM starts over the job's process groups, and leaves what is the process's own as it was."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.models import registry
    from vllm.v1.worker import cpu_worker, gpu_worker

    environ = {"RANK": str(place.tp_rank), "LOCAL_RANK": str(device.index or 0), "WORLD_SIZE": str(len(place.ranks))}
    start = _group_maker(place, device)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environ))
        stack.enter_context(_without_compiler())
        stack.enter_context(_quiet())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # The alternative to the job's groups is shared memory: its name is the same in all jobs, a job that is killed
        # leaves it behind, and its ranks spin
        stack.enter_context(patch.object(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda _: False))
        stack.enter_context(patch.object(torch, "set_num_threads", torch.set_num_threads))
        # A process that imports vLLM anew, to learn what a model's class declares
        stack.enter_context(patch.object(registry, "_run_in_subprocess", lambda function: function()))
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        for module in (gpu_worker, cpu_worker):
            stack.enter_context(patch.object(module, "init_worker_distributed_environment", start))
        if device.type == "cpu":
            import vllm._custom_ops

            # Packed weights are copies, which refit would not reach.
            stack.enter_context(patch.object(vllm._custom_ops, "_supports_onednn", False))
            # It binds the process's memory to one NUMA node, which is the launcher's task.
            stack.enter_context(patch.object(torch.ops._C, "init_cpu_memory_env", lambda nodes: None))
        yield


def _leave_experts_unpacked() -> None:
    """Pack the weights of experts in each call, for as long as this process runs."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if hasattr(cpu_moe, "packed_in_call"):
        return
    pack, run, kinds = cpu_moe.cpu_prepack_moe_weight, cpu_moe.cpu_fused_moe, list[str]()

    def unpacked(weight: Tensor, kind: str) -> Tensor:
        kinds.append(kind)  # of instructions, the same in all layers
        return weight

    def packed_in_call(*arguments: Any) -> Any:  # 0.30 and newer pass the output, too
        is_weight = [isinstance(each, Tensor) and each.dim() == 3 for each in arguments]
        pairs = zip(arguments, is_weight, strict=True)
        return run(*(pack(each, kinds[-1]) if packs else each for each, packs in pairs))

    cpu_moe.packed_in_call = cpu_moe.cpu_fused_moe = packed_in_call
    cpu_moe.cpu_prepack_moe_weight = unpacked


def _group_maker(place: Place, device: torch.device) -> Callable[..., None]:
    """Return a function in place of vLLM's, which makes groups of torch's whole world: all of its ranks would have to
    call it."""
    from vllm.distributed import parallel_state

    groups = {(place.rank,): place.own, place.ranks: place.tp}

    def group(name: str, ranks: tuple[int, ...], *, communicates: bool = True) -> Any:
        backend = dist.get_backend(groups[ranks])
        return parallel_state.GroupCoordinator(
            [list(ranks)], device.index or 0, backend, use_device_communicator=communicates, group_name=name
        )

    def start(vllm_config: Any, *_: Any, **__: Any) -> None:
        with patch.object(dist, "new_group", lambda ranks, **_: groups[tuple(ranks)]):
            state = {"_WORLD": group("world", place.ranks, communicates=False), "_TP": group("tp", place.ranks)}
            state |= {f"_{name}": group(name.lower(), (place.rank,)) for name in ("PP", "DP", "PCP", "DCP")}
            state |= {"_ETP": state["_TP"], "_NODE_COUNT": 1}
            if vllm_config.model_config.is_moe:
                state["_EP"] = group("ep", place.ranks)
        for name, value in state.items():
            setattr(parallel_state, name, value)

    return start
