"""Chat templates in the manner of model families, tokenizers for them, and a conversation in which each calls tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.data.tokenizer import load_tokenizer

LAST_QUERY = r"""
{%- set ns = namespace(query=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}{%- endfor -%}
"""
FIRST = "loop.first or loop.previtem.role != 'tool'"
LAST = "loop.last or loop.nextitem.role != 'tool'"

QWEN = (
    LAST_QUERY
    + r"""
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{- '<|im_start|>user' if FIRST }}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {{- '<|im_end|>\n' if LAST -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if preserve_thinking or loop.index0 > ns.query -%}
      {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}
    {%- endif -%}
    {{- m.content -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '\n\n' if m.content or not loop.first }}{{ '<tool_call>\n<function=' + call.function.name + '>\n' -}}
      {%- for key, value in call.function.arguments | items -%}
        {{- '<parameter=' + key + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' -}}
      {%- endfor -%}
      {{- '</function>\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<think>\n' }}{{ '\n</think>\n\n' if enable_thinking is defined and not enable_thinking -}}
{%- endif -%}
""".replace("FIRST", FIRST).replace("LAST", LAST)
)
GPT_OSS = r"""
{%- set ns = namespace(name=none) -%}
{{- '<|start|>system<|message|>Reasoning: low<|end|>' -}}
{%- for m in messages -%}
  {%- set following = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') -%}
  {%- set future = following | rejectattr('tool_calls') | list -%}
  {%- if m.role == 'tool' -%}
    {%- if ns.name is none -%}{{- raise_exception('no tool was called before') -}}{%- endif -%}
    {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' -}}
    {{- m.content | tojson }}{{ '<|end|>' -}}
  {%- elif m.role == 'assistant' and m.tool_calls -%}
    {%- set said = m.content or m.thinking -%}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + said + '<|end|>' if said and not future -}}
    {%- set call = m.tool_calls[0].function -%}
    {%- set ns.name = call.name -%}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
    {{- call.arguments | tojson }}{{ '<|call|>' -}}
  {%- elif m.role == 'assistant' -%}
    {%- set ns.name = none -%}
    {%- set ends = loop.last and not add_generation_prompt -%}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if ends and m.thinking -}}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}{{ '<|return|>' if ends else '<|end|>' -}}
  {%- else -%}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' if add_generation_prompt -}}
"""
GLM = (
    LAST_QUERY
    + r"""
{{- '[gMASK]<sop>' -}}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{- '<|observation|>' if FIRST }}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
  {%- elif m.role == 'assistant' -%}
    {%- set thought = m.reasoning_content if loop.index0 > ns.query or clear_thinking == false -%}
    {{- '<|assistant|>\n<think>' + (thought or '') + '</think>' }}{{ '\n' + m.content if m.content -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '\n<tool_call>' + call.function.name + '\n' -}}
      {%- for key, value in call.function.arguments.items() -%}
        {{- '<arg_key>' + key + '</arg_key>\n<arg_value>' -}}
        {{- value if value is string else value | tojson }}{{ '</arg_value>\n' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- else -%}
    {{- '<|' + m.role + '|>\n' + m.content -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}
""".replace("FIRST", FIRST)
)
KIMI = r"""
{%- for m in messages -%}
  {%- set kind = {'user': 'user', 'assistant': 'assistant'}.get(m.role, 'system') -%}
  {{- '<|im_' + kind + '|>' + (m.name or m.role) + '<|im_middle|>' -}}
  {{- '## Return of ' + m.tool_call_id + '\n' if m.role == 'tool' }}{{ m.content -}}
  {%- if m.tool_calls -%}
    {{- '<|tool_calls_section_begin|>' -}}
    {%- for call in m.tool_calls -%}
      {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' -}}
      {{- call.function.arguments | tojson }}{{ '<|tool_call_end|>' -}}
    {%- endfor -%}
    {{- '<|tool_calls_section_end|>' -}}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt -}}
"""
MINIMAX = (
    LAST_QUERY
    + r"""
{%- set last = namespace(called=false) -%}
{{- ']~!b[' -}}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if not last.called -%}{{- raise_exception('no tool was called before') -}}{%- endif -%}
    {{- ']~b]tool' if FIRST }}{{ '\n<response>' + m.content + '</response>' }}{{ '[e~[\n' if LAST -}}
  {%- elif m.role == 'assistant' -%}
    {%- set last.called = m.tool_calls -%}
    {{- ']~b]ai\n' -}}
    {{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content and loop.index0 > ns.query -}}
    {{- m.content -}}
    {%- if m.tool_calls -%}
      {{- '\n<minimax:tool_call>\n' -}}
      {%- for call in m.tool_calls -%}
        {{- '<invoke name="' + call.function.name + '">\n' -}}
        {%- for key, value in call.function.arguments | items -%}
          {{- '<parameter name="' + key + '">' -}}
          {{- value if value is string else value | tojson }}{{ '</parameter>\n' -}}
        {%- endfor -%}
        {{- '</invoke>\n' -}}
      {%- endfor -%}
      {{- '</minimax:tool_call>' -}}
    {%- endif -%}
    {{- '[e~[\n' -}}
  {%- else -%}
    {{- ']~b]' + m.role + '\n' + m.content + '[e~[\n' -}}
  {%- endif -%}
{%- endfor -%}
{{- ']~b]ai\n<think>\n' if add_generation_prompt -}}
""".replace("FIRST", FIRST).replace("LAST", LAST)
)


@dataclass(frozen=True)
class Family:
    """ends: texts of the tokens that end a response, the tokenizer's own first. format: of its tool calls. thought: the
    field of reasoning. trained: what the model writes in each of its turns of `conversation`."""

    template: str
    ends: tuple[str, ...]
    special: tuple[str, ...]
    format: str
    thought: str | None
    trained: tuple[str, str, str]

    def conversation(self) -> list[dict[str, Any]]:
        """Two calls, with reasoning where the template keeps it, and an answer."""
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": "", "tool_calls": [called(0, "add", a=2, b=3)]},
            {"role": "tool", "name": "add", "tool_call_id": "functions.add:0", "content": "5"},
            {"role": "assistant", "content": "", "tool_calls": [called(1, "say", text="5\n<b>")]},
            {"role": "tool", "name": "say", "tool_call_id": "functions.say:1", "content": "5\n<b>"},
            {"role": "assistant", "content": "It is 5."},
        ]
        if self.thought is not None:
            for turn, thought in zip(turns[1::2], ("add them", "say it", "so 5"), strict=True):
                if self.thought != "thinking" or turn is turns[-1]:  # GPT-OSS keeps none before a final answer
                    turn[self.thought] = thought
        return turns

    def tokenizer(self, folder: Path) -> Any:
        """A tokenizer of bytes, in which two line breaks are one token."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        bpe = models.BPE({text: i for i, text in enumerate([*alphabet, "ĊĊ"])}, [("Ċ", "Ċ")])
        backend = Tokenizer(bpe)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
        backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        backend.add_special_tokens([*self.ends, *self.special])
        backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
        made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=self.ends[0])
        made.chat_template = self.template
        made.save_pretrained(folder)
        ends = [backend.token_to_id(end) for end in self.ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return load_tokenizer(str(folder))


def called(index: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"functions.{name}:{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


FAMILIES = {
    "qwen3.5": Family(
        QWEN,
        ("<|im_end|>", "<|endoftext|>"),
        ("<|im_start|>",),
        "qwen3_coder",
        "reasoning_content",
        (
            "add them\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n"
            "</parameter>\n</function>\n</tool_call><|im_end|>",
            "say it\n</think>\n\n<tool_call>\n<function=say>\n<parameter=text>\n5\n<b>\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>",
            "so 5\n</think>\n\nIt is 5.<|im_end|>",
        ),
    ),
    "gpt-oss": Family(
        GPT_OSS,
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"),
        "openai",
        "thinking",
        (
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
            ' to=functions.say<|channel|>commentary json<|message|>{"text": "5\\n<b>"}<|call|>',
            "<|channel|>analysis<|message|>so 5<|end|><|start|>assistant<|channel|>final<|message|>It is 5.<|return|>",
        ),
    ),
    "glm-4.5": Family(
        GLM,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        "glm45",
        "reasoning_content",
        (
            "\n<think>add them</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>",
            "\n<think>say it</think>\n<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>5\n<b></arg_value>\n"
            "</tool_call><|observation|>",
            "\n<think>so 5</think>\nIt is 5.<|user|>",
        ),
    ),
    "kimi-k2": Family(
        KIMI,
        ("<|im_end|>",),
        (
            *(f"<|im_{kind}|>" for kind in ("user", "assistant", "system", "middle")),
            *(f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_end")),
            "<|tool_call_argument_begin|>",
        ),
        "kimi_k2",
        None,
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 2, "b": 3}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.say:1<|tool_call_argument_begin|>"
            '{"text": "5\\n<b>"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
            "It is 5.<|im_end|>",
        ),
    ),
    "minimax-m2": Family(
        MINIMAX,
        ("[e~[",),
        ("]~!b[", "]~b]"),
        "minimax_m2",
        "reasoning_content",
        (
            'add them\n</think>\n\n\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
            '<parameter name="b">3</parameter>\n</invoke>\n</minimax:tool_call>[e~[',
            'say it\n</think>\n\n\n<minimax:tool_call>\n<invoke name="say">\n<parameter name="text">5\n<b>'
            "</parameter>\n</invoke>\n</minimax:tool_call>[e~[",
            "so 5\n</think>\n\nIt is 5.[e~[",
        ),
    ),
}
