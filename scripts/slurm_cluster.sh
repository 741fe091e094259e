#!/usr/bin/env bash
# A Slurm cluster of two simulated nodes, n1 and n2, on this machine: for the tests, and to try slurm/*.sbatch.
#
#   scripts/slurm_cluster.sh up DIR       starts it; all its files are in DIR
#   export SLURM_CONF=DIR/slurm.conf      then sbatch, srun, squeue ... of this shell use this cluster
#   scripts/slurm_cluster.sh down DIR     cancels its jobs and stops it; DIR/log remains
#
# Each node has 4 CPUs and 2 fake GPUs.  There is no accounting (sacct) and no binding to cores.
# Several clusters may run at once, each in its DIR.
# Exit code 3: packages are missing, and this script may not install them.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/common.sh"
help_asked "$@"
PATH=$PATH:/usr/sbin:/sbin      # Debian's folders of the daemons

usage() { exit_code=2 die "usage: $0 up|down DIR"; }
case $#${1:-} in 2up | 2down) ;; *) usage ;; esac
[ -n "$2" ] || usage
[ "$1" = down ] || mkdir -p "$2"
[ -d "$2" ] || exit_code=2 die "$2: no such folder"
dir=$(cd -P "$2" && pwd)
export SLURM_CONF=$dir/slurm.conf
nodes='n1 n2'

# pid_of NAME FILE: prints the number in a pid file, if that process runs and its command is NAME.
pid_of() {
    local pid=''
    { read -r pid <"$2"; } 2>/dev/null || [ -n "$pid" ] || return 1
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ] && echo "$pid"
}

# eventually SECONDS COMMAND...: repeats the command until it succeeds; fails when the time is over.
eventually() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.1
    done
}

# stop NAME FILE: ends the daemon of a pid file, by SIGKILL if SIGTERM does not help.
stop() {
    local pid
    pid=$(pid_of "$1" "$2") || return 0
    kill "$pid" 2>/dev/null || true
    eventually 10 gone "$pid" || kill -9 "$pid" 2>/dev/null || true
    rm -f "$2"
}
gone() { case $(ps -o state= -p "$1") in '' | Z) ;; *) return 1 ;; esac; }

# Prints the processes of this cluster: variables in their environments mark its daemons and its jobs.
left_over() {
    {
        grep -lzxF "PDGEMM_SLURM_CLUSTER=$dir" /proc/[0-9]*/environ
        grep -lzxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ | xargs -r grep -lz '^SLURM_JOB_ID='
    } 2>/dev/null | cut -d/ -f3
}
no_jobs() { [ -z "$(timeout 5 squeue -h -o %i 2>/dev/null)" ]; }
no_left_over() { [ -z "$(left_over)" ]; }

down() {
    if pid_of slurmctld "$dir/slurmctld.pid" >/dev/null && ! no_jobs; then
        squeue -h -o %A | sort -u | xargs -r timeout 10 scancel 2>/dev/null || true
        eventually 20 no_jobs || true
    fi
    for node in $nodes; do stop slurmd "$dir/slurmd.$node.pid"; done
    stop slurmctld "$dir/slurmctld.pid"
    stop munged "$dir/munge/munged.pid"
    eventually 5 no_left_over || left_over | xargs -r kill -9 2>/dev/null || true
}

# Prints three free ports, below those that the system uses for outgoing connections.
free_ports() {
    "$python" - <<'END'
import random
import socket

found = []
while len(found) < 3:
    port = random.randint(20000, 32000)
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            continue
        if port not in found:
            found.append(port)
print(*found)
END
}

configure() {
    local host me controller first second
    host=$(hostname -s)
    me=$(id -un)
    read -r controller first second <<<"$(free_ports)"
    cat >"$SLURM_CONF" <<END
ClusterName=pdgemm
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=$me
SlurmdUser=$me
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
TmpFS=$dir/tmp/%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
MinJobAge=600
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
END
    echo "NodeName=n[1-2] Name=gpu File=$dir/gpu[0-1]" >"$dir/gres.conf"
    touch "$dir"/gpu{0,1}
    # Slurm 23.11 and later need cgroups even if no setting uses them; a container may have none.
    if slurmctld -V | sed 's/.* //; i 23.11' | sort -VC; then echo 'CgroupPlugin=disabled' >"$dir/cgroup.conf"; fi
}

all_idle() { [ "$(timeout 5 sinfo -h -N -o '%N %T' 2>/dev/null | sort -u)" = $'n1 idle\nn2 idle' ]; }

start_daemons() {
    local PDGEMM_SLURM_CLUSTER=$dir
    export PDGEMM_SLURM_CLUSTER
    munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed" &&
        slurmctld -c -f "$SLURM_CONF" || return 1
    for node in $nodes; do slurmd -N "$node" -f "$SLURM_CONF" || return 1; done
    eventually 20 all_idle
}

up() {
    local missing=() command
    if pid_of slurmctld "$dir/slurmctld.pid" >/dev/null; then die "a cluster runs in $dir already"; fi
    [ ${#dir} -le 80 ] || die "$dir: too long for the path of a socket"
    exit_code=3
    [ "$(uname)" = Linux ] || die "needs Linux"
    for command in munged slurmctld slurmd sbatch srun; do
        command -v "$command" >/dev/null || missing+=("$command")
    done
    if [ ${#missing[@]} != 0 ]; then
        command -v apt-get >/dev/null || die "needs Slurm and MUNGE (${missing[*]})"
        apt_install slurm-wlm munge libpmix2     # Slurm's PMIx plugin loads libpmix2
    fi
    python=$(find_python)
    [ -n "$python" ] || die "no Python >= 3.11 found"
    exit_code=1
    (umask 077 && mkdir -p "$dir/munge" && head -c 1024 /dev/urandom >"$dir/munge/key.new")
    mv -f "$dir/munge/key.new" "$dir/munge/key"
    mkdir -p "$dir"/{state,log,spool/n1,spool/n2,tmp/n1,tmp/n2}
    trap down EXIT
    # Another program may take a port before the daemon does: then try again with other ports.
    for _ in 1 2 3; do
        configure
        if start_daemons >"$dir/log/start" 2>&1; then
            trap - EXIT
            say "Slurm runs in $dir; now: export SLURM_CONF=$SLURM_CONF"
            return
        fi
        down
    done
    tail -n 5 "$dir"/log/* >&2
    die "Slurm did not start; its logs are in $dir/log"
}

"$1"
