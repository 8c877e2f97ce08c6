"""Imports go one way, and what is imported early stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hpcrl"

# folders, lowest first; a file imports from lower layers and from its own folder
LAYERS = (
    ("sandbox", "kernels", "batch", "algorithms"),
    ("runtime",),
    ("observe", "rewards"),
    ("config",),
    ("controller", "machine", "model"),
    ("engine", "data"),
    ("rollout",),
    ("forecast", "workers"),
    ("run", "slurm"),
    ("jobs",),
)
DOORS = (("cli", "api"), ("__main__",))  # files beside the folders, which no folder imports
OLD_NAMES = "moved"  # imports nothing of the package
LEVEL = {name: level for level, names in enumerate((*LAYERS, *DOORS)) for name in names}

HEAVY = ("torch", "mpi4py", "numpy", "megatron", "transformers", "pydantic", "yaml")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import, in functions and under TYPE_CHECKING too; relative ones resolved."""
    package = ("hpcrl", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            # `from hpcrl import runtime` names a folder as well
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def folder(module: str) -> str:
    return module.split(".")[1]


def sources() -> list[Path]:
    """`kernels` is a link, into which `**` does not go."""
    return sorted([*PACKAGE.rglob("*.py"), *PACKAGE.glob("kernels/*.py")])


def test_imports_go_one_way() -> None:
    wrong = []
    for path in sources():
        inside = path.relative_to(PACKAGE)
        own = inside.parts[0].removesuffix(".py")
        if own in ("__init__", OLD_NAMES):
            continue
        assert own in LEVEL, f"hpcrl/{own} stands in no layer; add it to LAYERS in this test and to the design"
        for line, module in imports(path):
            if not module.startswith("hpcrl."):
                continue
            other = folder(module)
            if other != own and LEVEL.get(other, len(LEVEL)) >= LEVEL[own]:
                wrong.append(f"{path}:{line}: {own} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_package_files_are_empty() -> None:
    """An __init__ that imports would make every module of its folder as heavy as the heaviest."""
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        # names of hpcrl.algorithms are imported when they are asked for
        lazy = (ast.ImportFrom, ast.Assign, ast.If, ast.FunctionDef) if path.parent.name == "algorithms" else ()
        # where hpcrl.kernels is; old names; the version, when it is asked for
        lazy = (ast.Import, ast.ImportFrom, ast.If, ast.FunctionDef) if path.parent == PACKAGE else lazy
        assert all(isinstance(node, (ast.Expr, *lazy)) for node in body), f"{path} holds code"


def test_every_folder_is_a_package() -> None:
    for path in sources():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py, so pip would leave it out"


def test_kernels_are_found_without_the_link(tmp_path: Path) -> None:
    """As in a checkout beside an installed wheel, in whose folder Python takes the checkout's modules."""
    (tmp_path / "hpcrl").mkdir()
    for path in PACKAGE.iterdir():
        if path.name != "kernels":
            (tmp_path / "hpcrl" / path.name).symlink_to(path)
    (tmp_path / "kernels").symlink_to(PACKAGE.parent / "kernels")
    program = "import hpcrl.kernels.chips; print(hpcrl.kernels.chips.__file__)"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(tmp_path / "kernels" / "chips.py")


def loaded_after(code: str) -> set[str]:
    """Top-level modules that are loaded once `code` has run in a new interpreter."""
    program = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.mark.parametrize("code", ["import hpcrl", "import hpcrl.cli"])
def test_command_line_imports_nothing_heavy(code: str) -> None:
    assert not loaded_after(code).intersection(HEAVY)


def test_config_needs_neither_torch_nor_mpi() -> None:
    code = "import hpcrl.config.loader, hpcrl.config.derive"
    assert not loaded_after(code).intersection({"torch", "mpi4py", "numpy", "megatron"})


@pytest.mark.slow
def test_algorithms_need_torch_and_numpy_alone() -> None:
    modules = ", ".join(f"hpcrl.algorithms.{path.stem}" for path in (PACKAGE / "algorithms").glob("[!_]*.py"))
    loaded = loaded_after(f"import hpcrl.algorithms, {modules}")
    assert not loaded.intersection({"megatron", "mpi4py", "pydantic", "yaml", "transformers", "h5py", "pyarrow"})


@pytest.mark.slow
def test_importing_starts_no_mpi() -> None:
    """`from mpi4py import MPI` initialises MPI; runtime/mpi_*.py do so, and only start-up imports those."""
    apart = {"hpcrl.__main__", *(f"hpcrl.runtime.{path.stem}" for path in (PACKAGE / "runtime").glob("mpi_*.py"))}
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in sources()}
    modules = ", ".join(sorted(name.removesuffix(".__init__") for name in names - apart))
    program = f"import sys, {modules}; sys.exit('mpi4py.MPI is loaded' if 'mpi4py.MPI' in sys.modules else 0)"
    run = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_batch_is_made_and_moved_without_torch() -> None:
    """Tensors are made at the workers; rank 0's loop and a login node handle numpy."""
    folders = ("batch", "controller", "observe/record", "observe/read", "observe/report")
    paths = [path for folder in folders for path in (PACKAGE / folder).glob("[!_]*.py")]
    modules = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    modules += [f"hpcrl.data.{name}" for name in ("answers", "command", "curriculum", "prompts", "sampler")]
    modules += [f"hpcrl.engine.checkpoint.{name}" for name in ("manifest", "store")]
    modules += ["hpcrl.algorithms.metrics", "hpcrl.rollout.protocol"]
    assert not loaded_after(f"import {', '.join(modules)}").intersection({"torch", "megatron", "transformers"})


def test_a_job_is_described_without_torch() -> None:
    """A login node may have none; and in a job, the ranks wait while rank 0 reads the template."""
    code = (
        "import hpcrl.forecast.command, hpcrl.slurm.submit, hpcrl.slurm.status, hpcrl.run.job, hpcrl.runtime.job; "
        "hpcrl.run.job.builtin_jobs()"
    )
    loaded = loaded_after(
        f"{code}; import hpcrl.rewards.score_worker; assert 'asyncio' not in __import__('sys').modules"
    )
    assert not loaded.intersection({"torch", "mpi4py", "megatron", "transformers"})


RANK = """
import sys, torch
from hpcrl.runtime import platform
if torch.cuda.is_available():
    sys.exit()
from hpcrl.algorithms import surrogate_losses, token_advantages
from hpcrl.workers import actor_objective
assert "megatron" not in sys.modules  # `submit` checks a job with these

platform.import_megatron()
import hpcrl.jobs.convert, hpcrl.jobs.evaluate, hpcrl.jobs.generate, hpcrl.jobs.train
import hpcrl.jobs.rm, hpcrl.jobs.score, hpcrl.jobs.sft
from hpcrl.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer("configs/tokenizer")
from hpcrl.data.row_file import RowFile
import pyarrow.parquet
pyarrow.parquet.write_table(pyarrow.table({"prompt": ["3 4 5:"]}), sys.argv[1])
assert RowFile(sys.argv[1]).column("prompt") == ["3 4 5:"]
weight = torch.ones(2, requires_grad=True)
weight.sum().backward()
for optimizer in (torch.optim.AdamW([weight], fused=True), torch.optim.SGD([weight], momentum=0.9)):
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
heavy = ["h5py", "matplotlib", "pandas", "pyarrow.dataset", "setuptools", "sympy", "tensorboard", "transformers"]
heavy += ["triton", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.tensor"]
heavy += ["torch.utils.cpp_extension"]
assert not set(heavy).intersection(sys.modules), set(heavy).intersection(sys.modules)

# and all of it is there for those who ask
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor, torch.utils.cpp_extension
import hpcrl.engine.checkpoint.sharded_load, hpcrl.engine.checkpoint.sharded_save
from transformers import AutoTokenizer, PreTrainedTokenizerFast
assert torch.utils.cpp_extension.load_inline and torch.distributed.checkpoint.default_planner
assert type(tokenizer) is PreTrainedTokenizerFast
whole = AutoTokenizer.from_pretrained("configs/tokenizer")
chat = [{"role": "user", "content": "3 4 5:"}]
assert whole.apply_chat_template(chat)["input_ids"] == tokenizer.apply_chat_template(chat)["input_ids"]
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not metadata.version("megatron-core").startswith("0.16."),
    reason="later versions of megatron-core derive classes from what 0.16 does without",
)
def test_a_rank_on_the_cpu_imports_no_more_than_it_uses(tmp_path: Path) -> None:
    """Each of these would add up to two seconds to the start of each rank."""
    command = [sys.executable, "-c", RANK, str(tmp_path / "rows.parquet")]
    run = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
