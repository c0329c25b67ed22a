#!/usr/bin/env bash
# requirements/install.sh EXTRA: installs what .venv needs, and says what it fetches meanwhile. EXTRA is `local` for what
# serving needs, as `make run` calls it, or `dev` for everything, as `make setup` does. Each package is known by its version
# and hash from the lock file of that name, so that nothing is resolved; `torch.txt` is PyTorch's.
#
#   BIN          the virtual environment's bin
#   UV           the program uv, which installs locked packages in a tenth of pip's time; empty for pip
#   TORCH_INDEX  a pip index for PyTorch; empty for the one of everything else. When not set, this looks by itself: PyTorch
#                as it is installed, or as pip's own settings find it in a folder; else, where there is no GPU, the build
#                without CUDA from CPU_INDEX, if that answers within five seconds; else as everything else.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
bin=${BIN:-.venv/bin}
cpu_index=${CPU_INDEX:-https://download.pytorch.org/whl/cpu}
extra=${1:?local or dev}
wanted=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/torch.txt)
case $extra in
  local) ours=(-e .) others='some 80 of them' ;;
  dev) ours=(-e . -e clients/python) others='some 160 of them, most of them for tests' ;;
  *) echo "install.sh: local or dev, not $extra" >&2; exit 1 ;;
esac

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

install() {
  if [ -n "${UV:-}" ]; then
    # Without the list of all that was installed. What goes wrong is printed.
    "$UV" pip install --python "$bin/python" --no-progress "$@" 2>&1 | sed '/^ [-+~] /d'
  else
    "$bin/pip" install "$@" | awk '/^ *Downloading .*\.whl \([0-9.]+ [MG]B\)/ {
      gsub(/\.whl|[()]/, "")
      if ($3 >= 10 || $4 == "GB") { print "  " $2 "  " $3 " " $4; fflush() }
    }'
  fi
}

install_locked() { install --require-hashes --no-deps -r "requirements/$1.txt"; }

fetch_torch() {
  echo "PyTorch $wanted: ${2:-the build of $1}"
  "$bin/pip" install --quiet --no-deps --timeout 15 --retries 1 --index-url "$1" "torch==$wanted"
}

fetch_torch_as_everything_else() {
  echo "PyTorch $wanted comes from pip's usual index: where its build is the one with CUDA, that is 2.5 GB more."
  install_locked torch
}

if is_installed; then
  :
elif [ -n "${TORCH_INDEX:-}" ]; then
  fetch_torch "$TORCH_INDEX"
elif is_in_a_folder; then
  "$bin/pip" install --quiet --no-deps "torch==$wanted"
elif [ -n "${TORCH_INDEX+given}" ] || has_gpu || ! answers "$cpu_index"; then
  fetch_torch_as_everything_else
else
  fetch_torch "$cpu_index" "the build without CUDA, 0.2 GB, since there is no GPU here" || {
    echo "That failed; pip's usual index has PyTorch, too."
    fetch_torch_as_everything_else
  }
fi

echo "Other packages, $others; the large ones:"
install_locked "$extra"
# A build of PyTorch from another index or a folder may need libraries that are locked beside PyTorch alone, such as NVIDIA's.
UV='' install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$wanted"
# Its build needs setuptools, which is among the packages. With --no-deps nothing more is looked for.
install --quiet --no-deps --no-build-isolation "${ours[@]}"
