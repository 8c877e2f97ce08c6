"""Metadata and requirements; `tools/environment.sh` installs them, torch first."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

COMMON = [
    "pydantic>=2.6",  # the YAML schema: types, bounds, unknown keys
    "pyyaml>=6",  # job templates
    "jinja2>=3.1",  # chat templates
    "numpy",  # columns and statistics; no bound here, because TensorRT-LLM wants < 2
    "h5py>=3.8",  # the rollout archive
    "pyarrow>=14",  # Parquet prompts
    "tensorboard>=2.14",  # the event files and the page that shows them
    "safetensors",  # weights of Hugging Face directories; `plan` reads their headers
    "tokenizers",  # the tokenizer that a small model ships; transformers pins its version
    "argcomplete>=3.1",  # completion of the command line in shells
    "tqdm>=4.60",  # progress on a terminal
    "rich>=13",  # samples in a terminal: colours that the terminal has, wrapped columns
    "matplotlib>=3.7",  # the PNG of the curves
    "pillow>=10.1",  # pictures of data files; transformers' image processors need it and do not require it
    "msgpack>=1.0",  # records of the append-only rollout logs
    "xxhash>=3.2",  # checksums of checkpoint files
    "einops",  # megatron-core's HyperCommGrid imports it and does not require it
    "psutil",  # megatron-core's dist_checkpointing imports it and does not require it; cores and memory in `check`
]

# What the native engine runs on, with a GPU or without. PyPI's torch brings CUDA and the triton that it was built with;
# a CPU build (a wheel that pip can see, PyTorch's CPU index) brings neither, and `tools/environment.sh` adds the triton
# of the same torch. The upper bounds are the newest versions that the tests have passed with.
NATIVE = [
    "torch>=2.11,<2.14",  # the first with variable-length attention
    "megatron-core==0.16.1; python_version < '3.12'",  # the last release for Python 3.10 and 3.11
    "megatron-core>=0.16.1,<0.20; python_version >= '3.12'",
    "mpi4py>=4.1,<5",  # control plane and the c10d backend
    "transformers>=4.57,<6",  # tokenizers and configurations of Hugging Face directories
]

CPU = [
    *NATIVE,
    "mpich>=5.0,<6",  # an MPI library and mpiexec without root
]

GPU = [
    *NATIVE,  # with the MPI library of the site, which mpi4py finds
    "numpy>=2",
    "transformers>=5",
    "triton; sys_platform == 'linux'",  # kernels/; torch pins the version
]

# TensorRT-LLM 1.2.1 decides this set (torch, transformers, numpy, MPI). Not all of it is on PyPI; the supported route
# is NVIDIA's container with megatron-core added. NVIDIA's Apex is not on PyPI either (the project of that name there is
# another one), so it is used when present and not listed.
TRTLLM = [
    "torch==2.9.1",
    "megatron-core==0.16.1",
    "mpi4py>=4.1,<5",  # on the container's Open MPI
    "transformer-engine[pytorch,core_cu13]==2.11.0",  # fp8; of later versions 2.20.2 has run with megatron-core 0.16.1
    "tensorrt-llm==1.2.1",  # rollout
    "transformers==4.57.3",
    "numpy<2",
]

HYBRID = [
    "fla-core>=0.4",  # kernels of gated delta nets on GPUs; torch computes them without it
]

MATH = [
    "math-verify>=0.9,<0.10",  # pypi.org/project/math-verify, for the scorer of this name; brings ANTLR, sympy
]

MCP = [
    "mcp>=2.3,<3",  # the client of environments whose tools are those of MCP servers; the tests' server
]

VERIFIERS = [
    # tasks and agents of environments; it requires mcp==2.0.0, which excludes the extra of this name
    "verifiers>=0.4,<0.5; python_version >= '3.11'",
    "uv>=0.7",  # verifiers starts its harnesses with it
]

GYMNASIUM = [
    "gymnasium>=1.0,<2",  # its text environments, for agents
]

# Not in TEST: fastmcp, which openenv requires, requires an mcp below 2
OPENENV = [
    "openenv>=0.10,<0.11",  # environments of this API, in process and the client of its servers
]

# Not in TEST: cellpylib, pycosat and zss, which it requires, have no wheels; pip builds them, pycosat with a C compiler
REASONING_GYM = [
    "reasoning-gym>=0.1.25,<0.2",  # draws the rows of `hpcrl data reasoning_gym`, and scores answers to them
]

# Trackers, each in a process of its own (hpcrl/observe/record/trackers.py)
WANDB = [
    "wandb>=0.19",  # offline runs in the run's folder
]

MLFLOW = [
    "mlflow-skinny>=3.1,<4",  # the client and the store; `mlflow` adds a server, pages and 30 further packages
    "sqlalchemy>=2",  # the SQLite store, which mlflow-skinny does not require
    "alembic>=1.10",  # creates the tables of the SQLite store
]

DOCS = [
    "mkdocs>=1.6,<2",  # builds the pages of docs/ and finds links that lead nowhere; its own themes need nothing more
]

TEST = [
    *MATH,
    *MCP,
    *GYMNASIUM,
    *DOCS,
    *WANDB,
    *MLFLOW,
    "pytest>=8",
    "pytest-timeout>=2.3",  # a hung collective must end a session
    "pytest-xdist>=3.6",  # the tests without MPI on all cores
    "hypothesis>=6.100",  # property tests
    "peft>=0.21",  # reads the adapters that training writes
    "selenium>=4.20",  # drives the Chromium that opens the pages of `hpcrl report`; a browser is no Python package
    "openai>=3",  # the client of agents that draw turns from the endpoint of their trajectory
    "gguf>=0.17",  # reads the file of tools/prepare_smollm2.py
    "triton>=3.5; sys_platform == 'linux'",  # kernels in its interpreter and compiler, which need no GPU
    "ruff>=0.6",  # lint and format
    "mypy>=1.11",  # types
    "types-PyYAML",  # PyYAML's types
]

readme = Path(__file__).with_name("README.md")

# hpcrl.kernels stands in kernels/: the link is made here, because archives and some checkouts lose one that git keeps
link = Path(__file__).with_name("hpcrl") / "kernels"
if not link.exists():
    link.symlink_to("../kernels")

TEMPLATES = ("configs", "slurm", "docs/examples", "tools/prepare_countdown.py")


class BuildWithTemplates(build_py):
    """Adds the files of TEMPLATES as hpcrl/templates/**. In a checkout hpcrl reads them where they stand."""

    def _get_data_files(self):  # of a wheel
        return [*super()._get_data_files(), self.templates()]

    def get_data_files_without_manifest(self):  # of an sdist
        return [*super().get_data_files_without_manifest(), self.templates()]

    def templates(self):
        root = Path(__file__).parent
        places = [root / name for name in TEMPLATES]
        paths = [path for place in places for path in (place.rglob("*") if place.is_dir() else [place])]
        inside = [path.relative_to(root) for path in paths if path.is_file() and "__pycache__" not in path.parts]
        return "hpcrl", "", str(Path(self.build_lib, "hpcrl", "templates")), sorted(map(str, inside))


setup(
    name="hpcrl",
    version="0.1.0",
    description="RL post-training of language models as one SPMD MPI program on megatron-core",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author="hpcrl developers",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    keywords="reinforcement learning, RLHF, GRPO, PPO, language models, MPI, Slurm, Megatron",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["hpcrl", "hpcrl.*"]),
    package_data={"hpcrl": ["**/*.json", "**/*.jinja", "observe/report/assets/*"]},
    cmdclass={"build_py": BuildWithTemplates},
    install_requires=COMMON,
    extras_require={
        "cpu": CPU,
        "gpu": GPU,
        "trtllm": TRTLLM,
        "hybrid": HYBRID,
        "math": MATH,
        "mcp": MCP,
        "verifiers": VERIFIERS,
        "gymnasium": GYMNASIUM,
        "openenv": OPENENV,
        "reasoning-gym": REASONING_GYM,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        "docs": DOCS,
        "test": TEST,
    },
    entry_points={"console_scripts": ["hpcrl=hpcrl.cli:main"]},
)
