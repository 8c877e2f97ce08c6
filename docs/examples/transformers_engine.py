"""`generate` of transformers as a rollout engine: run.plugins=[transformers_engine.py] rollout.engine=transformers

Each rank is a replica. Its tokens are those of the native engine, because a logits processor draws them with hpcrl's
keyed random numbers.
"""

from contextlib import nullcontext
from dataclasses import dataclass

from hpcrl import api


@dataclass(frozen=True)
class Parameters:
    batch_size: int = api.param(64, ge=1, help="sequences of one call of generate at most")


@api.register_engine("transformers", params=Parameters)
class Transformers(api.Engine):
    has_own_layout = True

    def check(self, config, tp):
        if tp > 1:
            raise api.InputError(f"rollout.engine=transformers with placement.rollout.tp={tp}; use 1")

    def shards(self, shape, rank, ranks):
        return api.hf_shards(shape)  # the tensors of model.safetensors, each a rectangle of one of Megatron's

    def make(self, groups, shape, config, *, ranks_on_node):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        dtype = getattr(torch, config.rollout.dtype or config.model.dtype)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**api.hf_config(shape)), dtype=dtype).eval()
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        longest = config.data.max_prompt_length + config.data.max_response_length
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return TransformersEngine(model.to(device), shape, longest, self.parameters(config).batch_size)


class TransformersEngine(api.RolloutEngine):
    def __init__(self, model, shape, longest, batch_size):
        self.model, self.shape, self.longest, self.batch_size = model, shape, longest, batch_size

    def weights(self):
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def updating_weights(self):
        return nullcontext()  # nothing cached outlives a call of generate

    def generate(self, requests, sampling, *, seed, step, source=None, should_abort=None, **callbacks):
        sampler = api.KeyedSampler(self.shape.softmax_size, sampling, step)
        call = Call(self, sampling, seed, sampler, should_abort, **callbacks)
        return api.completed(call, requests, source, None, should_abort)


class Call:
    """One call of an engine's `generate`; `step` draws the whole responses of a batch."""

    def __init__(self, engine, sampling, seed, sampler, should_abort, on_finished=None, on_step=None):
        self.engine, self.sampling, self.seed, self.sampler = engine, sampling, seed, sampler
        self.should_abort, self.on_finished, self.on_step = should_abort, on_finished, on_step
        self.waiting, self.completions, self.count = [], {}, 0

    @property
    def has_work(self):
        return bool(self.waiting)

    def add(self, requests):
        for request in requests:
            ids = request.context_ids(self.sampling, self.engine.longest, self.engine.shape.vocab_size)
            self.waiting.append((self.count, ids.tolist(), api.Drawn.of(request, self.sampling, self.seed)))
            self.count += 1

    def abort(self):
        for index, _, drawn in self.waiting:
            self.completions[index] = drawn.completion(0, "abort")
        self.waiting = []

    def step(self):
        import torch

        batch, self.waiting = self.waiting[: self.engine.batch_size], self.waiting[self.engine.batch_size :]
        width = max(len(ids) for _, ids, _ in batch)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for _, ids, _ in batch])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids, _ in batch])
        rows, is_open = [drawn for _, _, drawn in batch], [True] * len(batch)
        stops = () if self.sampling.ignore_eos else self.sampling.eos_token_ids

        def draw(token_ids, logits):  # the next token has the only finite score
            count = token_ids.size(1) - width
            live = [row for row, still in enumerate(is_open) if still]
            drawn = self.sampler.draw(logits[live], [rows[row] for row in live], [count] * len(live))
            chosen = torch.full_like(logits, -torch.inf)
            chosen[live, drawn] = 0
            return chosen

        def stop(token_ids, scores):
            count = token_ids.size(1) - width
            is_aborted = self.should_abort is not None and self.should_abort()
            for row, (index, _, drawn) in enumerate(batch):
                has_stopped = drawn.token_ids[count - 1] in stops
                if is_open[row] and (has_stopped or count == drawn.limit or is_aborted):
                    reason = "stop" if has_stopped else "length" if count == drawn.limit else "abort"
                    is_open[row], self.completions[index] = False, drawn.completion(count, reason)
                    if self.on_finished is not None and reason != "abort":
                        self.on_finished(index, self.completions[index])
            if self.on_step is not None:
                self.on_step()
            return torch.tensor([not still for still in is_open], device=token_ids.device)

        self.engine.model.generate(
            ids.to(self.engine.model.device),
            attention_mask=mask.to(self.engine.model.device),
            max_new_tokens=max(drawn.limit for drawn in rows),
            logits_processor=[draw],
            stopping_criteria=[stop],
        )
