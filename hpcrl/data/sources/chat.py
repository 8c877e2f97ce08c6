"""Chats for SFT: conversations in a column messages; the last message of the assistant is the answer."""

from hpcrl.data.source import USUAL_FILES, Dropped, FileSource, Row, answered_row, messages, split_answer, value


def convert(row: Row) -> Row:
    prompt, answer = split_answer(messages(value(row, "messages"), "messages"), "messages")
    if not prompt:
        raise Dropped("no message before the answer")
    return answered_row("chat", prompt, answer=answer)


SOURCE = FileSource(
    files=(("train_sft-*.parquet", "test_sft-*.parquet"), *USUAL_FILES),
    convert=convert,
    template="{messages}",
)
