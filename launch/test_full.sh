#!/usr/bin/env bash
# Every test, in parts. A part that passed on this very tree is skipped, so a run that was cut goes on where it was.
set -uo pipefail
cd "$(dirname "$0")/.."

tree=$( (git rev-parse HEAD && git diff HEAD) 2>/dev/null | sha256sum | cut -c1-12)
stamps=.test-full/$tree
mkdir -p "$stamps"
failed=()

part() { # part NAME PYTEST_ARGUMENTS...
  local name=$1 code
  shift
  if [ -e "$stamps/$name" ]; then
    echo "== $name: passed before on this tree"
    return
  fi
  echo "== $name"
  python -m pytest "$@"
  code=$?
  if [ "$code" -eq 0 ] || [ "$code" -eq 5 ]; then # 5: the folder holds no test of this kind
    touch "$stamps/$name"
  else
    failed+=("$name")
  fi
}

launch/consumers.sh || failed+=(consumers)
part fast -n 2 --dist loadfile -m "not slow"
for folder in tests/unit/*/ tests/*/; do
  [ "$folder" = tests/unit/ ] && continue
  [ -n "$(find "$folder" -name 'test_*.py' -print -quit)" ] || continue
  part "slow-$(basename "$folder")" -m slow "$folder"
done

if [ "${#failed[@]}" -gt 0 ]; then
  echo "failed parts: ${failed[*]} (run again: the other parts are not repeated)"
  exit 1
fi
echo "all parts passed"
