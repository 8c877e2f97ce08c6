"""GSM8K, grade-school word problems: openai/gsm8k as Parquet, or the original train.jsonl and test.jsonl."""

from hpcrl.data.source import USUAL_FILES, Dropped, FileSource, Row, rule_row, text

MARK = "####"
INSTRUCTION = f'Let\'s think step by step and output the final answer after "{MARK}".'


def convert(row: Row) -> Row:
    question, answer = text(row, "question"), text(row, "answer")
    _, marked, final = answer.rpartition(MARK)
    if not marked:
        raise Dropped(f"no {MARK} in answer")
    return rule_row("openai/gsm8k", f"{question} {INSTRUCTION}", final.strip().replace(",", ""), answer)


SOURCE = FileSource(
    # the dataset's folder has two versions of the answers, main and socratic
    files=(("main/train-*.parquet", "main/test-*.parquet"), *USUAL_FILES),
    convert=convert,
    template=f"{{question}} {INSTRUCTION}",
)
