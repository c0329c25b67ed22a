#!/usr/bin/env bash
# requirements/install.sh EXTRA: installs what .venv needs, and says what it fetches meanwhile. EXTRA is `local` for what
# serving needs, as `make run` calls it, or `dev` for everything, as `make setup` does.
#
#   BIN          the virtual environment's bin
#   UV           the program uv, which installs everything but PyTorch in a tenth of pip's time; empty for pip
#   TORCH_INDEX  a pip index for PyTorch; empty for the one of everything else. When not set, this looks by itself: PyTorch
#                as it is installed, or as pip's own settings find it in a folder; else, where there is no GPU, the build
#                without CUDA from CPU_INDEX, if that answers within five seconds; else as everything else.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
cpu_index=${CPU_INDEX:-https://download.pytorch.org/whl/cpu}
extra=${1:?local or dev}
wanted=$(sed -n 's/^torch==//p' constraints.txt)

is_installed() {
  "$bin/python" -c 'import sys
from importlib.metadata import version
sys.exit(version("torch").partition("+")[0] != sys.argv[1])' "$wanted" 2>/dev/null
}

is_in_a_folder() { "$bin/pip" install --quiet --dry-run --no-index --no-deps "torch==$wanted" >/dev/null 2>&1; }

has_gpu() {
  [ "$(uname -s)" = Linux ] || return 0
  local gpus  # all of them first: who writes to a grep that has found the first one ends by a signal
  gpus=$(nvidia-smi --list-gpus 2>/dev/null) && [[ $gpus == *GPU* ]]
}

answers() {
  "$bin/python" -c 'import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()' "$1/torch/" >/dev/null 2>&1
}

fetch_torch() {
  echo "PyTorch $wanted: ${2:-the build of $1}"
  "$bin/pip" install --no-deps --timeout 15 --retries 1 --index-url "$1" "torch==$wanted"
}

if is_installed; then
  :
elif [ -n "${TORCH_INDEX+given}" ]; then
  [ -z "$TORCH_INDEX" ] || fetch_torch "$TORCH_INDEX"
elif is_in_a_folder; then
  [ -z "${UV:-}" ] || "$bin/pip" install --quiet --no-deps "torch==$wanted"  # uv has settings of its own
elif ! has_gpu && answers "$cpu_index"; then
  fetch_torch "$cpu_index" "the build without CUDA, 0.2 GB, since there is no GPU here" ||
    echo "That failed; pip's usual index has PyTorch, too."
fi
is_installed || is_in_a_folder ||
  echo "PyTorch $wanted comes from pip's usual index: where its build is the one with CUDA, that is 2.5 GB more."

case $extra in
  local) parts=(-e '.[local]') others='some 80 of them' ;;
  dev) parts=(-e '.[dev]' -e clients/python) others='some 160 of them, most of them for tests' ;;
  *) echo "install.sh: local or dev, not $extra" >&2; exit 1 ;;
esac
echo "Other packages, $others; the large ones:"
if [ -n "${UV:-}" ]; then
  # Without the list of all that was installed. What goes wrong is printed.
  "$UV" pip install --python "$bin/python" --no-progress --constraint constraints.txt "${parts[@]}" 2>&1 | sed '/^ [-+~] /d'
else
  "$bin/pip" install -c constraints.txt "${parts[@]}" |
    awk '/^ *Downloading .*\.whl \([0-9.]+ [MG]B\)/ {
      gsub(/\.whl|[()]/, "")
      if ($3 >= 10 || $4 == "GB") { print "  " $2 "  " $3 " " $4; fflush() }
    }'
fi
