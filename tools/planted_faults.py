"""Plant one fault per claim of docs/testing.md, and see a test of CI fail for each.

    tools/planted_faults.py                    # all; hours
    tools/planted_faults.py --list
    tools/planted_faults.py gae loops --check  # these, and that their tests pass without the fault

Faults are planted in a copy of the checkout, one at a time. Exit code 1 if a test passes in spite of its fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hpcrl.sandbox import process_tree

ROOT = Path(__file__).parents[1]
LONGEST = 3600  # seconds of one test; those of tests/mpi end themselves before that
FAILED = re.compile(r"^=+ .*\b\d+ failed\b", re.M)
ENDED = ("the other ranks did not come", "ranks are at different places")  # tests/mpi/conftest.py ends the job so
SLURM = -1  # in place of a number of ranks: plain pytest that has to find a Slurm


@dataclass(frozen=True)
class Fault:
    """`old` is once in `file`, below hpcrl/. tests: arguments of pytest. ranks: 0 is without MPI."""

    name: str
    claim: str
    file: str
    old: str
    new: str
    ranks: int
    tests: str


FAULTS = [
    # Layouts agree.
    Fault(
        "layouts-log-probs",
        "layouts against one rank: log-probs and values",
        "kernels/vocabulary.py",
        "            dist.all_reduce(sums, group=self.group)",
        "            pass",
        4,
        "tests/mpi/test_training.py::test_layouts_agree_on_recorded_rollouts",
    ),
    Fault(
        "layouts-gradients",
        "layouts against one rank: gradient norms",
        "workers/model_worker.py",
        "num_tokens, num_sequences = self.sum_over_replicas(counts).tolist()",
        "num_tokens, num_sequences = counts.tolist()",
        4,
        "tests/mpi/test_training.py::test_layouts_agree_on_recorded_rollouts",
    ),
    Fault(
        "layouts-responses",
        "layouts against one rank: equal responses",
        "rollout/engines/native/scheduler.py",
        "self.sample_indices[row] = sequence.sample_index",
        "self.sample_indices[row] = row",
        4,
        "tests/mpi/test_training.py::test_layouts_sample_the_same_tokens",
    ),
    # Resume.
    Fault(
        "resume-optimizer",
        "run(2N) is run(N), resume, run(N), bit for bit",
        "engine/engine.py",
        'self.optimizer.load_state_dict(state["optimizer"])',
        "self.optimizer.reload_model_params()",
        2,
        "tests/mpi/test_training.py::test_resumed_equals_uninterrupted_bitwise",
    ),
    Fault(
        "resume-order",
        "on another layout the data order is equal",
        "data/sampler.py",
        'self.position = int(state["position"])',
        'self.position = int(state["position"]) + 1',
        4,
        "tests/mpi/test_training.py::test_resume_on_another_layout",
    ),
    # Rollout and training agree.
    Fault(
        "gap-ten-steps",
        "rollout and training log-probs over ten steps",
        "rollout/engines/native/decoder.py",
        "        eps = self._shape.rms_norm_eps\n        attention, mlp",
        "        eps = 1e-3\n        attention, mlp",
        2,
        "tests/mpi/test_training.py::test_rollout_and_training_log_probs_agree_over_ten_steps",
    ),
    Fault(
        "gap-refit",
        "rollout and training log-probs over ten steps: weights that a later refit does not send",
        "engine/refit/refit.py",
        "        for transport in self._transports:\n            transport.start(loop",
        "        for transport in self._transports * (self._num_runs < 3):\n            transport.start(loop",
        2,
        "tests/mpi/test_training.py::test_rollout_and_training_log_probs_agree_over_ten_steps",
    ),
    Fault(
        "gap-layouts",
        "rollout and training log-probs for every pair of layouts",
        "kernels/vocabulary.py",
        "            dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)\n        x = self._scaled(x",
        "            pass\n        x = self._scaled(x",
        4,
        "tests/mpi/test_log_prob_gap.py::test_every_pair_of_layouts_stays_below_the_bound",
    ),
    Fault(
        "gap-exact",
        "rollout and training log-probs are equal in exact mode",
        "rollout/engines/native/generate_call.py",
        "exact = ExactAttention if",
        "exact = PrefillAttention if",
        2,
        "tests/mpi/test_exact.py::test_rollout_and_training_log_probs_are_equal",
    ),
    # Plans and refits.
    Fault(
        "plan-local",
        "a plan moves nothing that is there",
        "engine/refit/routes.py",
        "targets += [Target(group, rank) for rank in here if rank not in self.place]",
        "targets += [Target(group, rank) for rank in here]",
        0,
        "tests/engine/refit/test_planner.py::test_bytes_received_are_the_lower_bound_and_nothing_local_is_sent",
    ),
    Fault(
        "plan-once",
        "a plan moves all else once",
        "engine/refit/routes.py",
        "if start + rectangle.start >= high:",
        "if start + rectangle.start > high:",
        0,
        "tests/engine/refit/test_planner.py::test_moves_give_every_destination_element_its_value_once",
    ),
    Fault(
        "plan-balance",
        "senders are balanced as an exact flow would",
        "engine/refit/routes.py",
        "SWEEPS = 200",
        "SWEEPS = 1",
        0,
        "tests/engine/refit/test_balance.py::test_the_largest_load_is_the_least_possible",
    ),
    Fault(
        "refit-memory",
        "100 refits leave memory flat",
        "engine/refit/refit.py",
        "        loop = RequestLoop()\n",
        "        loop = RequestLoop()\n        old = vars(self).setdefault('_old', [])\n"
        "        old.append([tensor.clone() for tensor in source.values()])\n",
        4,
        "tests/mpi/test_refit.py::test_a_hundred_refits_leave_memory_flat[windows]",
    ),
    Fault(
        "refit-checksum",
        "a corrupted byte is found: every bit counts",
        "kernels/checksum.py",
        "return (x ^ _shifted(x, 31)) | 1",
        "return x ^ _shifted(x, 31)",
        0,
        "tests/kernels/test_checksum.py",
    ),
    Fault(
        "refit-corrupted",
        "a corrupted byte is found and named",
        "engine/refit/refit.py",
        "self._num_runs <= NUM_VERIFIED",
        "self._num_runs < NUM_VERIFIED",
        4,
        "tests/mpi/test_refit.py::test_one_corrupted_byte_is_caught_and_named",
    ),
    # The engine.
    Fault(
        "engine-memory",
        "the engine's memory does not grow with the response limit",
        "rollout/engines/native/scheduler.py",
        "self._part_ids = np.zeros((capacity, FLUSH_TOKENS), np.int32)",
        "self._part_ids = np.zeros((capacity, max(FLUSH_TOKENS, sampling.max_new_tokens)), np.int32)",
        0,
        "tests/rollout/test_native_memory.py::test_memory_does_not_grow_with_a_limit_that_no_response_reaches",
    ),
    Fault(
        "engine-batching",
        "batching does not change what is drawn",
        "rollout/engines/native/scheduler.py",
        "self.sample_indices[row] = sequence.sample_index",
        "self.sample_indices[row] = row",
        0,
        "tests/rollout/test_native_engine.py::test_the_batching_does_not_change_what_is_drawn",
    ),
    Fault(
        "engine-preemption",
        "preemption does not change what is drawn",
        "rollout/engines/native/scheduler.py",
        "self.num_drawn[row] = sequence.num_drawn",
        "self.num_drawn[row] = 0",
        0,
        "tests/rollout/test_native_scheduling.py::test_sequences_that_do_not_fit_start_again_with_the_same_result",
    ),
    Fault(
        "engine-shared-prompts",
        "shared prompts do not change what is drawn",
        "rollout/engines/native/generate_call.py",
        "copy_row(source, row, sequence.num_to_cache)",
        "copy_row(source, row, sequence.num_to_cache - 1)",
        0,
        "tests/rollout/test_native_scheduling.py::test_a_prompt_is_prefilled_once_for_its_group",
    ),
    Fault(
        "engine-aborts",
        "aborts and resumption do not change what is drawn",
        "rollout/engines/native/scheduler.py",
        "self.first_positions[row] = sequence.first_position",
        "self.first_positions[row] = 0",
        0,
        "tests/rollout/test_native_scheduling.py::test_an_aborted_generation_goes_on_as_if_nothing_had_happened",
    ),
    # Asynchronous training.
    Fault(
        "stale-samples",
        "no sample that is staler than the bound is trained",
        "run/rollouts/streaming.py",
        "later = max(0, version + 1 + threshold - step) * size",
        "later = max(0, version + 2 + threshold - step) * size",
        0,
        "tests/run/rollouts/test_streaming.py::test_no_sample_is_older_than_the_bound_and_none_is_lost",
    ),
    Fault(
        "trained-twice",
        "no prompt is trained twice",
        "run/rollouts/streaming.py",
        "self.pool.surplus = ready[~taken] if not taken.all() else None",
        "self.pool.surplus = ready if not taken.all() else None",
        0,
        "tests/run/rollouts/test_streaming.py::test_no_sample_is_older_than_the_bound_and_none_is_lost",
    ),
    Fault(
        "lost-over-resume",
        "no prompt is lost over a resume",
        "run/rollouts/streaming.py",
        "under_way = [self.prompts[number] for number in sorted(self.prompts)]",
        "under_way = [self.prompts[number] for number in sorted(self.prompts)[1:]]",
        4,
        "tests/mpi/test_async.py::test_no_prompt_is_lost_or_trained_twice[False]",
    ),
    Fault(
        "lost-over-kill",
        "no prompt is lost or trained twice over a kill",
        "run/recovery.py",
        "return checkpoint < step <= checkpoint + 1 + self.num_ahead",
        "return checkpoint + 1 < step <= checkpoint + 1 + self.num_ahead",
        0,
        "tests/run/rollouts/test_durable_rollouts.py::test_a_killed_step_reuses_what_was_drawn_or_repeats_itself_bit_for_bit",
    ),
    # Algorithms.
    Fault(
        "gae",
        "estimators give verl's numbers",
        "algorithms/token_advantages.py",
        "valid, gamma * lam)",
        "valid, lam)",
        0,
        "tests/algorithms/test_advantages_verl.py",
    ),
    Fault(
        "gae-by-hand",
        "each estimator has a hand-computed case",
        "algorithms/token_advantages.py",
        "rewards + gamma * next_values - values",
        "rewards + next_values - values",
        0,
        "tests/algorithms/test_advantages_by_hand.py::test_gae",
    ),
    Fault(
        "losses",
        "losses give verl's numbers",
        "algorithms/surrogate_losses.py",
        "return torch.maximum(unclipped, clipped), clipped > unclipped",
        "return torch.minimum(unclipped, clipped), clipped > unclipped",
        0,
        "tests/algorithms/test_policy_losses_verl.py",
    ),
    Fault(
        "losses-by-hand",
        "each loss has a hand-computed case",
        "algorithms/surrogate_losses.py",
        "ratio.clamp(1 - params.clip_ratio_low, 1 + params.clip_ratio_high)",
        "ratio.clamp(1 - params.clip_ratio_low, 1 + params.clip_ratio_low)",
        0,
        "tests/algorithms/test_policy_losses_by_hand.py",
    ),
    Fault(
        "losses-gradients",
        "gradients equal those of the plain formula in fp64",
        "algorithms/surrogate_losses.py",
        "log_prob - log_prob.detach() + of_sequence.detach()",
        "of_sequence.detach()",
        0,
        "tests/algorithms/test_policy_losses_gradients.py",
    ),
    Fault(
        "kl",
        "KL gives verl's numbers",
        "algorithms/kl.py",
        "(back.exp() - back - 1)",
        "(back.exp() + back - 1)",
        0,
        "tests/algorithms/test_kl_verl.py",
    ),
    Fault(
        "rollout-correction",
        "rollout correction gives verl's numbers",
        "algorithms/off_policy.py",
        "weights = raw.clamp(max=bounds.upper)",
        "weights = raw",
        0,
        "tests/algorithms/test_rollout_correction.py::test_as_verl",
    ),
    Fault(
        "scorers",
        "scorers give verl's numbers",
        "rewards/scorers/short_answers.py",
        'numbers[-1].replace(",", "")',
        "numbers[-1]",
        0,
        "tests/rewards/test_scorers_verl.py",
    ),
    Fault(
        "validation-statistics",
        "validation statistics give verl's numbers",
        "run/validation.py",
        "self.values.std(axis=2)",
        "self.values.std(axis=2, ddof=1)",
        0,
        "tests/run/test_validation_metrics.py::test_numbers_and_names_are_verls",
    ),
    # Splits.
    Fault(
        "splits-fp64",
        "a split step has the same loss and gradients, in fp64",
        "algorithms/aggregation.py",
        "/ max(norm.batch_num_tokens, 1)",
        "/ response_mask.sum().clamp(min=1)",
        0,
        "tests/algorithms/test_policy_losses_split.py",
    ),
    Fault(
        "splits-engine",
        "a split step has the same loss and gradients, through the engine",
        "algorithms/aggregation.py",
        "/ max(norm.batch_num_tokens, 1)",
        "/ response_mask.sum().clamp(min=1)",
        4,
        "tests/mpi/test_loss_splits.py::test_any_split_is_the_whole -k 'vanilla and token-mean'",
    ),
    # Replay.
    Fault(
        "replay",
        "replay: a changed advantage is found",
        "observe/read/agreement.py",
        "        elif worst.size > self.rtol:",
        "        elif worst.size > 1e9:",
        2,
        "tests/mpi/test_replay.py::test_a_changed_advantage_of_the_record_is_found",
    ),
    # Templates and dynamic sampling.
    Fault(
        "templates",
        "every template in configs/ runs",
        "config/loader.py",
        "merge(merged[key], child) if key in merged else child",
        "child",
        2,
        "tests/mpi/test_templates.py::test_a_template_runs_two_steps[rm_countdown_cpu]",
    ),
    Fault(
        "surplus",
        "a resumed run with dynamic sampling is the uninterrupted one, surplus included",
        "run/rollouts/source.py",
        'if state["surplus"]:',
        'if not state["surplus"]:',
        2,
        "tests/mpi/test_algorithms.py::test_dynamic_sampling_fills_every_step_and_resumes_with_its_surplus",
    ),
    # Scorers that misbehave.
    Fault(
        "scorer-loops",
        "a scorer that loops costs one sample and is counted",
        "sandbox/process_pool.py",
        'self._end(worker, "timeouts", self._why_late',
        'self._end(worker, "crashes", self._why_late',
        0,
        "tests/rewards/test_hostile_scorers.py",
    ),
    Fault(
        "scorer-forks",
        "a scorer that forks leaves nothing",
        "sandbox/worker.py",
        "    for orphan in process_tree.children_of(parent):",
        "    for orphan in ():",
        0,
        "tests/rewards/test_hostile_scorers.py",
    ),
    Fault(
        "scorer-memory",
        "a scorer that takes 10 GB costs one sample",
        "rewards/score_worker.py",
        "(memory_limit_mb << 20, memory_limit_mb << 20)",
        "(memory_limit_mb << 30, memory_limit_mb << 30)",
        0,
        "tests/rewards/test_hostile_scorers.py",
    ),
    Fault(
        "scorer-raises",
        "a scorer that raises costs one sample",
        "rewards/score_worker.py",
        "    except BaseException as error:\n        return Outcome(",
        "    except ValueError as error:\n        return Outcome(",
        0,
        "tests/rewards/test_hostile_scorers.py",
    ),
    Fault(
        "scorer-prints",
        "what a scorer prints is bounded",
        "sandbox/worker.py",
        "elif log is not None and num_logged < LOG_BYTES:",
        "elif log is not None:",
        0,
        "tests/rewards/test_hostile_scorers.py::test_what_scorers_print_is_kept_up_to_a_size",
    ),
    Fault(
        "scorer-nan",
        "a scorer that returns NaN costs one sample",
        "rewards/score_worker.py",
        "if not abs(float(score)) <= MAX_SCORE:",
        "if abs(float(score)) > MAX_SCORE:",
        0,
        "tests/rewards/test_hostile_scorers.py",
    ),
    # The sandbox.
    Fault(
        "sandbox-calls",
        "programs reach no key, and no memory that no process shows",
        "sandbox/seccomp.py",
        "instructions += [(EQUAL, 0, 1, which), (RETURN, 0, 0, ERROR | error)]",
        "pass",
        0,
        "tests/sandbox/test_seccomp.py::test_no_key_and_no_call_of_the_filter_is_reached",
    ),
    Fault(
        "sandbox-memory",
        "what sockets hold counts as memory",
        "sandbox/process_tree.py",
        "12 * buffer if",
        "0 if",
        0,
        "tests/sandbox/test_seccomp.py::test_no_memory_is_held_beyond_the_limit",
    ),
    Fault(
        "sandbox-files",
        "of a project that is a virtual environment programs see only Python",
        "sandbox/isolation.py",
        'f"{sys.prefix}/pyvenv.cfg"',
        "sys.prefix",
        0,
        "tests/sandbox/test_isolation.py",
    ),
    Fault(
        "task-links",
        "a link in the way of a mount leads nowhere else",
        "sandbox/mounts.py",
        "os.O_PATH | os.O_NOFOLLOW | flags",
        "os.O_PATH | flags",
        0,
        "tests/sandbox/test_task_sandbox.py::test_links_of_a_command_in_the_place_of_mounts_end_the_sandbox",
    ),
    Fault(
        "task-kills",
        "after kill -9 of a process of a task's sandbox none is left",
        "sandbox/task_command.py",
        'libc_call("prctl", process_tree.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)',
        "pass",
        0,
        "tests/sandbox/test_task_sandbox.py::test_nothing_is_left_after_the_kill_of_a_process",
    ),
    Fault(
        "task-snapshots",
        "snapshots have the files that they had",
        "sandbox/task_files.py",
        "self._below = self._marks[mark]",
        "pass",
        0,
        "tests/sandbox/test_task_sandbox.py::test_snapshots_branch",
    ),
    Fault(
        "task-archives",
        "an entry of an archive is not written through a link",
        "sandbox/mounts.py",
        "os.O_PATH | os.O_NOFOLLOW | flags",
        "os.O_PATH | flags",
        0,
        "tests/sandbox/test_task_archive.py::test_other_entries_are_an_error_in_one_line",
    ),
    # What rank 0 moves.
    Fault(
        "rank-0-control",
        "rank 0's control messages do not grow with responses",
        "controller/executor.py",
        "output.samples, output.meta_info)",
        "output.samples, output.meta_info | {'rows': output.tokens})",
        4,
        "tests/mpi/test_controller.py::test_rank_0_moves_no_tokens",
    ),
    Fault(
        "rank-0-all",
        "what rank 0 sends and receives does not grow with responses",
        "controller/executor.py",
        "output.samples, output.meta_info)",
        "output.samples, output.meta_info | {'rows': output.tokens})",
        2,
        "tests/mpi/test_training.py::test_rank_0_traffic_does_not_grow_with_the_response",
    ),
    # Ends.
    Fault(
        "kill-9",
        "kill -9 of a rank ends the job and leaves no process of a reward function",
        "sandbox/worker.py",
        "if rank in ready or (",
        "if (",
        0,
        "tests/run/test_ends.py::test_kill_9_in_the_middle_of_training_leaves_no_process",
    ),
    Fault(
        "slurm-stops",
        "a run stopped in each phase and resumed has the metrics of an unbroken one",
        "jobs/train.py",
        'self.job.kl_controller.load_state_dict(state["kl_ctrl"])',
        "pass",
        SLURM,
        "tests/slurm/test_slices.py::test_a_run_stopped_in_each_phase_equals_an_unbroken_one",
    ),
    Fault(
        "slurm-kills",
        "a run of which a rank is killed in each phase has the metrics of an unbroken one",
        "jobs/train.py",
        'self.job.kl_controller.load_state_dict(state["kl_ctrl"])',
        "pass",
        SLURM,
        "tests/slurm/test_kills.py::test_a_kill_costs_what_came_after_the_last_checkpoint",
    ),
    Fault(
        "stopped-rank",
        "a rank that is stopped is named with its phase and node, and the job ends",
        "runtime/watchdog.py",
        "stale = [peer for peer in everyone if peer.is_stale or peer.heartbeat is None]",
        "stale = [peer for peer in everyone if peer.heartbeat is None]",
        0,
        "tests/runtime/test_watchdog.py::test_a_stopped_rank_is_blamed_before_those_who_wait_for_it",
    ),
    Fault(
        "looping-rank",
        "a rank that loops is named with its phase, and the job ends",
        "runtime/watchdog.py",
        "working = [peer for peer in first if not _waits(peer)]",
        "working = [peer for peer in first if _waits(peer)]",
        0,
        "tests/run/test_hangs.py -k 'generate and spin'",
    ),
    # Watching runs.
    Fault(
        "events-killed",
        "a run whose rank 0 is killed runs the command of job.on_event",
        "runtime/events.py",
        'self._end(outcome.get("code"), outcome or {"error": "rank 0 was killed"})',
        "self._give_up = time.monotonic()",
        0,
        "tests/run/test_events.py::test_a_run_that_is_killed",
    ),
    Fault(
        "terminal-text",
        "text of models reaches a terminal without what a terminal acts on",
        "sandbox/foreign_files.py",
        "text = _SUSPECT.sub(_shown, text)",
        "text = str(text)",
        0,
        "tests/observe/test_samples_command.py::test_model_text_never_reaches_a_terminal_raw",
    ),
    # Checkpoints.
    Fault(
        "damage-flipped",
        "a flipped file of a checkpoint is found by name",
        "engine/checkpoint/manifest.py",
        "return None if found == expected else",
        "return None if found[:0] == expected[:0] else",
        0,
        "tests/engine/checkpoint/test_manifest.py",
    ),
    Fault(
        "damage-removed",
        "a removed file of a checkpoint is found by name",
        "engine/checkpoint/manifest.py",
        '        if not path.is_file():\n            return f"{name} is missing"\n',
        "        if not path.exists():\n            return None\n",
        0,
        "tests/engine/checkpoint/test_manifest.py",
    ),
    Fault(
        "damage-fallback",
        "the checkpoint before the damaged one is used",
        "engine/checkpoint/store.py",
        "sorted(found, reverse=True)",
        "sorted(found)",
        0,
        "tests/engine/checkpoint/test_store.py",
    ),
    Fault(
        "short-write",
        "a short write during a save is noticed",
        "engine/checkpoint/manifest.py",
        "rest = rest[written:]",
        "rest = rest[len(rest) :]",
        0,
        "tests/engine/checkpoint/test_hashed_file.py",
    ),
    Fault(
        "quota",
        "a quota during a save is noticed",
        "engine/checkpoint/manifest.py",
        "            self._error = error\n        return len(view)",
        "            pass\n        return len(view)",
        0,
        "tests/engine/checkpoint/test_hashed_file.py",
    ),
    Fault(
        "full-disk",
        "a full disk during a save costs that checkpoint alone",
        "engine/checkpoint/sharded_save.py",
        'problem = f"rank {self._groups.rank} on {socket.gethostname()}: {error_line(error)}"',
        "problem = None",
        0,
        "tests/run/test_saver.py::test_a_full_disk_costs_checkpoints_and_not_the_run",
    ),
    Fault(
        "old-log-probs-warm-up",
        "a step without an update of the actor has a pass for old log-probs",
        "jobs/train.py",
        'self.derived.old_log_prob_in_update and is_one_update and self.trains_actor(batch.meta_info["step"])',
        "self.derived.old_log_prob_in_update and is_one_update",
        2,
        "tests/mpi/test_old_log_probs.py::test_metrics_and_archive_are_those_of_a_pass_of_their_own",
    ),
    # A device that is not the CPU.
    Fault(
        "device-loss",
        "a loss gets its columns on the device of the outputs",
        "engine/engine.py",
        "TensorBatch(batch[micro.rows], platform.device())",
        "TensorBatch(batch[micro.rows], torch.device('cpu'))",
        2,
        "tests/mpi/test_device.py::test_ppo_with_a_critic_a_reference_and_offload",
    ),
    Fault(
        "device-wait",
        "the host does not wait for a micro-batch's transfer",
        "batch/ragged.py",
        "non_blocking=True",
        "non_blocking=False",
        2,
        "tests/mpi/test_device_counts.py::test_transfers_and_waits_do_not_depend_on_samples_and_layers",
    ),
    Fault(
        "overlap-gather",
        "an update ends with the whole weights on every replica",
        "engine/data_parallel.py",
        "if not bucket_group.param_gather_dispatched:",
        "if False:",
        2,
        "tests/mpi/test_overlap.py::test_overlap_changes_no_bit",
    ),
    Fault(
        "fp32-gradients",
        "the gradient of a bf16 head is added to the fp32 sum without rounding",
        "model/build.py",
        "mark(model.output_weight(), sums_in_fp32=True)",
        "mark(model.output_weight(), sums_in_fp32=False)",
        2,
        "tests/mpi/test_fp32_gradients.py",
    ),
    Fault(
        "device-decode",
        "a decode step's token ids are on the device of the cache",
        "rollout/engines/native/generate_call.py",
        "torch.from_numpy(batch.last_tokens[rows]).to(self.cache.device)",
        "torch.from_numpy(batch.last_tokens[rows])",
        2,
        "tests/mpi/test_device.py::test_grpo_of_adapters_in_a_mixture_resumes",
    ),
    Fault(
        "device-refit",
        "the engine's own weights, which a refit fills, are on the device",
        "rollout/engines/native/decoder.py",
        "torch.zeros(size, dtype=dtype, device=device)",
        "torch.zeros(size, dtype=dtype)",
        2,
        "tests/mpi/test_device.py::test_ppo_with_a_critic_a_reference_and_offload",
    ),
    Fault(
        "save-process",
        "a save starts no process",
        "engine/checkpoint/sharded_save.py",
        "        self._path.mkdir(parents=True, exist_ok=True)\n",
        '        __import__("subprocess").run(["mkdir", "-p", self._path], check=True)\n',
        2,
        "tests/mpi/test_saving.py::test_no_process_is_started_by_a_save_and_all_ranks_write_as_much",
    ),
    # Trackers.
    Fault(
        "trackers-repeated",
        "each step once, also after a kill",
        "observe/record/tracker_mlflow.py",
        "return last if same else None",
        "return last",
        0,
        "tests/observe/test_trackers.py::test_the_slices_of_a_run_are_one_run_with_the_values_of_metrics_jsonl",
    ),
    Fault(
        "trackers-disk",
        "one that has no disk costs one warning",
        "observe/record/tracker_wandb.py",
        "if count != self._num_rows:",
        "if False:",
        0,
        "tests/observe/test_trackers.py::test_a_full_disk_costs_a_warning_for_each_tracker",
    ),
    Fault(
        "trackers-hang",
        "one that hangs costs one warning",
        "observe/record/trackers.py",
        "process.join(max(0.0, deadline - time.monotonic()))",
        "process.join()",
        0,
        "tests/observe/test_trackers.py::test_a_tracker_that_fails_costs_one_warning_and_no_time",
    ),
    # Pages.
    Fault(
        "pages-config",
        "the config reference is the schema",
        "config/schema.py",
        'key("runs", "folder that holds runs")',
        'key("runs", "folder of runs")',
        0,
        "tests/docs/test_pages.py::test_the_config_reference_is_the_schema",
    ),
    Fault(
        "pages-metrics",
        "metrics of runs are documented",
        "algorithms/statistics.py",
        '"response/aborted_ratio"',
        '"response/empty_ratio"',
        0,
        "tests/docs/test_commands.py::test_commands",
    ),
]


def main() -> None:
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; all, if there are none")
    parser.add_argument("--list", action="store_true", help="print names and claims")
    parser.add_argument("--check", action="store_true", help="run each test without its fault first; it has to pass")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no fault is called {', '.join(sorted(unknown))}; see --list")
    chosen = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    for fault in chosen:
        check_place(fault)
    if options.list:
        for fault in chosen:
            print(f"{fault.name:24} {fault.claim}")
        return
    process_tree.adopt_orphans()  # a fault may leave processes behind
    with tempfile.TemporaryDirectory(prefix="planted_", ignore_cleanup_errors=True) as folder:
        copy = copied(Path(folder) / "hpcrl")
        missed = [fault.name for fault in chosen if not tried(fault, copy, options.check)]
    if missed:
        print(f"{len(missed)} of {len(chosen)} not caught: {' '.join(missed)}")
    sys.exit(bool(missed))


def check_place(fault: Fault) -> None:
    place = ROOT / "hpcrl" / fault.file
    times = place.read_text(encoding="utf-8").count(fault.old) if fault.old and place.is_file() else 0
    if times != 1:
        sys.exit(f"planted_faults.py: {fault.name}: its text is {times} times in hpcrl/{fault.file}; expected once")
    for argument in shlex.split(fault.tests):
        file = argument.partition("::")[0]
        if file.startswith("tests/") and not (ROOT / file).exists():
            sys.exit(f"planted_faults.py: {fault.name}: there is no {file}")


def copied(copy: Path) -> Path:
    """The files that git knows, as they are in the checkout, with their times: what is planted is newer, so that no
    compiled file of an earlier fault is taken for it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    if not (copy / "hpcrl" / "kernels").exists():
        (copy / "hpcrl" / "kernels").symlink_to("../kernels")
    code = [sys.executable, "-c", "import hpcrl; print(hpcrl.__file__)"]
    imported = subprocess.run(code, cwd=copy, env=environment(copy), check=True, capture_output=True, text=True).stdout
    if Path(imported.strip()) != copy / "hpcrl" / "__init__.py":
        sys.exit(f"planted_faults.py: the copy imports {imported.strip()}; expected its own hpcrl")
    return copy


def environment(copy: Path) -> dict[str, str]:
    """As tools/test.sh has it."""
    ours = {"PYTHONPATH": str(copy), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | ours | {"HPCRL_REQUIRE_SLURM": "1"}


def tried(fault: Fault, copy: Path, check: bool) -> bool:
    """Whether the fault is caught; prints its line."""
    start = time.monotonic()
    place = copy / "hpcrl" / fault.file
    verdict = "caught"
    if check and (code := run(fault, copy)[0]) != 0:
        verdict = f"NOT CAUGHT: its test has exit code {code} without the fault"
    else:
        place.write_text(place.read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")
        code, output = run(fault, copy)
        shutil.copy2(ROOT / "hpcrl" / fault.file, place)
        if not is_failure(fault, code, output):
            verdict = f"NOT CAUGHT: exit code {code}, {output.strip().splitlines()[-1] if output.strip() else 'silent'}"
    print(f"{fault.name:24} {verdict}  {time.monotonic() - start:.0f} s", flush=True)
    return verdict == "caught"


def run(fault: Fault, copy: Path) -> tuple[int, str]:
    """Exit code and output of the fault's tests in the copy."""
    command = [sys.executable, "-m", "pytest", *shlex.split(fault.tests), "-m", "not exhaustive"]
    if fault.ranks > 0:
        # Its conftest keeps time itself: it ends the job, not one rank.
        launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(fault.ranks)]
        command = [*launcher, *command, "--timeout", "0"]
    with tempfile.TemporaryFile("w+", errors="replace") as file:  # a pipe would be held by what is left behind
        job = subprocess.Popen(
            command, cwd=copy, env=environment(copy), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code = job.wait(LONGEST)
        except subprocess.TimeoutExpired:
            code = 124
        process_tree.kill_descendants()
        file.seek(0)
        return code, file.read()


def is_failure(fault: Fault, code: int, output: str) -> bool:
    """Of a test, not of what collects or prepares it."""
    return code == 1 and bool(FAILED.search(output) or (fault.ranks > 0 and any(line in output for line in ENDED)))


if __name__ == "__main__":
    main()
