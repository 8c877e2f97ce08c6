"""Signatures of the calls into tensorrt_llm, compared with the installed package: `hpcrl check --trtllm`.

This shows that the functions accept the calls of worker.py. It does not show that they behave as in 1.2.1.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcrl.machine.check import Finding, gpu, package, torch
from hpcrl.rollout.engines.tensorrt_llm import declaration
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.world import abort

if TYPE_CHECKING:
    from mpi4py import MPI


VERSION = "1.2.1"
PUBLISHED = "1.2.1's documentation"
NEARBY = "sources of 1.2, exact release unknown"


class Expected(NamedTuple):
    """`attribute` of `module` is called with so many positional arguments (self included) and these keywords.

    `known_from` is the source of this signature.
    """

    module: str
    attribute: str
    num_positional: int
    keywords: tuple[str, ...]
    known_from: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


ENGINE = (
    "model", "skip_tokenizer_init", "load_format", "dtype", "tensor_parallel_size", "pipeline_parallel_size",
    "allreduce_strategy", "sampler_type", "max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len",
    "enable_chunked_prefill", "enable_sleep", "kv_cache_config", "cuda_graph_config",
)  # fmt: skip
SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "seed", "end_id", "pad_id", "ignore_eos", "stop_token_ids",
    "include_stop_str_in_output", "logprobs", "detokenize", "add_special_tokens", "exclude_input_from_output",
)  # fmt: skip
WORKER = ("engine", "hf_model_dir", "tokenizer", "llm_args", "is_llm_executor")

ARGS = "tensorrt_llm.llmapi.llm_args"
EXECUTOR = "tensorrt_llm._torch.pyexecutor.py_executor"

TABLE = (
    Expected("tensorrt_llm._utils", "set_mpi_comm", 1, (), NEARBY),
    Expected("tensorrt_llm.llmapi.mpi_session", "set_mpi_session_cpp", 1, (), PUBLISHED),
    Expected(ARGS, "TorchLlmArgs", 0, ENGINE, PUBLISHED),
    Expected(ARGS, "KvCacheConfig", 0, ("enable_block_reuse", "free_gpu_memory_fraction", "max_tokens"), PUBLISHED),
    Expected(ARGS, "CudaGraphConfig", 0, ("enable_padding", "max_batch_size"), PUBLISHED),
    Expected("tensorrt_llm.executor.worker", "GenerationExecutorWorker", 0, WORKER, NEARBY),
    Expected("tensorrt_llm.executor.worker", "GenerationExecutorWorker._get_comm_ranks_device_id", 1, (), NEARBY),
    Expected("tensorrt_llm.executor.worker", "GenerationExecutorWorker.start", 1, (), NEARBY),
    Expected("tensorrt_llm.executor.worker", "GenerationExecutorWorker.generate_async", 3, (), NEARBY),
    Expected("tensorrt_llm.executor.worker", "GenerationExecutorWorker.shutdown", 1, (), NEARBY),
    Expected("tensorrt_llm.executor.result", "GenerationResult.result", 1, (), PUBLISHED),
    Expected("tensorrt_llm.executor.result", "GenerationResult.abort", 1, (), PUBLISHED),
    Expected(EXECUTOR, "PyExecutor.control_action", 1, (), NEARBY),
    Expected(EXECUTOR, "PyExecutor.reset_prefix_cache", 1, (), NEARBY),
    Expected("tensorrt_llm._torch.virtual_memory", "release_with_tag", 1, (), NEARBY),
    Expected("tensorrt_llm._torch.virtual_memory", "materialize_with_tag", 1, (), NEARBY),
    Expected("tensorrt_llm", "SamplingParams", 0, SAMPLING, PUBLISHED),
    Expected("tensorrt_llm", "LLM", 0, ENGINE, PUBLISHED),
    Expected("tensorrt_llm", "LLM.generate_async", 3, (), PUBLISHED),
    Expected("tensorrt_llm", "LLM.shutdown", 1, (), PUBLISHED),
)

Import = Callable[[str], Any]


def wrong_version(load: Import) -> str | None:
    """Return None, or what is wrong with the version; `load` imports a module by name."""
    found = getattr(load("tensorrt_llm"), "__version__", "unknown")
    if found == VERSION:
        return None
    return (
        f"tensorrt-llm {found} found, {VERSION} expected: the adapter uses private parts that change between releases"
    )


def problem(expected: Expected, load: Import) -> str | None:
    """Return None if the call would be accepted, else the reason."""
    try:
        target = load(expected.module)
        for part in expected.attribute.split("."):
            target = getattr(target, part)
    except ImportError as error:
        return f"cannot be imported: {error}"
    except AttributeError:
        return "does not exist"
    fields = getattr(target, "model_fields", None)
    if fields is not None:
        missing = [name for name in expected.keywords if name not in fields]
        return f"has no field {', '.join(missing)}" if missing else None
    try:
        inspect.signature(target).bind(*[None] * expected.num_positional, **dict.fromkeys(expected.keywords))
    except TypeError as error:
        return f"takes {inspect.signature(target)}: {error}"
    except ValueError:  # compiled code without a signature
        return None
    return None


def self_test(load: Import) -> None:
    """Raise InputError with one line unless version and signatures are the expected ones."""
    version = wrong_version(load)
    found = [f"{expected.name} {why}" for expected in TABLE if (why := problem(expected, load)) is not None]
    if version is None and not found:
        return
    what = [*([version] if version else []), *found[:1]]
    if len(found) > 1:
        what.append(f"and {len(found) - 1} more")
    raise InputError(f"{'; '.join(what)}; see `hpcrl check --trtllm`, or use rollout.engine=native")


def findings(comm: MPI.Intracomm) -> list[Finding]:
    """Compare the installed package. Collective over all ranks, which import tensorrt_llm if MPI allows it."""
    found = [torch(), _gpu(), package("tensorrt_llm")]
    try:
        declaration.import_on_all_ranks(comm)
    except InputError as error:
        if not error.everywhere:  # other ranks may wait in the import
            abort(error, rank=comm.rank, role="check", phase="import")
        return [*found, Finding("TensorRT-LLM", "cannot be used", str(error))]
    return [*found, *compared(importlib.import_module)]


def compared(load: Import) -> list[Finding]:
    """Return version and signatures, a line each."""
    version = wrong_version(load)
    lines = [Finding("TensorRT-LLM", f"written for {VERSION}, never run", version)]
    for expected in TABLE:
        why = problem(expected, load)
        lines.append(Finding(f"  {expected.name}", "as expected" if why is None else why, why))
    return lines


def _gpu() -> Finding:
    seen = gpu()
    if seen.name == "CUDA" and "x" in seen.found.split() and seen.wrong is None:
        return seen
    return Finding(seen.name, seen.found, seen.wrong or "TensorRT-LLM needs CUDA and a GPU; use rollout.engine=native")
