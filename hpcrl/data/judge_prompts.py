"""Prompts of a judge: rows of data and responses as questions, and questions as tokens of the judge."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcrl.data.chat import ChatTemplate
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.tokenizer import encode_texts, load_tokenizer
from hpcrl.rewards.judge import Criterion, Judging, Sample, criteria_of, text_of, without_specials
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.schema import Config

SECTION = "reward.judge"


class Encoded(NamedTuple):
    """text: with the chat template. ids: None if the tokenizer cannot encode it, or it is too long."""

    text: str
    ids: list[int] | None


class JudgePrompts:
    """Raises InputError for a template that does not fit the kind, or that the judge's tokenizer cannot encode."""

    def __init__(self, config: Config) -> None:
        cfg = config.reward.judge
        self._cfg = cfg
        self.tokenizer = load_tokenizer(tokenizer_of(config))
        options = cfg.apply_chat_template_kwargs
        self._template = ChatTemplate(self.tokenizer, None, options, f"{SECTION}.apply_chat_template_kwargs")
        template = _read(cfg.template_path) if cfg.template_path is not None else cfg.template
        try:
            self.judging = Judging(cfg.kind, template, cfg.pattern, cfg.scale)
            self._rubric = criteria_of(cfg.rubric)
        except ValueError as error:
            raise InputError(f"{SECTION}: {error}") from None
        empty = self.judging.questions([Sample("", "", "", (), None)] * 2)[0].text
        encode_texts(self.tokenizer, [self._render(empty)], [f"{SECTION}.template"], self._is_plain)

    @property
    def _is_plain(self) -> bool:
        return self.tokenizer.chat_template is None

    @cached_property
    def _specials(self) -> tuple[str, ...]:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple(dict.fromkeys([*map(str, self.tokenizer.all_special_tokens), *added]))

    def check_rows(self, prompts: PromptDataset) -> None:
        """Raise InputError for a row that lacks what the questions need."""
        needs_rubric, needs_truth = self.judging.kind == "rubric", self.judging.compares_reference
        for row in range(len(prompts)) if needs_rubric or needs_truth else ():
            record = prompts.record(row)
            if needs_truth and record["ground_truth"] is None:
                raise InputError(
                    f"{prompts.where(row)}: no reward_model.ground_truth, which {SECTION}.kind=pairwise compares with"
                )
            if needs_rubric and not self._criteria(record, prompts.where(row)):
                raise InputError(
                    f"{prompts.where(row)}: no extra_info.rubric, and {SECTION}.rubric is empty; expected criteria in "
                    "one of them"
                )

    def sample(self, record: Mapping[str, Any], response: str, group: Hashable) -> Sample:
        """A response to the prompt of `record` (`PromptDataset.record`)."""
        return Sample(
            text_of(record["prompt"]) or "",
            without_specials(response, self._specials),
            text_of(record["ground_truth"]),
            self._criteria(record, "extra_info.rubric"),
            group,
        )

    def encode(self, question: str) -> Encoded:
        """The question as the judge reads it."""
        text = self._render(question)
        try:
            (ids,) = encode_texts(self.tokenizer, [text], [f"{SECTION}: a question"], self._is_plain)
        except InputError:
            return Encoded(text, None)
        return Encoded(text, ids if 0 < len(ids) <= self._cfg.max_prompt_length else None)

    def _criteria(self, record: Mapping[str, Any], where: str) -> tuple[Criterion, ...]:
        given = record["extra_info"].get("rubric")
        if given is None or self.judging.kind != "rubric":
            return self._rubric
        try:
            return criteria_of(given)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None

    def _render(self, question: str) -> str:
        if self._is_plain:
            return question
        messages = [{"role": "user", "content": question}]
        return self._template.text(messages, SECTION, generation_prompt=True)


def tokenizer_of(config: Config) -> str:
    """Directory of the judge's tokenizer."""
    models = (config.reward.judge.model, config.model)
    named = [name for model in models if model is not None for name in (model.tokenizer, model.path)]
    path = next((name for name in named if name is not None), None)
    if path is None:
        raise InputError(f"{SECTION}.model.tokenizer and {SECTION}.model.path are null; name a tokenizer directory")
    return path


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{SECTION}.template_path={os.path.abspath(path)} cannot be read: {why}") from None
