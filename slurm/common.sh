# What the job templates of this folder share. A template reads it in and calls hpcrl_start, hpcrl_srun and hpcrl_leave:
# it stands here once how Python starts, which PMI and which network interface are taken, and what an exit code means.
# It also runs scripts that `hpcrl submit` makes. Variables that a site or a person may set (all have defaults):
#   HPCRL_MODULES       modules to load, separated by spaces
#   HPCRL_VENV          virtual environment                                   (.venv)
#   HPCRL_IMAGE         container image: a file, or what Pyxis or Apptainer takes; of edf the environment definition file
#   HPCRL_CONTAINER     apptainer, singularity, pyxis, edf (of CSCS) or none  (what is there, when HPCRL_IMAGE is set)
#   HPCRL_MOUNTS        further folders for the container, comma-separated; the working directory always is there
#   HPCRL_MPI           for srun --mpi=                                       (by the MPI library that Python loads)
#   HPCRL_INTERFACE     network interface of NCCL, gloo and UCX               (ib*, hsn*, bond*, else the default route's)
#   HPCRL_CPU_BIND      for srun --cpu-bind=                                  (cores)
#   HPCRL_MAX_RESTARTS  requeues of one job at most                           (100)
#   HPCRL_START_TRIES   starts of the ranks at most, where MPI fails to start  (3)
#   HPCRL_DRY_RUN=1     the ranks only show where they would be in each role
# shellcheck shell=bash

source "$(dirname "${BASH_SOURCE[0]}")/relaunch.sh"
hpcrl_names=() # of variables that ranks need, on all nodes and in containers

hpcrl_say() { printf 'hpcrl: %s\n' "$*" >&2; }

hpcrl_fail() { # what an input error is in the program: one line, exit code 2
    printf 'hpcrl: error: %s\n' "$*" >&2
    exit 2
}

# hpcrl_start: everything before the first srun
hpcrl_start() {
    local ranks=${SLURM_NTASKS:-1}
    hpcrl_trap
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # compute nodes have no internet; a hub's time-outs cost minutes
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun takes it only from here
    unset SLURM_EXPORT_ENV # of `sbatch --export=NONE`: srun would keep what is exported here from the ranks
    command -v scontrol >/dev/null ||
        hpcrl_say "no scontrol on this node: a slice that has saved cannot be requeued, and is to be submitted again"
    hpcrl_choose_python
    hpcrl_choose_mpi
    hpcrl_choose_network
    hpcrl_pass_variables
    hpcrl_find_end
    ((${HPCRL_SPARE_NODES:-0} == 0)) ||
        ranks=$(((${SLURM_JOB_NUM_NODES:-1} - HPCRL_SPARE_NODES) * $(hpcrl_ranks_per_node)))
    hpcrl_say "job ${SLURM_JOB_ID:-none}, restart ${SLURM_RESTART_COUNT:-0}: $ranks ranks on" \
        "${SLURM_JOB_NUM_NODES:-1} node(s) ${SLURM_JOB_NODELIST:-}, mpi ${hpcrl_mpi:-default}," \
        "interface ${NCCL_SOCKET_IFNAME:-default}, end ${HPCRL_END_TIME:-open}"
}

# hpcrl_trap: Slurm ends a slice with TERM, a person one in an allocation of salloc with Ctrl-C; srun has the ranks save.
# bash waits for srun with a handler, and without one it ends before the code is there. Not '': what a shell ignores, its
# children ignore as well.
hpcrl_trap() {
    trap hpcrl_ends=1 TERM
    trap 'hpcrl_ends=1 hpcrl_interrupted=1' INT
}

# hpcrl_srun RUN_DIR ARGUMENTS...: `python -m hpcrl ARGUMENTS...` on all ranks, which start again in this allocation where
# the loss of a rank or a node allows it (slurm/relaunch.sh); returns what became of it.
hpcrl_srun() {
    local run=$1 code
    shift
    [[ ${HPCRL_DRY_RUN:-} != 1 ]] || run=/dev/null
    hpcrl_list_nodes
    while :; do
        hpcrl_start_guard "$run"
        hpcrl_launch "$run" "$@"
        code=$?
        hpcrl_stop_guard
        hpcrl_may_relaunch "$run" "$code" "$@" || return "$code"
    done
}

# hpcrl_launch RUN_DIR ARGUMENTS...: start the ranks, again where MPI fails to start; returns what became of it.
# Launchers turn codes into 137; the program's own word is <run>/exit.json, if HPCRL_START in it says that it is of this
# start: the folder may be another job's, before and after. Sets hpcrl_killed where the program had begun, owns the folder
# still and wrote no exit.json: a rank or its node was killed.
hpcrl_launch() {
    local run=$1 code said mine try=1
    hpcrl_killed=
    shift
    while :; do
        export HPCRL_START="${SLURM_JOB_ID:-0}.${SLURM_RESTART_COUNT:-0}.$(date +%s.%N).$RANDOM"
        mine="\"start\": \"$HPCRL_START\""
        hpcrl_start_watch "$run"
        hpcrl_srun_once "$@"
        code=$?
        hpcrl_stop_watch
        said=
        if grep -qF "$mine" "$run/exit.json" 2>/dev/null; then
            said=$(sed -n 's/^ *"code": *\([0-9][0-9]*\).*/\1/p' "$run/exit.json" 2>/dev/null)
        fi
        # Rank 0 takes the folder once MPI has started. Slurm's pmi2 reads no more than 1,024 bytes of a line of MPICH's.
        if [[ -z $said && $code != [02] ]] && grep -qF "$mine" "$(hpcrl_owner_of "$run")" 2>/dev/null; then
            hpcrl_killed=1
        fi
        if [[ -n $said || $code == [02] || -n $hpcrl_killed || -n ${hpcrl_ends:-} ]] ||
            ((try >= ${HPCRL_START_TRIES:-3})); then
            return "${said:-$code}"
        fi
        try=$((try + 1))
        hpcrl_say "MPI did not start on all ranks (srun's exit code $code): try $try of ${HPCRL_START_TRIES:-3}"
    done
}

hpcrl_srun_once() {
    # --disable-status: else srun answers the first Ctrl-C itself, and passes on none
    srun ${hpcrl_mpi:+--mpi="$hpcrl_mpi"} --disable-status --kill-on-bad-exit=1 --wait=60 --cpu-bind="${HPCRL_CPU_BIND:-cores}" \
        "${hpcrl_step_options[@]}" "${hpcrl_srun_options[@]}" "${hpcrl_python[@]}" -m hpcrl "$@"
}

# hpcrl_owner_of RUN_DIR: the record of the job that owns the folder, the one with the highest number
hpcrl_owner_of() { printf '%s\n' "$1"/owner/*.json | tail -n 1; }

# hpcrl_leave CODE: the end of a template: 85, and a kill, ask for another slice; all else is the job's own exit code.
# A run that is killed again and again ends by itself: it counts the slices that saved nothing.
hpcrl_leave() {
    local code=$1 restarts=${SLURM_RESTART_COUNT:-0} ended=saved job
    if [[ -n ${hpcrl_interrupted:-} ]]; then
        [[ $code != 85 ]] || hpcrl_say "saved; start it again to go on"
        exit "$code"
    fi
    if [[ $code != 85 ]]; then
        [[ -n ${hpcrl_killed:-} ]] || exit "$code"
        ended="killed (srun's exit code $code)"
    fi
    if ((restarts >= ${HPCRL_MAX_RESTARTS:-100})); then
        hpcrl_say "$ended, and not requeued: $restarts restarts are HPCRL_MAX_RESTARTS; submit it again to go on"
        exit "$code"
    fi
    job=$(hpcrl_job)
    case $(squeue -h -j "$job" -o '%T %r' 2>/dev/null) in
    'COMPLETING TimeLimit') ;; # the limit came before the save had ended
    COMPLETING* | CANCELLED*)  # Slurm would requeue what a person has cancelled, and it requeues the preempted itself
        hpcrl_say "$ended; cancelled or preempted: submit it again to go on if Slurm does not"
        exit "$code"
        ;;
    esac
    hpcrl_say "$ended; asking for restart $((restarts + 1))"
    scontrol requeue "$job" || exit "$code"
    sleep 60 # Slurm ends this script by itself; one that has left would have ended the job
    exit "$code"
}

# hpcrl_job: the id of only this job: an array's last element has the array's own, which means all of them
hpcrl_job() {
    if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "${SLURM_JOB_ID:-}"
    fi
}

# hpcrl_run_dir DIR/NAME ARGUMENTS...: the run's folder, after overrides such as run.name=x
hpcrl_run_dir() {
    local folder=${1%/*} name=${1##*/} argument
    for argument in "${@:2}"; do
        case $argument in
        run.dir=*) folder=$(hpcrl_path "${argument#run.dir=}") || exit ;;
        run.name=*) name=$(hpcrl_path "${argument#run.name=}") || exit ;;
        esac
    done
    printf '%s\n' "$folder/$name"
}

# hpcrl_path PATH: as hpcrl/config/paths.py expands it: ~/, $NAME, ${NAME}, ${oc.env:NAME}, ${oc.env:NAME,default}, $$
hpcrl_path() {
    local rest=$1 path= name
    local variable='^([^$]*)\$(\$|([A-Za-z_][A-Za-z0-9_]*)|\{(oc\.env:)?([A-Za-z_][A-Za-z0-9_]*)(,([^}]*))?\})(.*)$'
    while [[ $rest =~ $variable ]]; do
        path+=${BASH_REMATCH[1]} name=${BASH_REMATCH[3]}${BASH_REMATCH[5]} rest=${BASH_REMATCH[8]}
        [[ -z $name || -n ${!name:-${BASH_REMATCH[7]}} ]] || hpcrl_fail "found $1; expected $name to be set"
        if [[ -n $name ]]; then path+=${!name:-${BASH_REMATCH[7]}}; else path+='$'; fi
    done
    path+=$rest
    case $path in
    \~ | \~/*) path=$HOME${path#\~} ;;
    esac
    printf '%s\n' "$path"
}

# hpcrl_choose_python: hpcrl_python, the start of a command line, and hpcrl_srun_options where srun needs them as well
hpcrl_choose_python() {
    hpcrl_python=(python3) hpcrl_srun_options=()
    local container=${HPCRL_CONTAINER:-}
    if [[ -n ${HPCRL_IMAGE:-} && ${HPCRL_DRY_RUN:-} == 1 && -x ${HPCRL_VENV:=.venv}/bin/python3 ]]; then
        hpcrl_say "the dry run takes $HPCRL_VENV and not $HPCRL_IMAGE"
        container=none
    elif [[ -n ${HPCRL_IMAGE:-} && -z $container ]]; then
        container=$(hpcrl_container)
    fi
    # shellcheck disable=SC2086 # one word for each module
    [[ -z ${HPCRL_MODULES:-} ]] || module load $HPCRL_MODULES
    case $container in
    '' | none)
        [[ -z ${HPCRL_IMAGE:-} || $container == none ]] ||
            hpcrl_fail "HPCRL_IMAGE=$HPCRL_IMAGE needs Pyxis or Apptainer, and neither is here; set HPCRL_CONTAINER"
        if [[ -x ${HPCRL_VENV:=.venv}/bin/python3 ]]; then
            hpcrl_python=("$HPCRL_VENV/bin/python3")
        elif [[ -z ${HPCRL_MODULES:-} ]]; then
            hpcrl_fail "no Python environment at $HPCRL_VENV (from $PWD); run tools/environment.sh, or set HPCRL_VENV, HPCRL_MODULES or HPCRL_IMAGE"
        fi
        ;;
    apptainer | singularity)
        hpcrl_python=("$container" exec "$(hpcrl_gpu_option)" --pwd "$PWD" --bind "$PWD${HPCRL_MOUNTS:+,$HPCRL_MOUNTS}" "${HPCRL_IMAGE:?}" python3)
        ;;
    pyxis)
        hpcrl_srun_options=(--container-image="${HPCRL_IMAGE:?}" --container-workdir="$PWD"
            --container-mounts="$PWD:$PWD${HPCRL_MOUNTS:+,$HPCRL_MOUNTS}")
        ;;
    edf) # the file names the image, its mounts and hooks
        hpcrl_srun_options=(--environment="${HPCRL_IMAGE:?}") hpcrl_python=(env --chdir="$PWD" python3)
        ;;
    *) hpcrl_fail "HPCRL_CONTAINER=$container; expected apptainer, singularity, pyxis, edf or none" ;;
    esac
}

# hpcrl_gpu_option [FILE]: how Apptainer brings in the driver; FILE is there if it is AMD's
hpcrl_gpu_option() {
    if [[ -e ${1:-/dev/kfd} && ! -e /dev/nvidiactl ]]; then echo --rocm; else echo --nv; fi
}

# hpcrl_container: the container runtime that is here
hpcrl_container() {
    local runtime
    if srun --help 2>/dev/null | grep -q -e --container-image; then
        echo pyxis
        return
    fi
    for runtime in apptainer singularity; do
        if command -v "$runtime" >/dev/null; then
            echo "$runtime"
            return
        fi
    done
}

# hpcrl_choose_mpi: hpcrl_mpi, what srun gets as --mpi=. A wrong one makes every rank a world of its own.
hpcrl_choose_mpi() {
    hpcrl_mpi=${HPCRL_MPI:-}
    [[ -z $hpcrl_mpi ]] || return 0
    local library='Open MPI' # Pyxis starts containers only by srun; the image of TensorRT-LLM has Open MPI
    if ((${#hpcrl_srun_options[@]} == 0)); then
        library=$("${hpcrl_python[@]}" -c '
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())') || hpcrl_fail "'${hpcrl_python[*]}' cannot load mpi4py; see above"
    fi
    hpcrl_mpi=$(hpcrl_pmi_for "$library" "$(srun --mpi=list 2>&1)")
}

# hpcrl_pmi_for LIBRARY OFFERED: the PMI that this MPI library uses, of those that `srun --mpi=list` offers; or nothing
hpcrl_pmi_for() {
    local candidate wanted=(pmi2)
    case $1 in
    *Open?MPI*) wanted=(pmix) ;;
    *CRAY?MPICH*) wanted=(cray_shasta pmi2) ;;
    esac
    for candidate in "${wanted[@]}"; do
        if grep -qw "$candidate" <<<"$2"; then
            echo "$candidate"
            return
        fi
    done
}

# hpcrl_set NAME VALUE: a variable of the site, for all ranks. An exported value counts more, and one line shows both.
# Ranks of one node need no network, and a plugin of NCCL for the network of a site may not start there.
hpcrl_set() {
    case $1 in
    NCCL_NET | NCCL_SOCKET_IFNAME | GLOO_SOCKET_IFNAME | UCX_NET_DEVICES) ((${SLURM_JOB_NUM_NODES:-1} > 1)) || return 0 ;;
    esac
    [[ ${!1-$2} == "$2" ]] || hpcrl_say "kept $1=${!1}, which is exported; the site has $2 (unset $1 to use it)"
    hpcrl_default "$1" "${!1-$2}"
}

# hpcrl_default NAME VALUE: a variable for all ranks; one that is set stays
hpcrl_default() {
    export "$1=${!1:-$2}"
    hpcrl_names+=("$1")
}

# hpcrl_pass_variables: containers take these variables from here also where their image sets them
hpcrl_pass_variables() {
    local name
    ((${#hpcrl_names[@]})) || return 0
    case ${hpcrl_python[0]} in
    apptainer | singularity) # not --env, which splits values at commas
        for name in "${hpcrl_names[@]}"; do export "${hpcrl_python[0]^^}ENV_$name=${!name}"; done
        ;;
    esac
    if [[ ${hpcrl_srun_options[0]} == --container-image=* ]] && srun --help 2>/dev/null | grep -q -e --container-env; then
        hpcrl_srun_options+=(--container-env="$(IFS=, && echo "${hpcrl_names[*]}")")
    fi
}

# hpcrl_mpiexec ARGUMENTS...: as hpcrl_srun, by mpiexec and without a second try, where srun has no PMI for the MPI library.
# Open MPI's passes only those variables to other nodes whose names it gets.
hpcrl_mpiexec() {
    local options=(-n "${SLURM_NTASKS:-1}") name
    case $(mpiexec --version 2>&1) in
    *Open?MPI* | *OpenRTE*)
        # shellcheck disable=SC2046 # names of variables have no spaces
        for name in "${hpcrl_names[@]}" $(compgen -e HPCRL_; compgen -e APPTAINERENV_; compgen -e SINGULARITYENV_) HF_HUB_OFFLINE; do
            options+=(-x "$name")
        done
        ;;
    esac
    mpiexec "${options[@]}" "${hpcrl_python[@]}" -m hpcrl "$@"
}

# hpcrl_choose_network: interfaces for NCCL, gloo and UCX; what the user has set stays. None of the three asks who calls,
# so ranks of one node listen on loopback.
hpcrl_choose_network() {
    local interface=${HPCRL_INTERFACE:-} devices=
    if ((${SLURM_JOB_NUM_NODES:-1} == 1)); then
        interface=lo
    else
        [[ -n $interface ]] || interface=$(hpcrl_interface "$(ip -o -4 addr show up 2>/dev/null)" "$(ip -4 route show default 2>/dev/null)")
        # UCX takes every interface, link-local ones too, unless it has a list; that must hold the adapters as well
        devices=$(grep -l ACTIVE /sys/class/infiniband/*/ports/*/state 2>/dev/null |
            sed 's|.*/infiniband/\([^/]*\)/ports/\([0-9]*\)/state|\1:\2|' | paste -sd, -)
    fi
    [[ -n $interface ]] || return 0
    hpcrl_default NCCL_SOCKET_IFNAME "$interface"
    hpcrl_default GLOO_SOCKET_IFNAME "$interface"
    hpcrl_default UCX_NET_DEVICES "${devices:+$devices,}$interface"
}

# hpcrl_interface ADDRESSES ROUTES: the interface that leads to other nodes, from `ip -o -4 addr show up` and
# `ip -4 route show default`: InfiniBand, Slingshot or a bond, else the default route's, else the first. Never loopback,
# link-local (a board's service processor answers there) or a container bridge.
hpcrl_interface() {
    local number name family address rest usable=() kind
    while read -r number name family address rest; do
        case "$name $address" in
        lo\ * | *\ 127.* | *\ 169.254.* | docker* | br-* | veth* | virbr* | cni* | flannel* | podman* | lxc* | ' ') ;;
        *) usable+=("$name") ;;
        esac
    done <<<"$1"
    ((${#usable[@]})) || return 0
    for kind in ib hsn bond; do
        for name in "${usable[@]}"; do
            if [[ $name == "$kind"* ]]; then
                echo "$name"
                return
            fi
        done
    done
    for name in "${usable[@]}"; do
        if grep -q -e " dev $name\( \|\$\)" <<<"$2"; then
            echo "$name"
            return
        fi
    done
    echo "${usable[0]}"
}

# hpcrl_find_end: HPCRL_END_TIME, the end of the allocation in seconds since 1970; unset where there is none
hpcrl_find_end() {
    local stamp=${SLURM_JOB_END_TIME:-} said
    unset HPCRL_END_TIME # of another job, when this one was submitted from inside it
    if [[ -z $stamp && -n ${SLURM_JOB_ID:-} ]]; then
        said=$(squeue -h -j "$(hpcrl_job)" -o %e 2>/dev/null)
        # `date -d ""` is last midnight; without an answer the program asks for itself
        [[ $said != 20??-* ]] || stamp=$(date +%s -d "$said" 2>/dev/null)
    fi
    [[ ! $stamp =~ ^[0-9]+$ ]] || export HPCRL_END_TIME=$stamp
}
