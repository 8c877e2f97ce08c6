#!/usr/bin/env bash
# A private Slurm of virtual nodes n0, n1, ... on this machine: to try a template before it queues for hours, and for tests.
#   tools/slurm_lab.sh install          slurmctld, slurmd and munge with apt; needs root
#   tools/slurm_lab.sh up DIR [NODES]   2 nodes unless said otherwise; all its files are in DIR; prints a line to eval
#   tools/slurm_lab.sh down DIR         cancels its jobs and ends its daemons
# Each node claims 96 cores, 8 GPUs and 2 TB, so that templates for large machines are accepted; nothing enforces that.
# Daemons listen on loopback only. Neither root, systemd, cgroups nor a database is needed; as root, nodes have host names
# of their own.
set -euo pipefail

usage="expected tools/slurm_lab.sh install, up DIR [NODES], or down DIR"
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge)
programs=(slurmctld slurmd sinfo munged)

die() { printf 'slurm_lab.sh: error: %s\n' "$*" >&2; exit "${code:-1}"; }

source "$(dirname "${BASH_SOURCE[0]}")/apt.sh"

# free_ports COUNT: the first of that many consecutive ports that are free on loopback
free_ports() {
    python3 - "$1" <<'PY'
import random
import socket
import sys
from contextlib import ExitStack

for _ in range(200):
    first = random.randrange(20000, 31000)
    with ExitStack() as stack:
        try:
            for port in range(first, first + int(sys.argv[1])):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            continue
    print(first)
    break
PY
}

write_configuration() {
    local last=$((nodes - 1)) port user names
    port=$(free_ports $((nodes + 1)))
    [[ -n $port ]] || die "found no $((nodes + 1)) free consecutive ports on loopback"
    user=$(id -un)
    names=$(seq -f n%g -s ' ' 0 "$last")
    (umask 077 && head -c 128 /dev/urandom >"$dir/etc/munge.key")
    # Slurm's daemons listen where their host's name leads: it has to be loopback.
    echo "127.0.0.1 localhost $(hostname) $names" >"$dir/etc/hosts"
    # A GPU is a character device; regular files leave CUDA_VISIBLE_DEVICES empty.
    echo "NodeName=n[0-$last] Name=gpu File=/dev/null,/dev/zero,/dev/full,/dev/random,/dev/urandom,/dev/tty,/dev/ptmx,/dev/kmsg" \
        >"$dir/etc/gres.conf"
    # cred_expire: a requeued job waits that long, 5 s is the least. FirstJobId: two labs with the same ids would share
    # MPICH's memory segments. config_overrides: nodes may claim more than there is.
    cat >"$SLURM_CONF" <<CONF
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
TmpFS=$dir/tmp/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SwitchType=switch/none
MpiDefault=pmi2
FirstJobId=$((RANDOM % 30000 * 100 + 1))
JobRequeue=1
KillWait=${SLURM_LAB_KILL_WAIT:-30}
SlurmctldTimeout=30
SlurmdTimeout=10
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[0-$last] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=96 Sockets=2 CoresPerSocket=48 ThreadsPerCore=1 RealMemory=2000000 Gres=gpu:8 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF
CONF
}

start_daemons() {
    munged --socket="$dir/run/munge.socket" --key-file="$dir/etc/munge.key" --log-file="$dir/log/munged.log" \
        --pid-file="$dir/run/munged.pid" --seed-file="$dir/run/munged.seed" --num-threads=2
    slurmctld -c -f "$SLURM_CONF"
    local node i
    for ((i = 0; i < nodes; i++)); do
        node=n$i
        # PMIX_HOSTNAME: Open MPI finds its node by Slurm's name for it, which is not the host's without a namespace.
        if unshare --uts --mount true 2>/dev/null; then
            PMIX_HOSTNAME=$node unshare --uts --mount sh -c \
                "hostname $node && mount --bind '$dir/etc/hosts' /etc/hosts && exec slurmd -f '$SLURM_CONF' -N $node"
        else
            PMIX_HOSTNAME=$node slurmd -f "$SLURM_CONF" -N "$node"
        fi
    done
}

up() {
    local absent i
    absent=$(missing)
    [[ -z $absent ]] || die "no $absent here; tools/slurm_lab.sh install, as root"
    [[ ! -e $dir/run/slurmctld.pid ]] || die "a lab is up in $dir; tools/slurm_lab.sh down $dir, or another folder"
    mkdir -p "$dir"/{etc,run,log,state}
    chmod a+x "$dir" "$dir/run" # munged wants everyone to reach its socket
    for ((i = 0; i < nodes; i++)); do
        mkdir -p "$dir/spool/n$i" "$dir/tmp/n$i"
        chmod 1777 "$dir/tmp/n$i"
    done
    write_configuration
    trap down EXIT # whatever fails from here on leaves no daemon behind
    start_daemons
    for ((i = 0; i < 300; i++)); do
        if [[ $(sinfo -h -p gpu -o '%D %T' 2>/dev/null) == "$nodes idle" ]]; then
            trap - EXIT
            echo "export SLURM_CONF=$SLURM_CONF"
            return
        fi
        sleep 0.1
    done
    sinfo -N -l >&2 || true
    tail -n 20 "$dir"/log/*.log >&2
    die "the lab did not come up within 30 s; see above"
}

# Jobs first: what a slurmctld leaves running when it ends stays, and ignores SIGTERM.
down() {
    local i file
    scancel --user="$(id -un)" 2>/dev/null || true
    for ((i = 0; i < 10 * (${SLURM_LAB_KILL_WAIT:-30} + 10); i++)); do
        [[ -n $(squeue -h 2>/dev/null) ]] || break
        sleep 0.1
    done
    for file in "$dir"/run/slurmd.*.pid "$dir"/run/slurmctld.pid "$dir"/run/munged.pid; do
        [[ ! -f $file ]] || kill "$(<"$file")" 2>/dev/null || rm "$file"
    done
    for ((i = 0; i < 100; i++)); do
        compgen -G "$dir/run/*.pid" >/dev/null || break
        sleep 0.1
    done
}

PATH=$PATH:/usr/sbin:/sbin
case ${1:-} in
install) install_packages "Slurm and munge" ;;
up | down)
    (($# == 2 || $# == 3)) || code=2 die "$usage"
    mkdir -p "$2"
    dir=$(cd "$2" && pwd)
    nodes=${3:-2}
    [[ $nodes =~ ^[1-9][0-9]?$ ]] || code=2 die "found '$nodes' for the number of nodes, expected 1 to 99; $usage"
    export SLURM_CONF=$dir/etc/slurm.conf
    "$1"
    ;;
*) code=2 die "$usage" ;;
esac
