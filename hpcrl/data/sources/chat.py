"""Chats for SFT: conversations in a column messages."""

from hpcrl.data.source import USUAL_FILES, Dropped, FileSource, Row, answered_row, messages, split_answer, value


def convert(row: Row) -> Row:
    """The whole conversation, and as the prompt what is before its last message."""
    conversation = messages(value(row, "messages"), "messages")
    prompt, _ = split_answer(conversation, "messages")
    if not prompt:
        raise Dropped("no message before the answer")
    return answered_row("chat", prompt, messages=conversation)


SOURCE = FileSource(
    files=(("train_sft-*.parquet", "test_sft-*.parquet"), *USUAL_FILES),
    convert=convert,
    template="{messages}",
)
