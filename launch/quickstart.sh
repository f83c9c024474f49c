#!/usr/bin/env bash
# The main job, end to end: prepare -> train -> evaluate -> export -> decode.
#   launch/quickstart.sh [RECIPE] [RUN_FOLDER]
# Stops at the first step that fails, with that step's exit code. A run that was interrupted goes on when called again.
set -euo pipefail
cd "$(dirname "$0")/.."
recipe=${1:-quickstart}
run=${2:-runs/$recipe}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # the target comes from a package, nothing is fetched

step() {
  echo
  echo "== $1"
  shift
  echo "   $*"
  "$@"
}

started=$SECONDS
step "1/5 prepare: convert the target, tokenise its answers" \
  python -m deepspec.prepare "recipe=$recipe" "paths.run=$run"
step "2/5 train: distil the drafter from the frozen target" \
  python -m deepspec.train "recipe=$recipe" "paths.run=$run"
step "3/5 evaluate: decode the test prompts, count what is accepted, time it" \
  python -m deepspec.evaluate "run=$run"
step "4/5 export: quantise, write the inference package, verify it" \
  python -m deepspec.export "run=$run"
step "5/5 decode: the package answers a prompt, beside the target alone" \
  python -m deepspec.evaluation.summary "$run"
echo
echo "done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s; everything lies in $run"
