"""A package of the name `tensorrt_llm` with the signatures that the adapter expects of 1.2.1, which notes its calls.

What runs against it shows that our calls fit those signatures, and their order. It says nothing about what the real
package does with them: nobody has run that yet.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from hpcrl.rollout.engines.tensorrt_llm import signatures

Events = list[str]


class Request:
    """`ends(token_ids, params) -> output`; None is one that goes on until it is cancelled."""

    def __init__(self, output: Any, events: Events) -> None:
        self.queue: Queue[Any] = Queue()
        self.outputs: list[Any] = []
        self.finished = False
        self.events = events
        if output is not None:
            self.queue.put(output)

    def result(self, timeout: float | None = None) -> Request:
        self.outputs.append(self.queue.get(block=False))  # the real one would wait here for ever
        self.finished = True
        return self

    def abort(self) -> None:
        self.events.append("abort")
        self.queue.put(types.SimpleNamespace(token_ids=[], logprobs=[], finish_reason="cancelled"))


class StandIn:
    """The package, and what it was asked."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.events: Events = []
        self.submitted: list[tuple[list[int], Any]] = []
        self.built: dict[str, Any] = {}
        self.answer: Callable[[list[int], Any], Any] = lambda ids, params: None
        self.modules = _package(self, parameters)


def _package(standin: StandIn, parameters: dict[str, torch.Tensor]) -> dict[str, types.ModuleType]:
    events = standin.events

    class PyExecutor:
        def __init__(self) -> None:
            named = [(name, torch.nn.Parameter(value, requires_grad=False)) for name, value in parameters.items()]
            model = types.SimpleNamespace(named_parameters=lambda: iter(named))
            self.model_engine = types.SimpleNamespace(model=model)

        @contextmanager
        def control_action(self) -> Iterator[PyExecutor]:
            events.append("pause")
            try:
                yield self
            finally:
                events.append("resume")

        def reset_prefix_cache(self) -> None:
            events.append("reset_prefix_cache")

    class GenerationExecutorWorker:
        def __init__(
            self,
            engine: Path,
            executor_config: Any = None,
            batched_logits_processor: Any = None,
            postproc_worker_config: Any = None,
            is_llm_executor: bool | None = None,
            hf_model_dir: Path | None = None,
            tokenizer: Any = None,
            llm_args: Any = None,
            rpc_addr: str | None = None,
            hmac_key: bytes | None = None,
        ) -> None:
            standin.built = {"engine": engine, "llm_args": llm_args, "devices": self._get_comm_ranks_device_id()}
            torch.cuda.set_per_process_memory_fraction(1.0)  # as create_py_executor does
            events.append("build")
            self.engine = PyExecutor()

        def _get_comm_ranks_device_id(self) -> Any:
            raise AssertionError("the world rank modulo the GPUs is not the device of training")

        def start(self) -> None:
            events.append("start")

        def generate_async(self, prompt_token_ids: list[int], sampling_params: Any, streaming: bool = False) -> Request:
            standin.submitted.append((prompt_token_ids, sampling_params))
            return Request(standin.answer(prompt_token_ids, sampling_params), events)

        def shutdown(self) -> None:
            events.append("shutdown")

    class LLM:
        def __init__(self, model: str, tokenizer: Any = None, **kwargs: Any) -> None:
            standin.built = {"engine": model, **kwargs}
            events.append("build")
            self._executor = types.SimpleNamespace(engine=PyExecutor())

        def generate_async(self, inputs: list[int], sampling_params: Any = None, streaming: bool = False) -> Request:
            standin.submitted.append((inputs, sampling_params))
            return Request(standin.answer(inputs, sampling_params), events)

        def shutdown(self) -> None:
            events.append("shutdown")

    def set_mpi_comm(new_comm: Any) -> None:
        events.append("set_mpi_comm")

    def set_mpi_session_cpp(comm: Any) -> None:
        events.append("set_mpi_session_cpp")

    def release_with_tag(*tags: str) -> int:
        events.append(f"release {','.join(tags)}")
        return len(tags)

    def materialize_with_tag(*tags: str) -> int:
        events.append(f"materialize {','.join(tags)}")
        return len(tags)

    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {
            "__version__": signatures.VERSION,
            "LLM": LLM,
            "SamplingParams": _fields("SamplingParams", signatures.SAMPLING),
        },
        "tensorrt_llm._utils": {"set_mpi_comm": set_mpi_comm},
        "tensorrt_llm.llmapi.mpi_session": {"set_mpi_session_cpp": set_mpi_session_cpp},
        signatures.ARGS: {
            "TorchLlmArgs": _fields("TorchLlmArgs", signatures.ENGINE),
            "KvCacheConfig": _fields("KvCacheConfig", ("enable_block_reuse", "free_gpu_memory_fraction", "max_tokens")),
            "CudaGraphConfig": _fields("CudaGraphConfig", ("enable_padding", "max_batch_size")),
        },
        "tensorrt_llm.executor.worker": {"GenerationExecutorWorker": GenerationExecutorWorker},
        "tensorrt_llm.executor.result": {"GenerationResult": Request},
        signatures.EXECUTOR: {"PyExecutor": PyExecutor},
        "tensorrt_llm._torch.virtual_memory": {
            "release_with_tag": release_with_tag,
            "materialize_with_tag": materialize_with_tag,
        },
    }
    modules: dict[str, types.ModuleType] = {}
    for name, attributes in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            whole = ".".join(parts[:length])
            modules.setdefault(whole, types.ModuleType(whole))
            modules[whole].__path__ = []
        vars(modules[name]).update(attributes)
    return modules


def _fields(name: str, keys: tuple[str, ...]) -> type[BaseModel]:
    """A model that refuses other keys, as TorchLlmArgs does."""
    return type(
        name,
        (BaseModel,),
        {
            "model_config": ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()),
            "__annotations__": dict.fromkeys(keys, Any),
            **dict.fromkeys(keys),
        },
    )


class Comm:
    """A communicator of one rank."""

    def Ibarrier(self) -> Any:
        return types.SimpleNamespace(Test=lambda status=None: True)

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def output(tokens: list[int], reason: str = "stop", log_probs: list[float] | None = None) -> Any:
    """A CompletionOutput of the C++ sampler: per token a mapping with the sampled one alone."""
    values = [-0.5 - token for token in tokens] if log_probs is None else log_probs
    entries = [{token: types.SimpleNamespace(logprob=value)} for token, value in zip(tokens, values, strict=False)]
    return types.SimpleNamespace(token_ids=tokens, logprobs=entries, finish_reason=reason)
