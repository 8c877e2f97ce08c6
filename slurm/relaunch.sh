# The ranks start again inside the allocation after the loss of a rank or of a node; slurm/common.sh reads this in.
# The allocation needs --no-kill, else Slurm ends the job with the node. All of this runs on the first node, with the batch
# script, except the guard, which runs on the second one: Slurm keeps such a job when the first node is lost, without a
# script.
#   HPCRL_SPARE_NODES     nodes of the allocation without ranks, which replace lost ones       (0)
#   HPCRL_MAX_RELAUNCHES  starts of the ranks again in one slice; 0: each loss requeues the job  (10)
#   HPCRL_NODE_TIMEOUT    seconds without a heartbeat of any of its ranks after which a node is lost  (60)
# shellcheck shell=bash

# a process on a node of the allocation, beside the ranks
hpcrl_one_process=(srun --overlap --no-kill --nodes=1 --ntasks=1 --cpu-bind=none --mpi=none)

# hpcrl_list_nodes: hpcrl_nodes, those that can have ranks, and hpcrl_used, how many of them have
hpcrl_list_nodes() {
    hpcrl_relaunches=0 hpcrl_crash_step=-
    unset HPCRL_RELAUNCH HPCRL_RELAUNCH_REASON # of an earlier command of this script
    if [[ -z ${hpcrl_first+listed} ]]; then # what an earlier command of this script has lost stays lost
        mapfile -t hpcrl_nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null)
        hpcrl_all=${#hpcrl_nodes[@]} hpcrl_first=${hpcrl_nodes[0]:-}
        hpcrl_used=$((hpcrl_all - ${HPCRL_SPARE_NODES:-0}))
        ((hpcrl_all == 0 || hpcrl_used > 0)) ||
            hpcrl_fail "HPCRL_SPARE_NODES=$HPCRL_SPARE_NODES leaves none of $hpcrl_all node(s) for ranks; use fewer"
    fi
    hpcrl_use_nodes "$hpcrl_used"
}

# hpcrl_use_nodes COUNT: hpcrl_step_options, with which srun starts ranks on the first nodes. Empty where they are the whole
# allocation of one node. --overlap: Slurm counts the ranks of a lost node as running until it notices the loss.
hpcrl_use_nodes() {
    local per_node
    hpcrl_step_options=()
    ((hpcrl_all < 2)) || hpcrl_step_options=(--no-kill)
    if ((hpcrl_relaunches > 0 || $1 < hpcrl_all)); then
        per_node=$(hpcrl_ranks_per_node)
        hpcrl_step_options+=(--overlap --nodes="$1" --ntasks=$(($1 * per_node)) --ntasks-per-node="$per_node"
            --nodelist="$(hpcrl_join "${hpcrl_nodes[@]:0:$1}")")
    fi
}

hpcrl_ranks_per_node() {
    local first=${SLURM_TASKS_PER_NODE:-1}
    echo "${SLURM_NTASKS_PER_NODE:-${first%%[(,]*}}"
}

hpcrl_join() { local IFS=,; printf '%s\n' "$*"; }

# hpcrl_beats RUN_DIR: a line for each node, its name and the sum of the numbers of its ranks' heartbeats
hpcrl_beats() {
    sed -n 's/.*"host": "\([^"]*\)".*"beat": \([0-9]*\).*/\1 \2/p' "$1"/heartbeat/rank_* 2>/dev/null |
        awk '{ sum[$1] += $2 } END { for (node in sum) print node, sum[node] }'
}

# hpcrl_step RUN_DIR: the step after the last one that was logged; heartbeats may be some steps behind
hpcrl_step() {
    local logged
    logged=$(tail -n 1 "$1/metrics.jsonl" 2>/dev/null | grep -o '"step": [0-9]*')
    echo $((${logged##* } + 1))
}

# hpcrl_silent_nodes RUN_DIR: wait until nodes have sent no heartbeat for HPCRL_NODE_TIMEOUT while others have, and print
# their names. A file system that does not answer makes all nodes silent, and none lost.
hpcrl_silent_nodes() {
    local timeout=${HPCRL_NODE_TIMEOUT:-60} node beats newest silent=()
    local -A last=() changed=()
    until ((${#silent[@]})); do
        sleep "$((timeout > 20 ? timeout / 10 : 1))"
        newest=0
        while read -r node beats; do
            [[ -z ${last[$node]:-} || ${last[$node]} == "$beats" ]] || changed[$node]=$SECONDS
            last[$node]=$beats
            ((${changed[$node]:-0} <= newest)) || newest=${changed[$node]}
        done < <(hpcrl_beats "$1")
        for node in "${!changed[@]}"; do
            ((newest - changed[$node] <= timeout)) || silent+=("$node")
        done
    done
    printf '%s\n' "${silent[@]}"
}

# hpcrl_watch RUN_DIR FILE: write the silent nodes into FILE, and end srun with the ranks that remain. In the background.
hpcrl_watch() {
    local here
    hpcrl_watch_here "$1" &
    here=$!
    hpcrl_silent_nodes "$1" >"$2.new"
    mv "$2.new" "$2"
    kill "$here"
    hpcrl_end_ranks
}

# hpcrl_watch_here RUN_DIR: end srun if it still waits, for those of a lost node, when the ranks of this node have ended
hpcrl_watch_here() {
    local pid pids=()
    until ((${#pids[@]})); do
        sleep 2
        for pid in $(sed -n 's/.*"host": "'"$hpcrl_first"'", "pid": \([0-9]*\).*/\1/p' "$1"/heartbeat/rank_*); do
            # a container may have process ids of its own: a rank has its log open
            ! ls -l "/proc/$pid/fd" | grep -qF "/${1##*/}/logs/rank_" || pids+=("$pid")
        done
    done
    while kill -0 "${pids[@]}"; do sleep 1; done
    sleep 4
    hpcrl_end_ranks
}

# hpcrl_end_ranks: end the srun of this start, which is one of those that the script has started
hpcrl_end_ranks() {
    local step
    for step in $(pgrep -P $$ -x srun); do
        ! tr '\0' '\n' <"/proc/$step/environ" | grep -qxF "HPCRL_START=$HPCRL_START" || hpcrl_end_step "$step"
    done
}

# hpcrl_end_step PID: end an srun with its processes. It kills them, and then waits for those of a lost node.
hpcrl_end_step() {
    kill -TERM "$1"
    for _ in {1..20}; do
        sleep 0.1
        kill -0 "$1" || return 0
    done
    kill -KILL "$1"
} 2>/dev/null

# hpcrl_start_watch RUN_DIR, hpcrl_stop_watch: around srun. The latter sets hpcrl_silent, the silent nodes.
hpcrl_start_watch() {
    hpcrl_silent=() hpcrl_watcher=
    ((${#hpcrl_nodes[@]} > 1 && ${HPCRL_MAX_RELAUNCHES:-10} > 0)) || return 0
    hpcrl_watch_file=$(mktemp) || return 0
    : >"$hpcrl_watch_file"
    hpcrl_watch "$1" "$hpcrl_watch_file" 2>/dev/null &
    hpcrl_watcher=$!
}

hpcrl_stop_watch() {
    [[ -n $hpcrl_watcher ]] || return 0
    kill -0 "$hpcrl_watcher" 2>/dev/null || [[ -s $hpcrl_watch_file ]] ||
        hpcrl_say "the process that watches heartbeats was killed; a lost node was left to Slurm and the watchdog"
    { pkill -P "$hpcrl_watcher"; kill "$hpcrl_watcher"; wait "$hpcrl_watcher"; } 2>/dev/null
    mapfile -t hpcrl_silent <"$hpcrl_watch_file"
    rm -f "$hpcrl_watch_file" "$hpcrl_watch_file.new"
}

# hpcrl_answers NODE: whether Slurm can start a process there
hpcrl_answers() {
    timeout 30 "${hpcrl_one_process[@]}" --nodelist="$1" true >/dev/null 2>&1
}

# hpcrl_drop_lost_nodes: take silent nodes, and those on which Slurm starts nothing, out of hpcrl_nodes; sets hpcrl_lost.
# Nodes have 5 s, and 5 times what it takes on the first one.
hpcrl_drop_lost_nodes() {
    local node index asked=() pids=() left=() began=$SECONDS give_up=
    hpcrl_lost=("${hpcrl_silent[@]}")
    for node in "${hpcrl_nodes[@]}"; do
        [[ " ${hpcrl_silent[*]} " != *" $node "* ]] || continue
        hpcrl_answers "$node" &
        asked+=("$node") pids+=("$!")
    done
    for index in "${!asked[@]}"; do
        [[ -z $give_up ]] || hpcrl_wait_for "${pids[index]}" "$give_up"
        if [[ -n $give_up ]] && kill -0 "${pids[index]}" 2>/dev/null || ! wait "${pids[index]}"; then
            hpcrl_lost+=("${asked[index]}")
        else
            left+=("${asked[index]}")
        fi
        give_up=${give_up:-$((SECONDS + 5 + 5 * (SECONDS - began)))}
    done
    hpcrl_nodes=("${left[@]}")
}

# hpcrl_wait_for PID TIME: wait for a process, at most until SECONDS is TIME
hpcrl_wait_for() {
    while kill -0 "$1" 2>/dev/null && ((SECONDS < $2)); do sleep 0.1; done
}

# hpcrl_may_relaunch RUN_DIR CODE ARGUMENTS...: whether the ranks start again here, and prepare that. Not after an end
# that the program has planned, an error of its own, a signal to this script, and a crash in the step of the last crash.
hpcrl_may_relaunch() {
    local run=$1 code=$2 most=${HPCRL_MAX_RELAUNCHES:-10} step why
    [[ $code != [02] && $code != 85 && -z ${hpcrl_ends:-} && $run != /dev/null ]] || return
    ((most > 0 && ${#hpcrl_nodes[@]} > 0)) || return
    step=$(hpcrl_step "$run")
    hpcrl_drop_lost_nodes
    if [[ " ${hpcrl_lost[*]} " == *" $hpcrl_first "* ]]; then
        hpcrl_say "Slurm does not reach $hpcrl_first, the node of this script; the ranks are not started again in this slice"
        return 1
    elif ((${#hpcrl_lost[@]})); then
        why="lost $(hpcrl_join "${hpcrl_lost[@]}") in step $step"
    elif [[ -n $hpcrl_killed || $code == 86 ]]; then
        [[ $code == 86 ]] && why="a hang in step $step" || why="a rank was killed in step $step (srun's exit code $code)"
        if [[ $step == "$hpcrl_crash_step" ]]; then
            hpcrl_say "$why, as before the last start; the ranks are not started again in this slice"
            return 1
        fi
        hpcrl_crash_step=$step
    else
        return 1
    fi
    if ((hpcrl_relaunches >= most)); then
        hpcrl_say "$why; $hpcrl_relaunches starts again in this slice are HPCRL_MAX_RELAUNCHES"
        return 1
    fi
    hpcrl_relaunches=$((hpcrl_relaunches + 1))
    hpcrl_find_fit "${@:3}" || { hpcrl_say "$why; no layout of the job fits ${#hpcrl_nodes[@]} node(s)"; return 1; }
    export HPCRL_RELAUNCH=$hpcrl_relaunches HPCRL_RELAUNCH_REASON=$why
    hpcrl_say "$why; start $hpcrl_relaunches of at most $most again, on $hpcrl_used node(s)," \
        "$((${#hpcrl_nodes[@]} - hpcrl_used)) spare"
}

# hpcrl_find_fit ARGUMENTS...: hpcrl_used, the largest number of nodes, not more than before, for which the job's layouts
# are valid: a dry run does not end with 2
hpcrl_find_fit() {
    hpcrl_use_nodes "$hpcrl_used"
    ((hpcrl_used > ${#hpcrl_nodes[@]})) || return 0 # what it ran on is still there
    for ((hpcrl_used = ${#hpcrl_nodes[@]}; hpcrl_used > 0; hpcrl_used--)); do
        hpcrl_use_nodes "$hpcrl_used"
        HPCRL_DRY_RUN=1 hpcrl_srun_once "$@" >/dev/null 2>&1
        [[ $? == 2 ]] || return 0
    done
    return 1
}

# hpcrl_start_guard RUN_DIR: a process on the second node that requeues the job if the first one is lost
hpcrl_start_guard() {
    hpcrl_guard=
    ((${#hpcrl_nodes[@]} > 1 && ${HPCRL_MAX_RELAUNCHES:-10} > 0)) || return 0
    ((${SLURM_RESTART_COUNT:-0} < ${HPCRL_MAX_RESTARTS:-100})) || return 0
    "${hpcrl_one_process[@]}" --nodelist="${hpcrl_nodes[1]}" bash -c "$(declare -p hpcrl_one_process)
$(declare -f hpcrl_guard_node hpcrl_beats hpcrl_answers); hpcrl_guard_node \"\$@\"" \
        bash "$1" "$hpcrl_first" "$(hpcrl_job)" >/dev/null 2>&1 </dev/null &
    hpcrl_guard=$!
}

hpcrl_stop_guard() {
    [[ -z $hpcrl_guard ]] || hpcrl_end_step "$hpcrl_guard" & # its node may be lost
}

# hpcrl_guard_node RUN_DIR NODE JOB: requeue the job when the node is silent and Slurm can start nothing there
hpcrl_guard_node() {
    local beats=- last='' since=$SECONDS timeout=${HPCRL_NODE_TIMEOUT:-60}
    while sleep "$((timeout > 20 ? timeout / 10 : 2))"; do
        beats=$(hpcrl_beats "$1" | grep "^$2 ")
        if [[ $beats != "$last" ]]; then
            last=$beats since=$SECONDS
        elif ((SECONDS - since > timeout)); then
            hpcrl_answers "$2" || hpcrl_answers "$2" || scontrol requeue "$3"
            since=$SECONDS
        fi
    done
}
