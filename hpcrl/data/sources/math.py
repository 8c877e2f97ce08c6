"""MATH, competition problems: the original folders of JSON files, or Parquet or JSONL with problem and solution."""

from hpcrl.data.source import USUAL_FILES, Dropped, FileSource, Row, rule_row, text
from hpcrl.rewards.scorers.math_answers import boxed_answer

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def convert(row: Row) -> Row:
    problem, solution = text(row, "problem"), text(row, "solution")
    answer = boxed_answer(solution)
    if not answer:
        raise Dropped("no \\boxed answer in solution")
    level, kind = str(row.get("level") or ""), str(row.get("type") or row.get("subject") or "")
    prompt = f"{problem} {INSTRUCTION}"
    return rule_row("DigitalLearningGmbH/MATH-lighteval", prompt, answer, solution, level=level, type=kind)


SOURCE = FileSource(
    # data/ first: some copies on Hugging Face have each problem there and in the folder of its subject
    files=(("train/*/*.json", "test/*/*.json"), ("data/train-*.parquet", "data/test-*.parquet"), *USUAL_FILES),
    convert=convert,
    template=f"{{problem}} {INSTRUCTION}",
)
