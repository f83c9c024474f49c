#!/usr/bin/env bash
# The main job, end to end: prepare -> train -> evaluate -> export -> decode.
#   launch/quickstart.sh [RECIPE] [RUN_FOLDER]
# Stops at the first step that fails, with that step's exit code. A run that was interrupted goes on when called again.
set -euo pipefail
cd "$(dirname "$0")/.."
recipe=${1:-quickstart}
run=${2:-runs/$recipe}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # the target comes from a package, nothing is fetched

prompt="Write a Python function that returns the n-th Fibonacci number, and explain it in two sentences."

step() { # step TITLE COMMAND...
  echo
  echo "== $1"
  shift
  echo "   $*"
  "$@"
}

value() { # value KEY.KEY: a value of the run's own config
  python -c 'import functools, sys, yaml
config = yaml.safe_load(open(sys.argv[1], encoding="utf-8"))
print(functools.reduce(dict.__getitem__, sys.argv[2].split("."), config))' "$run/config.yaml" "$1"
}

started=$SECONDS
mkdir -p "$run"
step "1/5 prepare: convert the target, tokenise its answers" \
  python -m deepspec.prepare "recipe=$recipe" "paths.run=$run"
step "2/5 train: distil the drafter from the frozen target" \
  python -m deepspec.train "recipe=$recipe" "paths.run=$run"
step "3/5 evaluate: decode the test prompts, count what is accepted, time it" \
  python -m deepspec.evaluate "run=$run" | tee "$run/evaluate.txt"
step "4/5 export: quantise, write the inference package, verify it" \
  python -m deepspec.export "run=$run" | tee "$run/export.txt"
package=$run/package-$(value export.profile)
step "5/5 decode: the package answers a prompt" \
  python -m deepspec.inference "$package" --target "$(value target.path)" --prompt "$prompt" --max-new-tokens 96

echo
echo "== result"
tail -n +4 "$run/evaluate.txt"
echo
tail -n +4 "$run/export.txt"
echo
echo "Sizes, and where everything lies"
for path in "$(value target.path)" "$package" "$run/checkpoints" "$run/evaluation" "$run"; do
  du -shL "$path" # one at a time: du counts no file twice
done
echo "done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s"
