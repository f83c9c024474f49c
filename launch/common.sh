# Read by the launch scripts. One run folder for all ranks, threads shared out, and the exit code out of status.json.

start_run() { # start_run key=value ...
  local word
  for word in "$@"; do
    case $word in -h | --help) exec python -m deepspec.train --help ;; esac
  done
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + ${processes:-1} - 1) / ${processes:-1}))}
  # Every rank composes this folder for itself, out of the recipe and its target or out of DEEPSPEC_RUN_ID: the same
  # command finds the same run again.
  run_folder=$(python -m deepspec.train --cfg job --resolve "$@" \
    | python -c 'import sys, yaml; print((yaml.safe_load(sys.stdin) or {}).get("paths", {}).get("run", ""))') || exit 2
  started=$(date +%s)
}

finish_run() { # finish_run LAUNCHER_CODE
  python - "$run_folder/status.json" "$1" "$started" <<'PYTHON'
import json
import sys

path, code, started = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
try:
    with open(path, encoding="utf-8") as file:
        status = json.load(file)
except (OSError, ValueError):
    status = {}
if float(status.get("time", 0)) < started:  # nothing of this start: it ended before there was a run
    sys.exit(code)
known = {"finished": 0, "interrupted": 75, "failed": status.get("exit_code", 1)}
sys.exit(known.get(status.get("status"), code or 1))
PYTHON
  exit $?
}
