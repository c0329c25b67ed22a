#!/usr/bin/env bash
# tests/lane.sh FOLDER PYTEST...: runs pytest for one lane of `make test`, and keeps its exit status in FOLDER, the lane's
# cache. A lane may be left without tests by options such as `-k`, which is no failure.
#
# With `--last-failed-no-failures none`, only tests that failed in the run before run: a lane that passed has nothing to do,
# and one without tests fails. A lane that ended by anything but tests that failed, such as a signal, fails again, since
# pytest has not noted all tests that would have to run.
set -uo pipefail
folder=$1
shift

if [[ " $* " == *" --last-failed-no-failures none "* ]]; then
  before=$(cat "$folder/status" 2>/dev/null)
  case $before in
    0) exit 0 ;;
    1) exec "$@" ;;
    *) echo "$folder: the run before ended by ${before:-no status}, so all tests have to run" >&2; exit 1 ;;
  esac
fi

rm -f "$folder/status"
"$@"
status=$?
[ "$status" != 5 ] || status=0
mkdir -p "$folder"
echo "$status" >"$folder/status"
exit "$status"
