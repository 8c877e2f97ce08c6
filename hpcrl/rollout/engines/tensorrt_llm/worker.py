"""The only module that calls tensorrt_llm, which it imports when an engine is built.

It uses private parts of 1.2.1, which are listed in signatures.TABLE. Never run.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcrl.model.params import Shard


def buffers(named: Iterable[tuple[str, Tensor]], expected: Sequence[Shard], tp_rank: int) -> dict[str, Tensor]:
    """Return this rank's parameters by name, in the order of `expected`.

    Raises RuntimeError if one is missing, has another shape, or is not in the plan and would keep its random initial
    values. Parameters that are neither weight nor bias are constants.
    """
    tensors = {name: parameter.detach() for name, parameter in named}
    planned = {shard.local_name: shard for shard in expected}
    missing = [name for name in planned if name not in tensors]
    surplus = [name for name in tensors if name not in planned and name.endswith((".weight", ".bias"))]
    differ = [
        f"{name} {tuple(tensors[name].shape)}, {shard.local_shape} expected"
        for name, shard in planned.items()
        if name in tensors and tuple(tensors[name].shape) != shard.local_shape
    ]
    if missing or surplus or differ:
        parts = (("missing", missing), ("unknown", surplus), ("of another shape", differ))
        listed = "; ".join(f"{len(names)} {what}, such as {names[0]}" for what, names in parts if names)
        raise RuntimeError(f"TensorRT-LLM's parameters differ from the refit plan on TP rank {tp_rank}: {listed}")
    return {name: tensors[name] for name in planned}


KV_CACHE = "kv_cache"  # tag of the cache's memory; memory of other tags would be copied to the host and back
SECONDS_PAUSED = 60.0  # the hang detector keeps counting while the loop is paused

_log = logging.getLogger("hpcrl.rollout")


class TrtllmWorker:
    """One rank's worker of an engine, in this process, with its event loop in a thread.

    Requests are submitted on the first rank of `comm`; the loop sends them to the others by MPI.
    """

    def __init__(
        self, arguments: dict[str, Any], comm: MPI.Intracomm, world_rank: int, device: torch.device, *, public: bool
    ) -> None:
        """Collective over `comm`.

        Args:
            arguments: from arguments.engine_arguments.
            comm: the replica's ranks, used by this engine only, whose thread calls MPI beside the main thread.
            public: build it by the public LLM class, for one rank (design "single_process"), not by its worker.
        """
        from tensorrt_llm._utils import set_mpi_comm
        from tensorrt_llm.llmapi.mpi_session import set_mpi_session_cpp

        from hpcrl.runtime.mpi import wait

        set_mpi_comm(comm)
        set_mpi_session_cpp(comm)
        wait(comm.Ibarrier())
        with _process_wide_settings(device):
            if public:
                self._front = _single_process(arguments, world_rank, device)
                worker = self._front._executor
            else:
                self._front = worker = _group_worker(arguments, comm, world_rank, device)
                worker.start()
        self._executor = worker.engine

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._executor.model_engine.model.named_parameters()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the event loop waits without work. Collective over the replica; requests must have ended."""
        with self._executor.control_action():
            torch.cuda.synchronize()  # its scheduler overlaps steps: a forward pass may be in flight
            began = time.monotonic()
            try:
                yield
            finally:
                torch.cuda.synchronize()
                seconds = time.monotonic() - began
                if seconds > SECONDS_PAUSED:
                    _log.warning(
                        "TensorRT-LLM was paused for %.0f s; its hang detector aborts after some minutes", seconds
                    )

    def reset_prefix_cache(self) -> None:
        """Drop cached keys and values of earlier weights. Call inside `paused`."""
        self._executor.reset_prefix_cache()

    def release_cache(self) -> None:
        """Free the KV cache. Call inside `paused`. Virtual addresses and so captured CUDA graphs stay valid."""
        from tensorrt_llm._torch.virtual_memory import release_with_tag

        release_with_tag(KV_CACHE)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def allocate_cache(self) -> None:
        """Allocate the KV cache again. Call inside `paused`."""
        from tensorrt_llm._torch.virtual_memory import materialize_with_tag

        materialize_with_tag(KV_CACHE)

    def submit(self, token_ids: list[int], arguments: dict[str, Any]) -> Any:
        """Start a request; returns its handle."""
        from tensorrt_llm import SamplingParams

        return self._front.generate_async(token_ids, SamplingParams(**arguments))

    def poll(self, handle: Any) -> Any:
        """Return the output if it is complete, else None. Never waits."""
        # result() ignores its timeout; without streaming there is one message per request
        if not handle.finished:
            if handle.queue.empty():
                return None
            handle.result()
        return handle.outputs[0]

    def cancel(self, handle: Any) -> None:
        if not handle.finished:
            handle.abort()

    def close(self) -> None:
        """Collective over the replica."""
        self._front.shutdown()


def _group_worker(arguments: dict[str, Any], comm: MPI.Intracomm, world_rank: int, device: torch.device) -> Any:
    from tensorrt_llm.executor.worker import GenerationExecutorWorker
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    class Worker(GenerationExecutorWorker):
        def _get_comm_ranks_device_id(self) -> tuple[list[int], list[int]]:
            """Return Megatron's device; the base class uses the world rank modulo the number of GPUs."""
            torch.cuda.set_device(device)
            return comm.allgather(world_rank), comm.allgather(device.index)

    folder = Path(arguments["model"])
    return Worker(
        engine=folder,
        hf_model_dir=folder,
        tokenizer=None,
        llm_args=TorchLlmArgs(**_with_parts(arguments)),
        is_llm_executor=False,
    )


def _single_process(arguments: dict[str, Any], world_rank: int, device: torch.device) -> Any:
    from tensorrt_llm import LLM

    engine_device = world_rank % torch.cuda.device_count()
    if engine_device != device.index:
        raise InputError(
            f"rollout.trtllm.design=single_process puts the engine of rank {world_rank} on GPU {engine_device}, but "
            f"training uses GPU {device.index}; place ranks in blocks, or use design: tp_group"
        )
    os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] = "1"  # read when the first LLM is made
    return LLM(**_with_parts(arguments))


def _with_parts(arguments: dict[str, Any]) -> dict[str, Any]:
    from tensorrt_llm.llmapi.llm_args import CudaGraphConfig, KvCacheConfig

    graphs = arguments["cuda_graph_config"]
    return arguments | {
        "kv_cache_config": KvCacheConfig(**arguments["kv_cache_config"]),
        "cuda_graph_config": None if graphs is None else CudaGraphConfig(**graphs),
    }


@contextlib.contextmanager
def _process_wide_settings(device: torch.device) -> Iterator[None]:
    """Restore what building an engine changes for the whole process: the device, and torch's share of its memory."""
    get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # absent in the oldest supported torch
    share = 1.0 if get_fraction is None else get_fraction(device)
    try:
        yield
    finally:
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(share, device)
