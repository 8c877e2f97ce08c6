"""The checks of TensorRT-LLM, in the order in which they make sense: each trusts what those before it have shown.

Never run. Ranks of a check agree on failure only where it says so; a rank that fails alone ends the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrl.config.schema import Config
from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit
from hpcrl.engine.refit.transports import nodes_of
from hpcrl.model.families.config_json import hf_config
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.tensorrt_llm.declaration import TensorRTLLM
from hpcrl.rollout.engines.tensorrt_llm.engine import TrtllmEngine, make_engine
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from hpcrl.runtime.groups import make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu.models import held, whole_weights
from tools.gpu.outcome import Failed, Skip, require

SHAPE = ModelShape(4, 512, 1024, 8, 4, 64, 1024)
IDLE_SECONDS = float(os.environ.get("HPCRL_GPU_CHECK_IDLE_SECONDS", "600"))
REQUESTS = [Request([1 + index, 7, 30 + index, 400], f"p{index}") for index in range(12)]
GREEDY = SamplingParams(32, temperature=0.0)
BF16_LOG_PROB = 0.02  # mean absolute difference of log-probs between two bf16 implementations of this model
FLAT_BYTES = 32 * 2**20


class Job:
    """Engines with tensor parallelism `tp` over all ranks, and training's weights on the same ranks."""

    def __init__(self, world: World, tp: int, **rollout: Any) -> None:
        if world.size % tp or world.size < tp:
            raise Skip(f"{world.size} ranks are no multiple of {tp}")
        ranks = tuple(range(world.size))
        self.world, self.layout = world, Layout(ranks, tp=tp)
        self.training = Layout(ranks, tp=2 if world.size % 2 == 0 else 1)
        self.groups = make_groups({"actor": self.training, "rollout": self.layout}, world.rank)["rollout"]
        folder = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
        if world.rank == 0:
            write_config(Path(folder), SHAPE)
        world.barrier()
        keys = {"engine": "tensorrt_llm", "dtype": "bfloat16", "max_num_seqs": 8, "kv_cache_gib": 1.0}
        self.config = Config.model_validate(
            {
                "rollout": keys | {"trtllm": {"model_dir": folder}} | rollout,
                "data": {"max_prompt_length": 64, "max_response_length": 64},
            }
        )
        self.engine: TrtllmEngine = make_engine(self.config, SHAPE, self.groups, world.device)
        self.refit = Refit(
            Resharding(
                SHAPE,
                self.training,
                self.layout,
                2,
                nodes=tuple(nodes_of(world.comm)),
                engine_shards=TensorRTLLM().shards,
            ),
            world.comm,
            world.rank,
            torch.bfloat16,
            device_group=torch.distributed.group.WORLD if world.size > 1 else None,
        )

    def source(self, seed: int) -> dict[str, Tensor]:
        return held(
            SHAPE, whole_weights(SHAPE, seed), self.training, self.world.rank, self.world.device, torch.bfloat16
        )

    def update(self, source: dict[str, Tensor]) -> None:
        with self.engine.updating_weights():
            self.refit.run(source, self.engine.weights())

    def generate(self, sampling: SamplingParams = GREEDY, seed: int = 0) -> list[Completion]:
        return self.engine.generate(REQUESTS, sampling, seed=seed, step=0)


@contextlib.contextmanager
def job(world: World, tp: int, **rollout: Any) -> Iterator[Job]:
    running = Job(world, tp, **rollout)
    yield running
    running.refit.close()
    running.engine.close()


def write_config(folder: Path, shape: ModelShape) -> None:
    """A Llama's config.json of `shape`."""
    keys = hf_config(shape) | {"torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(keys))


def hugging_face(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's global tensors under Hugging Face's names."""
    groups, width = SHAPE.num_query_groups, SHAPE.head_dim
    queries = SHAPE.num_attention_heads // groups
    weights = {
        "model.embed_tokens.weight": whole["embedding.word_embeddings.weight"][: SHAPE.vocab_size],
        "lm_head.weight": whole["output_layer.weight"][: SHAPE.vocab_size],
        "model.norm.weight": whole["decoder.final_layernorm.weight"],
    }
    for layer in range(SHAPE.num_layers):
        source, target = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = whole[f"{source}self_attention.linear_qkv.weight"].view(groups, queries + 2, width, -1)
        parts = qkv.split([queries, 1, 1], dim=1)
        for name, part in zip("qkv", parts, strict=True):
            weights[f"{target}self_attn.{name}_proj.weight"] = part.flatten(0, 2)
        gate, up = whole[f"{source}mlp.linear_fc1.weight"].chunk(2)
        weights |= {
            f"{target}self_attn.o_proj.weight": whole[f"{source}self_attention.linear_proj.weight"],
            f"{target}mlp.gate_proj.weight": gate,
            f"{target}mlp.up_proj.weight": up,
            f"{target}mlp.down_proj.weight": whole[f"{source}mlp.linear_fc2.weight"],
            f"{target}input_layernorm.weight": whole[f"{source}input_layernorm.weight"],
            f"{target}post_attention_layernorm.weight": whole[f"{source}pre_mlp_layernorm.weight"],
        }
    return weights


def expected_log_probs(
    folder: str, whole: dict[str, Tensor], done: list[Completion], temperature: float
) -> list[Tensor]:
    """transformers' log-probs of the same tokens, after temperature, in fp32 weights rounded to bf16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder)).to(torch.bfloat16).cuda()
    model.load_state_dict({name: value.to(torch.bfloat16) for name, value in hugging_face(whole).items()})
    per_request = []
    for request, completion in zip(REQUESTS, done, strict=True):
        prompt, tokens = list(request.prompt_ids), [int(token) for token in completion.token_ids]
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        log_probs = (logits / temperature).log_softmax(-1)
        per_request.append(log_probs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).cpu())
    return per_request


def gap(done: list[Completion], expected: list[Tensor]) -> float:
    ours = torch.cat([torch.from_numpy(completion.log_probs) for completion in done])
    return float((ours - torch.cat(expected)).abs().mean())


def tokens(done: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in done]


def imports(world: World) -> str:
    """1. The import, which this program did on all ranks before it came here; and the signatures."""
    import importlib

    from hpcrl.rollout.engines.tensorrt_llm import signatures

    world.run_collectively(lambda: signatures.self_test(importlib.import_module))
    return f"{world.size} ranks imported it together; {len(signatures.TABLE)} signatures as expected"


def groups(world: World) -> str:
    """2. Two engines in one world."""
    if world.size < 2:
        raise Skip("two engines need two ranks, on two GPUs")
    with job(world, world.size // 2) as running:
        running.update(running.source(0))
        drawn = world.all_gather_object(tokens(running.generate()))
    require(all(each == drawn[0] for each in drawn), "two replicas of the same weights draw different greedy tokens")
    return f"2 engines of tp {world.size // 2} draw the same greedy tokens"


def oracle(world: World) -> str:
    """3. Refit writes what the engine's own loader writes, and the model is then the one of transformers."""
    with job(world, min(world.size, 2)) as running:
        whole = whole_weights(SHAPE)
        running.update(running.source(0))
        ours = {name: value.clone() for name, value in running.engine.weights().items()}
        done = running.generate()
        executor = running.engine._worker._executor
        with running.engine.updating_weights():
            for value in running.engine.weights().values():
                value.zero_()  # else a reload() that does nothing would pass
            model_engine = executor.model_engine
            full = {name: value.to(world.device, torch.bfloat16) for name, value in hugging_face(whole).items()}
            model_engine.model_loader.reload(model_engine.model, full, allow_partial_loading=True)
        theirs = dict(running.engine._worker.parameters())  # the model's own, which reload() may have put elsewhere
        wrong = sum(world.all_gather_object([name for name in ours if not torch.equal(ours[name], theirs[name])]), [])
        require(not wrong, f"{len(wrong)} parameters differ from what reload() writes, such as {wrong[:1]}")
        require(tokens(running.generate()) == tokens(done), "greedy tokens differ after reload() of the same weights")
        folder = running.config.rollout.trtllm.model_dir
        assert folder is not None
        difference = gap(done, expected_log_probs(folder, whole, done, 1.0))
    require(difference < BF16_LOG_PROB, f"log-probs differ from transformers' by {difference:.4f} on average")
    return f"{len(ours)} parameters bitwise those of reload(); log-probs to {difference:.4f} of transformers'"


def repeat(world: World) -> str:
    """4. A hundred refits under CUDA graphs: the same tokens, and no memory more."""
    with job(world, min(world.size, 2)) as running:
        sources = [running.source(0), running.source(1)]
        drawn: list[list[list[int]]] = [[], []]
        free = 0
        for count in range(100):
            running.update(sources[count % 2])
            if count % 25 < 2:
                now = tokens(running.generate())
                require(drawn[count % 2] in ([], now), f"refit {count} brought other weights than before")
                drawn[count % 2] = now
            if count == 9:
                free = torch.cuda.mem_get_info()[0]
        lost = free - torch.cuda.mem_get_info()[0]
    require(drawn[0] != drawn[1], "two sets of weights draw the same tokens: CUDA graphs hold old ones")
    require(lost < FLAT_BYTES, f"90 refits took {lost / 2**20:.0f} MiB of GPU memory")
    return f"100 refits, {lost / 2**20:.0f} MiB more in use"


def idle(world: World) -> str:
    """5. Training takes minutes: the engine must not be taken for hung, nor its ranks spin."""
    with job(world, min(world.size, 2)) as running:
        running.update(running.source(0))
        before = tokens(running.generate())
        used, until = time.process_time(), time.monotonic() + IDLE_SECONDS
        while time.monotonic() < until:
            time.sleep(1.0)
        share = (time.process_time() - used) / IDLE_SECONDS
        shares = world.all_gather_object(share)
        require(tokens(running.generate()) == before, f"other tokens after {IDLE_SECONDS:.0f} s of idling")
    line = f"alive after {IDLE_SECONDS:.0f} s; cores used meanwhile: {', '.join(f'{each:.2f}' for each in shares)}"
    require(max(shares) < 0.5, f"{line}; try OMPI_MCA_mpi_yield_when_idle=1, which yields but still counts")
    return line


def sleep(world: World) -> str:
    """6. The KV cache goes and comes, and graphs still find it."""
    with job(world, min(world.size, 2), kv_cache_gib=4.0, max_num_seqs=512) as running:
        running.update(running.source(0))
        before, free = tokens(running.generate()), torch.cuda.mem_get_info()[0]
        running.engine.sleep()
        gained = torch.cuda.mem_get_info()[0] - free
        running.update(running.source(0))  # the trainer's order: refit while asleep
        running.engine.wake()
        after = tokens(running.generate())
    require(before == after, "other tokens after sleep, refit of the same weights, wake")
    require(gained > 0, "sleep gave no memory back")
    return f"sleep gave {gained / 2**30:.2f} GiB back; the same tokens after wake"


def fraction(world: World) -> str:
    """7. The share of the GPU's memory that torch may take is training's again."""
    torch.cuda.set_per_process_memory_fraction(0.75, world.device)
    with job(world, min(world.size, 2)):
        found = torch.cuda.get_per_process_memory_fraction(world.device)
        device = torch.cuda.current_device()
    torch.cuda.set_per_process_memory_fraction(1.0, world.device)
    require(found == 0.75, f"the share is {found} after the engine was built; expected 0.75")
    require(device == world.device.index, f"the device is {device} after the engine was built; expected {world.device}")
    return "share and device as before"


def definition(world: World) -> str:
    """8. A log-prob is of the sampled token, after temperature, before top-k and top-p; ends stay in; aborts resume."""
    lines = []
    with job(world, min(world.size, 2)) as running:
        whole = whole_weights(SHAPE)
        running.update(running.source(0))
        folder = running.config.rollout.trtllm.model_dir
        assert folder is not None
        for temperature, top_k, top_p in ((1.0, -1, 1.0), (0.6, -1, 1.0), (1.3, 20, 0.9)):
            sampling = SamplingParams(32, temperature=temperature, top_k=top_k, top_p=top_p)
            done = running.generate(sampling)
            difference = gap(done, expected_log_probs(folder, whole, done, temperature))
            where = f"temperature {temperature}, top_k {top_k}, top_p {top_p}"
            require(
                difference < BF16_LOG_PROB,
                f"{where}: log-probs differ from the definition by {difference:.4f} on average",
            )
            lines.append(f"{where}: {difference:.4f}")
            if temperature == 1.0:
                require(tokens(running.generate(sampling)) == tokens(done), "the same seed draws other tokens")
                require(
                    tokens(running.generate(sampling, seed=1)) != tokens(done), "another seed draws the same tokens"
                )
                ends = {int(completion.token_ids[5]) for completion in done}
                stopped = running.generate(SamplingParams(32, eos_token_ids=tuple(sorted(ends))))
                for completion in stopped:
                    last = int(completion.token_ids[-1])
                    require((completion.finish_reason == "stop") == (last in ends), "an end token is not in the output")
        asked: list[int] = []

        def soon() -> bool:
            asked.append(1)
            return len(asked) == 3

        long = SamplingParams(60, temperature=1.0)
        aborted = running.engine.generate(REQUESTS, long, seed=0, step=0, should_abort=soon)
        cut = [done for done in aborted if done.finish_reason == "abort"]
        rest = [
            Request(request.prompt_ids, request.uid, prefix_ids=done.token_ids)
            for request, done in zip(REQUESTS, aborted, strict=True)
            if done.finish_reason == "abort"
        ]
        finished = running.engine.generate(rest, long, seed=0, step=0)
        for first, second in zip(cut, finished, strict=True):
            require(len(first.token_ids) + len(second.token_ids) == 60, "an aborted response did not resume to its end")
        num_tokens = sum(len(done.token_ids) for done in cut)
    if not cut:
        raise Failed("nothing was under way when it was aborted; the model is too fast for this check")
    return "; ".join([*lines, f"{len(cut)} responses aborted with {num_tokens} tokens and resumed"])
