#!/usr/bin/env bash
# Makes the virtual environments in which packages are loaded by other software: .consumers/speculators, .consumers/vllm.
#   launch/consumers.sh [NAME ...]      versions and hashes: tests/consumers/NAME.lock
# Each is made once; another lock makes it anew. PYTHON= chooses the interpreter, CONSUMERS= the folder, TORCH_INDEX= an
# index to take PyTorch from.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
folder=${CONSUMERS:-.consumers}
locks=tests/consumers

make_one() {
  local name=$1 env=$folder/$1 lock=$locks/$1.lock
  [[ -f $lock ]] || { echo "error: no consumer $name: there is no $lock" >&2; exit 2; }
  if cmp -s "$lock" "$env/.lock"; then return; fi
  if [[ -e $env && ! -f $env/pyvenv.cfg ]]; then
    echo "error: $env is no virtual environment: move it, or set CONSUMERS= to another folder" >&2
    exit 2
  fi
  echo "making $env: minutes, and gigabytes"
  rm -rf "$env"
  "$python" -m venv "$env"
  "$env/bin/python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
  "$env/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock"
  cp "$lock" "$env/.lock" # last: an environment without it is made anew
}

for name in "${@:-speculators vllm}"; do
  for one in $name; do make_one "$one"; done
done
