"""DAPO-Math-17k without its repetitions, for validation AIME 2024: Parquet in verl's layout."""

from hpcrl.data.source import USUAL_FILES, Dropped, FileSource, Row, messages, rule_row, text, value
from hpcrl.runtime.exits import InputError


def convert(row: Row) -> Row:
    """The prompt has its instruction already; DAPO-Math-17k-Processed keeps it in `source_prompt`."""
    prompt = messages(row.get("source_prompt") or value(row, "prompt"), "prompt")
    reward_model = value(row, "reward_model")
    if not isinstance(reward_model, dict):
        raise InputError(f"column 'reward_model' holds {reward_model!r}; expected a mapping with ground_truth")
    truth = reward_model.get("ground_truth")
    if not isinstance(truth, str) or not truth.strip():
        raise Dropped("no ground_truth")
    identifier = (row.get("extra_info") or {}).get("index")
    return rule_row(text(row, "data_source"), prompt, truth, id=str("" if identifier is None else identifier))


SOURCE = FileSource(
    files=(("dapo-math-17k.parquet", "aime-2024.parquet"), *USUAL_FILES),
    convert=convert,
    template="{prompt}",
)
