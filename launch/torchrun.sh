#!/usr/bin/env bash
# Train on this machine under torchrun.
#   launch/torchrun.sh PROCESSES recipe=NAME [key=value ...]
# The run folder is the one of the same command without a launcher; started again, a run goes on.
# Ends with the training's own exit code (0 done, 1 failure, 2 a mistake of the user, 75 interrupted and saved), which
# torchrun replaces; it is read from status.json in the run folder.
set -uo pipefail
cd "$(dirname "$0")/.."
. launch/common.sh
processes=${1:?usage: launch/torchrun.sh PROCESSES recipe=NAME [key=value ...]}
shift
start_run "$@"
torchrun --nproc_per_node "$processes" --nnodes 1 --rdzv_backend c10d --rdzv_endpoint localhost:0 \
  -m deepspec.train "$@"
finish_run $?
