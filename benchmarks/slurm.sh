#!/usr/bin/env bash
# A Slurm of four nodes of eight GPUs on this machine alone: do its own programs take the emitted files, and does slurmctld run the job-submit example?
#
#   sudo bash benchmarks/slurm.sh MEMPLAN [FILE...]
#
# Needs slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins and munge (Debian's names) and root; writes /etc/slurm. FILEs are given to
# `sbatch --test-only`; the example then admits, refuses and cannot read one job each. The GPUs are the null device.
set -euo pipefail
memplan=$(realpath "$1"); shift
here=$(realpath "$(dirname "$0")/.."); room=$(mktemp -d); processes=()
trap 'kill "${processes[@]}" 2>/dev/null || true' EXIT
for each in 0 1 2 3 4 5 6 7; do mknod "$room/gpu$each" c 1 3; done
mkdir -p /run/munge "$room"/state "$room"/n{1,2,3,4}; chown munge /run/munge
cat > /etc/slurm/slurm.conf <<END
ClusterName=here
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=$room/state
SlurmdSpoolDir=$room/%n
SlurmctldPidFile=$room/slurmctld.pid
SlurmdPidFile=$room/slurmd.%n.pid
SlurmctldLogFile=$room/slurmctld.log
SlurmdLogFile=$room/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
JobSubmitPlugins=lua
NodeName=n[1-4] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[17001-17004] CPUs=192 RealMemory=4000000 Gres=gpu:8
PartitionName=a100-batch Nodes=n[1-4] Default=YES State=UP
END
for each in 1 2 3 4; do echo "NodeName=n$each Name=gpu File=$room/gpu[0-7]"; done > /etc/slurm/gres.conf
cp "$here/configs/admission/job_submit.lua" /etc/slurm/
export MEMPLAN_COMMAND="timeout 60 $memplan" MEMPLAN_POOLS="$here/configs/pools/platform.yaml"
runuser -u munge -- munged --foreground & processes+=($!); sleep 1
slurmctld -D > "$room/out" 2>&1 & processes+=($!); sleep 2
for each in 1 2 3 4; do slurmd -D -N "n$each" > "$room/out$each" 2>&1 & processes+=($!); done
sleep 4
for file in "$@"; do echo "== $file"; sbatch --test-only "$file" || true; done
for engine in fsdp ddp unheard-of; do
  printf '%s\n' '#!/bin/bash' '#SBATCH --gpus-per-node=8' "#SBATCH --output=$room/job" '#MEMPLAN model: llama-3.1-8b' '#MEMPLAN gpus: 8' \
    '#MEMPLAN checkpointing: full' "#MEMPLAN engine: $engine" hostname > "$room/job.sh"
  echo "== engine: $engine"; sbatch "$room/job.sh" || true
done
