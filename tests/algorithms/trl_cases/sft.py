"""Batches of TRL's SFTTrainer, with its labels, loss and gradient for a small Llama; see
tools/record_cases.py."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TOKENIZER = Path(__file__).parents[3] / "configs" / "tool_tokenizer"
TURN = "{% if m.role == 'assistant' %}A:{% generation %}{{ m.content + eos_token }}{% endgeneration %} {% else %}"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    + TURN
    + "{{ m.role[0] }}:{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 108,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}


def _conversation(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant") if len(turns) % 2 == 0 else ("system", "user", "assistant")
    roles = roles[: len(roles) - 2] + ("user", "assistant") * (len(turns) // 2)
    return {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]}


CONVERSATIONS = [
    _conversation("2+3?", "5", "and 4?", "9, I think"),
    _conversation("Be short.", "What is 7*6?", "42"),
    _conversation("Hi", "Hello", "Bye", "See you", "Yes", "So long"),
    _conversation("1", "2"),
]
ANSWERS = [{"prompt": row["messages"][-2]["content"], "completion": row["messages"][-1]["content"] + "<|eos|>"}
           for row in CONVERSATIONS]  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "conversations": {"rows": CONVERSATIONS, "loss_type": "nll"},
    "answers": {"rows": ANSWERS, "loss_type": "nll"},
    "dft": {"rows": CONVERSATIONS, "loss_type": "dft"},
}


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Weights of a model, fp32: larger than those of a model before training."""
    rng = np.random.default_rng(7)
    return {
        key: (rng.normal(0, 0.2, shape) + (len(shape) == 1)).astype(np.float32) for key, shape in sorted(shapes.items())
    }


def reference(name: str, case: dict[str, Any]) -> dict[str, np.ndarray]:
    """One step of SGD at learning rate 1 over two micro-batches of two: the loss, its gradient, tokens and labels."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    before = weights({key: tuple(weight.shape) for key, weight in model.state_dict().items()})
    model.load_state_dict({key: torch.from_numpy(weight.copy()) for key, weight in before.items()})
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=1,
            learning_rate=1.0,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=1e9,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            loss_type=case["loss_type"],
            assistant_only_loss="messages" in case["rows"][0],
        )
        trainer = SFTTrainer(model, settings, train_dataset=Dataset.from_list(case["rows"]), processing_class=tokenizer)
        loss = trainer.train().training_loss
        data = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    found = {f"gradient {key}": before[key] - weight.numpy() for key, weight in model.state_dict().items()}
    found |= {"loss": np.array(loss)}
    for number, (ids, labels) in enumerate(data):
        found |= {f"ids {number}": np.array(ids, np.int32), f"labels {number}": np.array(labels, np.int32)}
    return found
