#!/usr/bin/env bash
# Serve a target with a drafter that deepspec.export has written, under vLLM. The command is read out of the folder's
# config and printed before it runs.
#   launch/serve_vllm.sh [--dry-run] [--adaptive] FOLDER [TARGET] [-- options of vllm serve]
# TARGET is the config's own when left out. Needs vllm; --dry-run prints the command and needs nothing.
set -euo pipefail
exec python3 "$(dirname "$0")/../deepspec/export/layouts/serving.py" vllm "$@"
