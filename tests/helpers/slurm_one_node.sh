#!/usr/bin/env bash
# slurm_one_node.sh start|stop FOLDER: run a private Slurm of this machine alone, to try batch files.
#
#     tests/helpers/slurm_one_node.sh start /tmp/slurm && export SLURM_CONF=/tmp/slurm/slurm.conf
#     sbatch slurm.sbatch --model gpt2-mini --output runs/first   # in the partition `spare`
#     sbatch --partition urgent --exclusive --wrap 'sleep 60'     # preempts it with a warning
#     tests/helpers/slurm_one_node.sh stop /tmp/slurm
#
# Needs root and Debian's packages: apt-get install slurm-wlm. FOLDER must not exist; it gets the configuration, a munge
# key, sockets, state and logs, and remains after `stop`. The daemons listen at PORT and PORT + 1 (16817). A Slurm in
# /etc/slurm is not touched, and neither systemd nor cgroups nor accounting is used. Jobs in `urgent` preempt those in
# `spare`, whose tasks get SIGTERM GRACE seconds (120) before the end, and which are requeued.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
port=${PORT:-16817} grace=${GRACE:-120}

fail() { echo "slurm_one_node.sh: $*" >&2; exit 1; }

ends() { # NAME: end the daemon whose pid file this is, and wait for it
  local file=$folder/$1.pid pid
  [ -s "$file" ] || return 0
  pid=$(cat "$file")
  kill "$pid" 2>/dev/null || return 0
  for _ in {1..100}; do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
  kill -KILL "$pid" 2>/dev/null || true
}

start() {
  [ "$(id -u)" = 0 ] || fail "only root can start it"
  for name in munged slurmctld slurmd; do
    command -v "$name" >/dev/null || fail "$name is not installed: apt-get install slurm-wlm"
  done
  [ ! -e "$folder" ] || fail "$folder exists; name another folder"
  mkdir -p "$folder/state" "$folder/spool"
  local host
  host=$(hostname -s)
  # Slurm before 24.05 must load a plugin for cgroups, which does nothing until another plugin asks it to.
  local cgroups=disabled
  [[ $(slurmctld -V) =~ ^slurm(-wlm)?\ 2([0-3]|4\.0[0-4]) ]] && cgroups=cgroup/v1
  echo "CgroupPlugin=$cgroups" >"$folder/cgroup.conf"
  # A requeued job starts no sooner than cred_expire seconds later; 5 is the smallest value.
  cat >"$folder/slurm.conf" <<END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc)
PartitionName=spare Nodes=ALL Default=YES PriorityTier=1 GraceTime=$grace
PartitionName=urgent Nodes=ALL PriorityTier=2
END
  (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
  export SLURM_CONF=$folder/slurm.conf
  # --force: the parents of FOLDER may be closed to other users, who have no business here.
  munged --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" --pid-file "$folder/munged.pid" \
    --log-file "$folder/munged.log" --seed-file "$folder/munged.seed" 2>>"$folder/munged.log"
  slurmctld
  slurmd
  for _ in {1..300}; do
    [ "$(sinfo --noheader --partition spare --format %T 2>/dev/null)" = idle ] && return
    sleep 0.1
  done
  for log in "$folder"/*.log; do tail -n 5 "$log" >&2; done
  stop
  fail "the node is not idle after 30 s"
}

stop() {
  export SLURM_CONF=$folder/slurm.conf
  [ -e "$SLURM_CONF" ] || fail "$folder has no slurm.conf"
  timeout 10 scancel --user root 2>/dev/null || true
  for _ in {1..400}; do # jobs that do not end are killed after 30 s
    [ -n "$(timeout 10 squeue --noheader 2>/dev/null)" ] || break
    sleep 0.1
  done
  for name in slurmd slurmctld munged; do ends "$name"; done
}

[ $# = 2 ] || fail "usage: slurm_one_node.sh start|stop FOLDER"
case $1 in start | stop) ;; *) fail "$1: start or stop" ;; esac
folder=$(realpath -m "$2")
"$1"
