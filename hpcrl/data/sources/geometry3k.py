"""Geometry3K, problems with a figure: hiyouga/geometry3k as Parquet."""

from hpcrl.data.drawing import IMAGE
from hpcrl.data.source import USUAL_FILES, Dropped, FileSource, Row, rule_row, text, value

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
    "reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)


def convert(row: Row) -> Row:
    problem, answer, images = text(row, "problem"), text(row, "answer"), value(row, "images")
    if not images or problem.count(IMAGE) != len(images):
        raise Dropped(f"another number of {IMAGE} than pictures")
    made = rule_row("hiyouga/geometry3k", f"{problem} {INSTRUCTION}", answer, question=problem)
    made["extra_info"]["answer"] = answer
    return made | {"images": [{"bytes": image["bytes"], "path": image["path"]} for image in images]}


SOURCE = FileSource(files=USUAL_FILES, convert=convert, template=f"{{problem}} {INSTRUCTION}")
