#!/usr/bin/env bash
# Train on this machine under DeepSpeed's launcher; without a GPU the processes run on the CPU.
#   launch/deepspeed.sh PROCESSES recipe=NAME engine=deepspeed [key=value ...]
# More machines: pass the launcher's own options in DEEPSPEED_OPTIONS, for example "--hostfile hosts --num_nodes 2".
# Run folder and exit codes as in launch/torchrun.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
. launch/common.sh
processes=${1:?usage: launch/deepspeed.sh PROCESSES recipe=NAME engine=deepspeed [key=value ...]}
shift
start_run "$@"
# A free port, so that two runs on one machine do not meet.
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
# shellcheck disable=SC2086
deepspeed --num_gpus "$processes" --master_port "$port" ${DEEPSPEED_OPTIONS:-} --module deepspec.train "$@"
finish_run $?
