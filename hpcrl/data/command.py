"""`hpcrl data`: a dataset in verl's schema from downloaded files, or drawn; duplicates between two sets of files; which
tokens of a row are trained.

Needs neither MPI nor torch nor a network.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hpcrl.data.duplicates import NUM_WORDS, THRESHOLD, find_duplicates, picture_key, prompt_text
from hpcrl.data.prepare import draw_rows, prepare_files, write
from hpcrl.data.row_file import RowFile, columns_of, read_jsonl, short_names
from hpcrl.data.source import ConfigurableSource, FileSource, Source, all_sources
from hpcrl.runtime import exits
from hpcrl.runtime.launcher import is_first_launched
from hpcrl.sandbox.new_files import draft_of

if TYPE_CHECKING:
    from hpcrl.config.schema import Config

EXAMPLE_CHARACTERS = 100  # of a prompt


def main(arguments: list[str], load_job: Callable[[str], Any]) -> NoReturn:
    """Run `hpcrl data`.

    Args:
        load_job: returns the class of a job, given its name.
    """
    sources = all_sources()
    parsed = parser_of(sources).parse_args(arguments)
    if not is_first_launched(os.environ):
        sys.exit(exits.DONE)
    with exits.one_line_for_user_errors():
        if parsed.name == "show":
            sys.exit(show(parsed, load_job))
        run = {"check": check, "pairs": pairs}.get(parsed.name)
        sys.exit(run(parsed) if run is not None else prepare(parsed, sources[parsed.name][0]))


def parser_of(sources: dict[str, tuple[Source | ConfigurableSource, str]]) -> argparse.ArgumentParser:
    parser = exits.ArgumentParser(
        prog="hpcrl data",
        description="Write train.parquet and val.parquet in verl's schema, and dataset.json, or compare such files.",
    )
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (source, line) in sources.items():
        command = commands.add_parser(name, help=line, description=line)
        if isinstance(source, FileSource):
            command.add_argument(
                "--from", dest="folder", type=Path, required=True, metavar="DIR", help="downloaded files"
            )
            command.add_argument("--val-rows", type=number, metavar="N", help="hold out, if the files have none")
            command.add_argument(
                "--drop-duplicates", action="store_true", help="drop training rows with a validation prompt"
            )
        else:
            command.add_argument("--rows", type=number, default=2000, metavar="N", help="training rows (2000)")
            command.add_argument("--val-rows", type=number, default=200, metavar="N", help="validation rows (200)")
        if isinstance(source, ConfigurableSource):
            source.add_options(command)
        command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
        command.add_argument("--seed", type=int, default=0, metavar="N", help="of what is held out or drawn (0)")
        if isinstance(source, FileSource) and source.problem is None:
            add_threshold(command)
        else:
            command.set_defaults(threshold=None)
    check = commands.add_parser("check", help="whether validation prompts are in the training files, exactly or nearly")
    for option in ("--train", "--val"):
        check.add_argument(option, nargs="+", required=True, metavar="FILE", help="Parquet or JSONL")
    check.add_argument("--prompt-key", default="prompt", metavar="COLUMN", help="as data.prompt_key (prompt)")
    check.add_argument("--image-key", default="images", metavar="COLUMN", help="as data.image_key (images)")
    add_threshold(check)
    pairs = commands.add_parser("pairs", help="chosen and rejected answers from scored samples of `hpcrl generate`")
    pairs.add_argument("--samples", required=True, metavar="FILE", help="generations.jsonl")
    pairs.add_argument(
        "--data", nargs="+", required=True, metavar="FILE", help="files of the prompts that were sampled"
    )
    pairs.add_argument("--out", type=Path, required=True, metavar="FILE", help="Parquet file to write")
    show = commands.add_parser("show", help="which tokens of a row are trained, as a job prints it of its first row")
    show.add_argument("file", metavar="FILE", help="Parquet or JSONL")
    show.add_argument("--row", type=int, default=0, metavar="N", help="the row, counted from 0 (0)")
    jobs = ("sft", "preference", "rm", "train")
    show.add_argument("--job", choices=jobs, help="the job that reads the row; default: by the columns of FILE")
    show.add_argument("--full", action="store_true", help="do not shorten long texts")
    show.add_argument("config", metavar="CONFIG", help="YAML file of the job")
    show.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override a key")
    return parser


def add_threshold(parser: argparse.ArgumentParser) -> None:
    help_text = f"Jaccard similarity of near duplicates, over {NUM_WORDS} successive words ({THRESHOLD})"
    parser.add_argument("--threshold", type=share, default=THRESHOLD, metavar="X", help=help_text)


def number(text: str) -> int:
    """An option's number of rows. argparse shows this function's name for text that is no integer."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text}; expected at least 1")
    return int(text)


def share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"found {text}; expected above 0, at most 1")
    return float(text)


def prepare(parsed: argparse.Namespace, found: Source | ConfigurableSource) -> int:
    source = found.configured(parsed) if isinstance(found, ConfigurableSource) else found
    if isinstance(source, FileSource):
        options = {name: getattr(parsed, name) for name in ("seed", "val_rows", "drop_duplicates", "threshold")}
        dataset = prepare_files(parsed.name, source, parsed.folder, parsed.out, **options)
    else:
        dataset = draw_rows(source, rows=parsed.rows, val_rows=parsed.val_rows, seed=parsed.seed)
    description = write(parsed.name, source, dataset, parsed.out, seed=parsed.seed, threshold=parsed.threshold)
    print("\n".join(table(description, parsed.out)))
    return exits.DONE


def table(description: dict[str, Any], out: Path) -> Iterator[str]:
    """Lines about what was written."""
    yield f"{'split':<5} {'read':>8} {'dropped':>8} {'rows':>8}  {'sha256':<12}  file"
    for name, split in description["splits"].items():
        dropped = sum(split["dropped"].values())
        counts = f"{split['read']:>8} {dropped:>8} {split['rows']:>8}"
        yield f"{name:<5} {counts}  {split['sha256'][:12]}  {out / split['file']}"
    for name, split in description["splits"].items():
        for reason, count in split["dropped"].items():
            yield f"dropped from {name}: {count:>6}  {reason}"
    if description["val_is_held_out_of_train"]:
        yield "the files have no validation rows: these were held out of the training rows"
    duplicates = description["duplicates"]
    threshold = duplicates.get("jaccard_threshold")
    yield from duplicate_lines(duplicates["train_rows"], duplicates["val_rows"], threshold, duplicates["examples"])


def duplicate_lines(
    train: dict[str, int], val: dict[str, int], threshold: float | None, examples: list[dict[str, Any]]
) -> Iterator[str]:
    """How many rows have a duplicate in the other set, and examples. A threshold of None: problems were compared."""
    compared = "problems" if threshold is None else "prompts"
    kinds = {"exact": "exactly"} if threshold is None else {"exact": "exactly", "near": f"nearly, at {threshold}"}
    for kind, what in kinds.items():
        yield f"validation {compared} in the training data, {what}: {val[kind]}, in {train[kind]} training rows"
    for example in examples:
        for split in ("train", "val"):
            words = " ".join(example[split].split())
            cut = words if len(words) <= EXAMPLE_CHARACTERS else f"{words[:EXAMPLE_CHARACTERS]}..."
            yield f"  {example['similarity']:.3f} {split:<5} {cut}"


def pairs(parsed: argparse.Namespace) -> int:
    num_pairs, num_prompts = pairs_of_samples(parsed.samples, parsed.data, parsed.out)
    print(f"{parsed.out}: {num_pairs} pairs of {num_prompts} prompts; the others' samples have equal scores")
    return exits.DONE


SAMPLE_KEYS = ("uid", "response", "score")


def best_and_worst(samples: Iterable[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """uid -> (response with the highest score, response with the lowest), the first drawn of equal ones; without the
    prompts whose scores are all equal. A sample without a score, because scoring failed, does not count."""
    best: dict[str, dict[str, Any]] = {}
    worst: dict[str, dict[str, Any]] = {}
    for sample in samples:
        uid, score = sample["uid"], sample["score"]
        if score is None:
            continue
        if uid not in best or score > best[uid]["score"]:
            best[uid] = sample
        if uid not in worst or score < worst[uid]["score"]:
            worst[uid] = sample
    return {
        uid: (best[uid]["response"], worst[uid]["response"]) for uid in best if best[uid]["score"] > worst[uid]["score"]
    }


def read_samples(path: str) -> Iterable[dict[str, Any]]:
    """The lines that `hpcrl generate` wrote."""
    for number, sample in read_jsonl(path):
        missing = [name for name in SAMPLE_KEYS if name not in sample]
        if missing:
            raise exits.InputError(
                f"{path}:{number}: no {', '.join(missing)}; expected scored samples of `hpcrl generate`; "
                "it scores those of prompts that have a rule"
            )
        yield sample


def pairs_of_samples(samples: str, files: Sequence[str], out: Path) -> tuple[int, int]:
    """Write the rows of data files with the columns `chosen` and `rejected` from samples of their prompts.

    Returns the numbers of pairs, and of prompts with samples. Raises InputError if there is no pair.
    """
    import pyarrow
    import pyarrow.parquet

    row_files = {name: RowFile(path) for name, path in zip(short_names(files), files, strict=True)}
    uids = dict.fromkeys(str(sample["uid"]) for sample in read_samples(samples))
    pairs = best_and_worst(read_samples(samples))
    rows = []
    for uid, (chosen, rejected) in pairs.items():
        name, row, _ = uid.rsplit(":", 2)
        if name not in row_files or int(row) >= len(row_files[name]):
            raise exits.InputError(
                f"{samples}: a sample of row {row} of {name}, which is not in --data {', '.join(files)}; "
                "name the files that were data.val_files of `hpcrl generate`, in their order"
            )
        rows.append(row_files[name][int(row)] | {"chosen": chosen, "rejected": rejected})
    if not rows:
        raise exits.InputError(
            f"{samples}: all samples of each of {len(uids)} prompts have the same score; draw more of them (rollout.n)"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(out) as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft)
    return len(rows), len(uids)


def show(parsed: argparse.Namespace, load_job: Callable[[str], Any]) -> int:
    config = load_job(parsed.job or "train").read_config(parsed.config, parsed.overrides)
    job = load_job(parsed.job or job_of(columns_of(parsed.file, config.data.format), config))
    supervision = job.supervision(job.prepare(config), parsed.file, parsed.row)
    print(supervision.coloured(full=parsed.full) or supervision.bracketed(full=parsed.full))
    return exits.DONE


def job_of(columns: Sequence[str], config: Config) -> str:
    """The job that trains on files with these columns; `train`, which reads prompts, if no other does."""
    sft, preference = config.section("sft"), config.section("preference")
    pair, label = {preference.chosen_key, preference.rejected_key}, {preference.completion_key, preference.label_key}
    if pair <= set(columns) or label <= set(columns):
        return "preference"
    return "sft" if {sft.messages_key, sft.answer_key} & set(columns) else "train"


def check(parsed: argparse.Namespace) -> int:
    """Compare two sets of files. The exit code is 1 if a validation prompt is among the training prompts."""
    prompts, pictures = list[list[str]](), list[list[str]]()
    for paths in (parsed.train, parsed.val):
        files = [RowFile(path) for path in paths]
        for file in files:
            file.require(parsed.prompt_key, "--prompt-key")
        prompts.append([prompt_text(prompt) for file in files for prompt in file.column(parsed.prompt_key)])
        pictures.append([picture_key(images) for file in files for images in file.column(parsed.image_key)])
    duplicates = find_duplicates(prompts[0], prompts[1], parsed.threshold, (pictures[0], pictures[1]))
    examples = [
        {"similarity": one.similarity, "train": prompts[0][one.train_row], "val": prompts[1][one.val_row]}
        for one in duplicates.examples
    ]
    print(f"{len(prompts[0])} training rows, {len(prompts[1])} validation rows")
    print("\n".join(duplicate_lines(duplicates.counts("train"), duplicates.counts("val"), parsed.threshold, examples)))
    return exits.OTHER if duplicates.examples else exits.DONE
