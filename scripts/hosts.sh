#!/usr/bin/env bash
# Simulates several hosts on one machine: runs a command on the first host, which can start MPI jobs on all.
#
#   scripts/hosts.sh [--rate 1gbit] NUMBER COMMAND...
#   scripts/hosts.sh 3 mpirun -n 6 --map-by ppr:2:node pdgemm info
#   scripts/hosts.sh 2 bash                     a shell on h1; there, /dev/shm/on h2 COMMAND... runs on h2, and
#       /dev/shm/cable h2 rate 100mbit          changes the rate of a host's cable, both ways
#       /dev/shm/cable h2 loss 1%               drops this part of the packets that h2 receives
#       /dev/shm/cable h2 down                  disconnects the cable; up connects it again
#
# A host is a set of namespaces with a name (h1, h2, ...), a network card (eth0, 10.0.0.1, ...), IPC and /dev/shm of its
# own, so that hosts communicate only by TCP.  A cable from each card to a switch has the rate RATE both ways (tc tbf).
# All hosts see the files of the machine.  Its processors are divided among the hosts, if there are enough.  Environment
# variables tell Open MPI the hosts and how to start daemons there.  `ip -s link` counts packets as the kernel passes
# them on, up to 64 KiB with one header; `tc -s qdisc` and the rate count bytes as on a wire, with a header of 66 bytes
# for each 1448.
#
# All of it is in namespaces of this command and ends with it, also after Ctrl-C and kill -9 (unshare ignores SIGTERM).
# The machine's own network is not changed, and any number of these commands may run at a time.  For a user who is not
# root a user namespace is added, if that is allowed.
# Exit code: the one of COMMAND; 3: this machine cannot simulate hosts, for the printed reason; 2: bad arguments.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:/usr/sbin:/sbin      # the folders of ip and tc
. "$root/scripts/common.sh"
help_asked "$@"

exit_code=2
rate=1gbit
if [ "${1:-}" = --rate ]; then
    rate=${2:-}
    shift 2 || true
fi
number=${1:-}
[[ $number =~ ^[1-9][0-9]?$ && $# -gt 1 ]] || die "usage: hosts.sh [--rate 1gbit] NUMBER COMMAND... (1 to 99 hosts)"
[[ $rate =~ ^[1-9][0-9]*[kmg]bit$ ]] || die "a rate is a number of kbit, mbit or gbit per second, not '$rate'"
exit_code=3

if [ -z "${_pdgemm_switch:-}" ]; then
    for tool in unshare:util-linux nsenter:util-linux ip:iproute2 tc:iproute2; do
        command -v "${tool%:*}" >/dev/null || apt_install "${tool#*:}" || die "no ${tool%:*}, which is in ${tool#*:}"
    done
    switch=(unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc)
    try=(ip link add switch type bridge)
    said=$("${switch[@]}" "${try[@]}" 2>&1) || {
        switch+=(--user --map-root-user)
        said=$("${switch[@]}" "${try[@]}" 2>&1) || die "no network namespaces: ${said##*$'\n'}"
        # in a user namespace we are root for Open MPI
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
    }
    _pdgemm_switch=1 exec "${switch[@]}" "$BASH" "${BASH_SOURCE[0]}" --rate "$rate" "$@"
fi

# From here on, this is the first process in the namespaces of the switch: when it ends, all processes in them end.
unset _pdgemm_switch
shift
trap 'exit 130' INT
trap 'exit 143' TERM

# need COMMAND...: runs a command; if it fails, ends this script with exit code 3.
need() {
    local said
    said=$("$@" 2>&1 </dev/null) || die "$* failed: ${said##*$'\n'}"
}

# on PID COMMAND...: runs a command on the host whose first process is PID.
on() {
    local pid=$1
    shift
    nsenter -t "$pid" --net --mount --ipc --uts -- "$@"
}

limit() { echo "root tbf rate $1 burst 128kb limit 32mb"; }     # TCP has less data in flight, so nothing is dropped
mapfile -t cores < <(taskset -pc $$ | sed 's/.*: //' | tr , '\n' | awk -F- '{for (i = $1; i <= ($2 ? $2 : $1); i++) print i}')
share=$((${#cores[@]} / number))

# processors NUMBER: prints the processors of this host.
processors() {
    local mine=("${cores[@]}")
    if [ $share != 0 ]; then mine=("${cores[@]:($1 - 1) * share:share}"); fi
    (IFS=,; echo "${mine[*]}")
}

pids=() allowed=()
need ip link add switch type bridge
need ip link set switch up
for ((n = 1; n <= number; n++)); do
    # The first process of a host prints its number and then sleeps, or unshare prints an error.
    exec {said}< <(exec unshare --net --mount --ipc --uts sh -c 'echo $$; exec sleep infinity' 2>&1 </dev/null)
    read -r pid <&"$said" || true
    [[ $pid =~ ^[0-9]+$ ]] || die "nested namespaces are not possible: $pid"
    pids+=("$pid")
    need ip link add "port$n" type veth peer name eth0 netns "$pid"
    need ip link set "port$n" master switch up
    need tc qdisc add dev "port$n" $(limit "$rate")
    need on "$pid" hostname "h$n"
    need on "$pid" sh -c 'echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 || [ ! -e /proc/sys/net/ipv6 ]'
    need on "$pid" ip link set lo up
    need on "$pid" ip address add "10.0.0.$n/24" dev eth0
    need on "$pid" ip link set eth0 up
    need on "$pid" tc qdisc add dev eth0 $(limit "$rate")
    need taskset -pc "$(processors $n)" "$pid"
    allowed+=("$(processors $n)")
    need on "$pid" mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    need on "$pid" mkdir /dev/shm/tmp
done

hosts='127.0.0.1 localhost'
for ((n = 1; n <= number; n++)); do hosts+=$'\n'"10.0.0.$n h$n"; done
agent="#!$BASH
# mpirun calls this in place of ssh.
pids=(${pids[*]}) allowed=(${allowed[*]})
at=\$((\${1#h} - 1))
shift
exec taskset -c \"\${allowed[at]}\" nsenter -t \"\${pids[at]}\" --net --mount --ipc --uts -- env -C \"\$PWD\" sh -c \"\${*:-exec \$BASH}\""
cable="#!$BASH
# Changes the cable of a host: rate RATE, loss PERCENT (nft, of the package nftables), down, up.
set -e
pids=(${pids[*]})
n=\${1#h} pid=\${pids[\${1#h} - 1]}
ends() { nsenter -t $$ --net \"\${@//DEVICE/port\$n}\" && nsenter -t \"\$pid\" --net \"\${@//DEVICE/eth0}\"; }
case \$2 in
    rate) ends tc qdisc replace dev DEVICE root tbf rate \"\$3\" burst 128kb limit 32mb ;;
    loss) nsenter -t \"\$pid\" --net nft -f - <<<\"table inet loss { chain in { type filter hook input priority 0;
        iifname eth0 numgen random mod 100 < \${3%\\%} drop; }; }\" ;;
    down | up) nsenter -t $$ --net ip link set port\$n \$2 ;;
    *) echo 'usage: cable HOST rate RATE | loss PERCENT | down | up' >&2; exit 2 ;;
esac"
for pid in "${pids[@]}"; do
    need on "$pid" sh -c 'cd /dev/shm && printf "%s\n" "$0" >hosts && mount --bind hosts /etc/hosts &&
        printf "%s\n" "$1" >on && printf "%s\n" "$2" >cable && chmod +x on cable &&
        seq -f "h%.0f" "$3" >hostfile' "$hosts" "$agent" "$cable" "$number"
done

export TMPDIR=/dev/shm/tmp
case $(mpirun --version 2>&1) in
    *' 4.'*) export OMPI_MCA_btl=self,vader,tcp ;;
    *) export OMPI_MCA_btl=self,sm,tcp ;;
esac
export OMPI_MCA_pml=ob1
# Report the arrival of a message at once, not after the messages that follow it (docs/hosts.md).
export OMPI_MCA_btl_tcp_flags="${OMPI_MCA_btl_tcp_flags-send,inplace}"
export OMPI_MCA_pml_ob1_send_pipeline_depth="${OMPI_MCA_pml_ob1_send_pipeline_depth-1000}"
# And send a message when it is posted: without a request and an answer, which would queue behind other messages.
export OMPI_MCA_btl_tcp_eager_limit="${OMPI_MCA_btl_tcp_eager_limit-8388608}"
export OMPI_MCA_btl_tcp_rndv_eager_limit="${OMPI_MCA_btl_tcp_rndv_eager_limit-8388608}"
export OMPI_MCA_btl_tcp_max_send_size="${OMPI_MCA_btl_tcp_max_send_size-8388608}"
export PRTE_MCA_plm_ssh_agent=/dev/shm/on PRTE_MCA_prte_default_hostfile=/dev/shm/hostfile      # Open MPI 5
export OMPI_MCA_plm_rsh_agent=/dev/shm/on OMPI_MCA_orte_default_hostfile=/dev/shm/hostfile      # Open MPI 4
status=0
taskset -c "${allowed[0]}" nsenter -t "${pids[0]}" --net --mount --ipc --uts -- env -C "$PWD" "$@" || status=$?
exit $status
