"""An update of the training engine alone: micro-batches forward and backward, then the optimizer, beside the forecast.

Weights are random ones, drawn on the device. The kernels are those of one update, by torch's profiler.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import Config, DdpConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.forecast.memory.memory import GIB, TrainingPlan
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import predict
from hpcrl.model.build import DTYPES
from hpcrl.model.shape import Lora, training_flops
from hpcrl.run.performance import peak_of
from hpcrl.runtime import accelerator
from hpcrl.runtime.groups import make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu.models import DENSE, LORA, MIXTURE, REHEARSAL, config_of, draw_on_the_device, machine, shape_of
from tools.gpu.outcome import Skip, print_head, print_row
from tools.gpu.rates import kernels_of, print_kernels, profiler

MICRO_BATCHES, PROMPT, RESPONSE, TIMED = (2, 4, 4, 1) if REHEARSAL else (4, 16, 496, 2)
TOKENS = 64 if REHEARSAL else 16384


def of(world: World, template: Path, tokens: int = TOKENS) -> str:
    count = MICRO_BATCHES * (tokens // (PROMPT + RESPONSE))  # sequences
    config = config_of(template, *sizes(count, tokens))
    engine = made(world, config, template)
    step = partial(update, engine, batch_of(count), tokens, config)
    seconds, norm = timed(step, world.device)
    peak = torch.cuda.max_memory_allocated() / GIB if world.device.type == "cuda" else None
    expected, planned = forecast(config)
    print_forecast(template, count, seconds, expected, peak, planned)
    if world.device.type == "cuda":
        with profiler() as profiled:
            step()
            torch.cuda.synchronize()
        print_kernels(kernels_of(profiled, f"update.{template.stem}", 1))
    return f"{MICRO_BATCHES} micro-batches of {tokens} tokens; gradient norm {norm:.3g}"


dense = partial(of, template=DENSE)
mixture = partial(of, template=MIXTURE)
lora = partial(of, template=LORA, tokens=TOKENS // 2)  # whose activations fit 80 GB


def overlap(world: World) -> str:
    """The dense model's update by replicas on all ranks: communication after computation, and beside it."""
    if world.size == 1:
        raise Skip("one rank has no other replicas")
    if world.device.type == "cuda" and not accelerator.has_nccl():
        raise Skip("ranks that share a GPU block in each transfer")
    count, layout = MICRO_BATCHES * (TOKENS // (PROMPT + RESPONSE)), Layout(tuple(range(world.size)))
    config = config_of(DENSE, *sizes(count, TOKENS))
    print_head(world, "gradients reduced", "weights gathered", "update, s", "gradient norm")
    for modes in ((False, False), (True, False), (True, True)):
        ddp = DdpConfig(overlap_grad_reduce=modes[0], overlap_param_gather=modes[1])
        engine = made(world, config, DENSE, layout, ddp)
        seconds, norm = timed(partial(update, engine, batch_of(count), TOKENS, config), world.device)
        slowest = max(world.all_gather_object(seconds))
        beside = ("beside computation" if mode else "after it" for mode in modes)
        print_row(world, *beside, f"{slowest:.3f}", f"{norm:.5g}")
        del engine
        gc.collect()  # the next one needs its memory
    return f"{world.size} replicas: {slowest:.3f} s an update with overlap"


def sizes(count: int, tokens: int) -> tuple[str, ...]:
    """The job whose update this is, for the forecast: eight samples of each prompt, as the templates have."""
    prompts = count // 8
    return (
        *(f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={prompts}"),
        *(f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}"),
        f"actor.ppo_max_token_len_per_gpu={tokens}",
    )


def made(
    world: World, config: Config, template: Path, layout: Layout | None = None, ddp: DdpConfig | None = None
) -> TrainEngine:
    """Make the actor's engine.

    Args:
        layout: the actor's layout; None: this rank by itself.
    """
    draw_on_the_device()
    groups = make_groups({"actor": layout or Layout((world.rank,))}, world.rank)["actor"]
    model = config.model
    return TrainEngine(
        shape_of(template),
        groups,
        dtype=DTYPES[model.dtype],
        optim=config.actor.optim,
        total_steps=TIMED + 2,
        recompute=model.recompute,
        te=model.transformer_engine,
        moe=model.moe,
        gradient_accumulation_fusion=model.gradient_accumulation_fusion,
        lora=Lora.from_config(model),
        head_chunk_tokens=config.trainer.head_chunk_tokens,
        ddp=ddp,
    )


def batch_of(count: int) -> DataProto:
    ids = np.random.default_rng(0).integers(0, 500, (count, PROMPT + RESPONSE), dtype=np.int32)
    mask = Ragged.from_lengths(np.ones(count * RESPONSE, np.float32), [RESPONSE] * count)
    return DataProto({"input_ids": Ragged.from_rows(list(ids), np.int32), "response_mask": mask})


def update(engine: TrainEngine, batch: DataProto, tokens: int, config: Config) -> float:
    """Return the gradient norm."""
    count = len(batch) * RESPONSE

    def loss(outputs: dict[str, torch.Tensor], part: TensorBatch) -> tuple[torch.Tensor, dict]:
        return -(outputs["log_probs"] * part.padded("response_mask")).sum() / count, {}

    return engine.train(batch, max_tokens=tokens, loss=loss, temperature=config.rollout.temperature)["grad_norm"]


def timed(step: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """Median seconds after one that compiles, and the last gradient norm."""
    norm, found = step(), []
    for _ in range(TIMED):
        accelerator.synchronize(device)
        start = time.perf_counter()
        norm = step()
        accelerator.synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found), norm


def forecast(config: Config) -> tuple[float, float]:
    """Seconds and GiB, without an engine, that hpcrl.forecast expects."""
    job = TrainingPlan(config)
    seconds = predict(job, machine(), Lengths.fixed(PROMPT, RESPONSE)).phases["update_actor"]
    row = next(row for row in job.rows() if row.phase == "update_actor")
    return seconds, (job.states["actor", 0].total + row.activations + row.logits) / GIB


def print_forecast(
    template: Path, count: int, seconds: float, expected: float, peak: float | None, planned: float
) -> None:
    shape, lengths = shape_of(template), [PROMPT + RESPONSE] * count
    flops = training_flops(shape, lengths, count * RESPONSE, has_adapters=template == LORA)
    top = peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    mfu = f"{flops / seconds / top:.1%}" if top else "-"
    columns = ("update", "tokens", "s", "forecast, s", "tokens/s", "MFU", "peak, GiB", "plan, GiB")
    cells = (template.stem, sum(lengths), f"{seconds:.3f}", f"{expected:.3f}", f"{sum(lengths) / seconds:,.0f}")
    cells = (*cells, mfu, "-" if peak is None else f"{peak:.1f}", f"{planned:.1f}")
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}\n| {' | '.join(map(str, cells))} |")
