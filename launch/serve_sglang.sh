#!/usr/bin/env bash
# Serve a target with a drafter that deepspec.export has written, under SGLang. The command is read out of the folder's
# config and printed before it runs.
#   launch/serve_sglang.sh [--dry-run] FOLDER [TARGET] [-- options of sglang.launch_server]
# TARGET is the config's own when left out. Needs sglang; --dry-run prints the command and needs nothing.
set -euo pipefail
exec python3 "$(dirname "$0")/../deepspec/export/layouts/serving.py" sglang "$@"
