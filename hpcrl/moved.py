"""Names of modules before the folders were redrawn, in November 2026: an old name raises ImportError with the new one.

Those that users' files and commands name still work. `import hpcrl` imports this module, also in programs under test,
so it imports nothing that Python has not loaded yet.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

# below hpcrl: old folder -> where most of its modules are, and old module -> new module for the others
FOLDERS = {
    "grid": "runtime",
    "reshard": "engine.refit",
    "checkpoint": "engine.checkpoint",
    "tracing": "observe.trace",
    "report": "observe.report",
    "viewer": "observe.report",
    "telemetry": "observe.record",
    "plan": "forecast.memory",
    "predict": "forecast.time",
    "rollout_source": "run.rollouts",
    "rollout.native": "rollout.engines.native",
    "rollout.tensorrt_llm": "rollout.engines.tensorrt_llm",
    "rollout.agent": "rollout.environments",
    "model.hf": "model",
}
MODULES = {
    "algorithms.registry": "algorithms.parameters",
    "batch.balance": "batch.packing",
    "batch.tensors": "batch.ragged",
    "batch.transfer": "batch.ragged",
    "controller.profiler": "controller.busy",
    "controller.wire": "controller.executor",
    "data.drawing": "data.sources.drawn",
    "data.encoding": "data.tokenizer",
    "data.picture_index": "data.image_loader",
    "data.sampled_pairs": "data.split",
    "data.sft": "data.supervision",
    "data.source_files": "data.source",
    "data.sources.chat": "data.sources.downloaded",
    "data.sources.count_squares": "data.sources.drawn",
    "data.sources.countdown": "data.sources.downloaded",
    "data.sources.countdown_words": "data.sources.drawn",
    "data.sources.dapo_math": "data.sources.downloaded",
    "data.sources.geometry3k": "data.sources.downloaded",
    "data.sources.gsm8k": "data.sources.downloaded",
    "data.sources.left_of": "data.sources.drawn",
    "data.sources.math": "data.sources.downloaded",
    "data.sources.maze": "data.sources.drawn",
    "data.sources.pictures": "data.sources.drawn",
    "data.sources.preferences": "data.sources.downloaded",
    "data.sources.sums": "data.sources.drawn",
    "data.sources.two_digits": "data.sources.drawn",
    "data.template_limits": "data.chat",
    "data.video": "data.pictures",
    "engine.pictures": "engine.microbatch",
    "model.attention": "model.blocks.attention_modules",
    "model.blocks.transformer_engine": "model.build",
    "model.hf.defaults": "model.families.config_json",
    "model.hf.directory": "model.hf_files",
    "model.hf.families": "model.families.config_json",
    "model.hf.files": "model.hf_files",
    "model.hf_directory": "model.hf_files",
    "model.layers": "model.blocks.layers",
    "model.operations": "model.shape",
    "model.packed": "model.gpt",
    "model.rope": "model.blocks.rope",
    "model.router": "model.blocks.router",
    "model.sizes": "model.shape",
    "model.transformer_engine": "model.build",
    "model.vision_rules": "model.architecture",
    "plan.command": "forecast.command",
    "plan.disk": "forecast.memory.state",
    "plan.dry_run": "forecast.dry_run",
    "plan.refit": "forecast.memory.memory",
    "plan.tower": "forecast.memory.generation",
    "predict.bound": "forecast.time.phases",
    "predict.calibrate_command": "forecast.time.calibrate",
    "predict.candidates": "forecast.time.search",
    "predict.collectives": "forecast.time.cost",
    "predict.decode": "forecast.time.samples",
    "predict.experts": "forecast.time.passes",
    "predict.gantt": "forecast.time.table",
    "predict.layers": "forecast.time.passes",
    "predict.machine": "machine.machine_file",
    "predict.measured": "machine.machine_file",
    "predict.modes": "forecast.time.step",
    "predict.operators": "forecast.time.passes",
    "predict.recorded": "forecast.time.calibrate",
    "predict.slices": "forecast.time.search_command",
    "predict.space": "forecast.time.search",
    "predict.timeline": "forecast.time.step",
    "predict.timeline_files": "forecast.time.table",
    "predict.training": "forecast.time.samples",
    "predict.transfer": "forecast.time.cost",
    "report.attempts": "observe.read.attempts",
    "report.batch_output": "observe.read.logs",
    "report.command": "observe.report.page",
    "report.event_files": "observe.read.attempts",
    "report.page_data": "observe.report.page",
    "report.rank_times": "observe.report.charts",
    "report.recorded_run": "observe.read.recorded_run",
    "rewards.scorers.ground_truth": "rewards.registry",
    "rollout.native.cache_layout": "rollout.engines.cache_layout",
    "rollout.native.decode_graphs": "rollout.engines.native.paged_decode",
    "rollout.native.decode_state": "rollout.engines.native.paged_decode",
    "rollout_source.background_task": "run.rollouts.scoring",
    "rollout_source.durable_rollouts": "run.recovery",
    "run.disk": "run.saver",
    "run.likely_cause": "run.predicted",
    "run.problem_results": "run.inference",
    "run.ref_logps": "run.pairs",
    "run.rollouts.durable_rollouts": "run.recovery",
    "runtime.check": "machine.check",
    "runtime.check_job": "machine.check_job",
    "runtime.event_process": "runtime.events",
    "runtime.fits": "machine.machine_file",
    "runtime.heap": "runtime.world",
    "runtime.json_file": "sandbox.new_files",
    "runtime.listeners": "runtime.sockets",
    "runtime.measure": "machine.measure",
    "runtime.measure_device": "machine.measure_rank",
    "runtime.measure_links": "machine.measure_rank",
    "runtime.rank_connections": "runtime.key_value_store",
    "sandbox.foreign_text": "sandbox.foreign_files",
    "sandbox.process_identity": "sandbox.process_tree",
    "sandbox.temporary_files": "sandbox.fork_server",
    "sandbox.time_budget": "sandbox.process_pool",
    "slurm.chain": "slurm.request",
    "slurm.overview": "slurm.status",
    "telemetry.agreement": "observe.read.agreement",
    "telemetry.curves": "observe.report.curves",
    "telemetry.rank_logs": "observe.read.logs",
    "telemetry.runlog": "observe.read.runlog",
    "telemetry.samples": "observe.read.samples",
    "telemetry.scalars": "observe.report.scalars",
    "telemetry.seeds": "observe.read.runlog",
    "telemetry.summary": "observe.report.summary",
    "telemetry.token_table": "run.replay",
    "telemetry.token_text": "observe.read.token_text",
    "telemetry.untrusted_hdf5": "observe.read.archive",
    "tracing.clocks": "observe.trace.records",
    "tracing.picture": "observe.trace.command",
    "viewer.paired_samples": "observe.report.samples_view",
    "workers.critic": "workers.actor",
    "workers.kto": "workers.preference",
    "workers.online_dpo": "workers.preference",
    "workers.tool_pictures": "workers.prompt_pictures",
    "workers.verdict_cache": "workers.judge",
}
KEPT = ("workers.critic", "rollout.agent.tools", "telemetry.curves", "telemetry.scalars", "telemetry.summary")


def new_name(old: str) -> str | None:
    """The full name of what the old full name of a module names today; None if that has not moved."""
    package, _, inside = old.partition(".")
    folder, _, module = inside.rpartition(".")
    new = MODULES.get(inside) or (f"{FOLDERS[folder]}.{module}" if folder in FOLDERS else None)
    return f"{package}.{new}" if new is not None and package == __package__ else None


class OldNames:
    """The last finder of `sys.meta_path`, and the loader of what it finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ImportError for a module that has moved."""
        package, _, inside = fullname.partition(".")
        if package != __package__:
            return None
        from importlib.machinery import ModuleSpec
        from importlib.util import find_spec

        if inside in FOLDERS:
            return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
        new = new_name(fullname)
        if new is None or find_spec(new) is None:
            return None
        if inside not in KEPT:
            raise ImportError(f"{fullname} is now {new}", name=fullname)
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in the place of an old one. An old folder stays empty: its modules are asked for."""
        from importlib import import_module

        new = new_name(module.__name__)
        if new is not None:
            sys.modules[module.__name__] = import_module(new)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the new module, for `python -m`."""
        from importlib.util import find_spec

        spec = find_spec(new_name(fullname) or fullname)
        return spec.loader.get_code(spec.name) if spec is not None else None  # type: ignore[union-attr]


sys.meta_path.append(OldNames())  # type: ignore[arg-type]
