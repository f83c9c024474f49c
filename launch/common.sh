# Read by the launch scripts. One run folder for all ranks, threads shared out, and the exit code out of status.json.

start_run() { # start_run key=value ...
  # Ranks compose for themselves: what they have to agree on comes from here.
  export DEEPSPEC_RUN_ID=${DEEPSPEC_RUN_ID:-$(date +%Y%m%d-%H%M%S)}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + ${processes:-1} - 1) / ${processes:-1}))}
  run_folder=${DEEPSPEC_RUNS:-runs}/$DEEPSPEC_RUN_ID
  local word
  for word in "$@"; do
    case $word in
      paths.run=*) run_folder=${word#paths.run=} ;;
      paths.runs=*) run_folder=${word#paths.runs=}/$DEEPSPEC_RUN_ID ;;
    esac
  done
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
