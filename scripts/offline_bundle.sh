#!/usr/bin/env bash
# offline_bundle.sh FOLDER [--python 3.12] [NAME==VERSION ...]: gather wheels and kernels for an x86-64 Linux machine
# without network or compiler. The machine has torch and transformers; FOLDER/install.sh installs the package's other
# dependencies there. NAME==VERSION adds more packages (transformers==5.23.0). requirements.lock has the versions.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
exec "$python" "$root/scripts/offline_bundle.py" "$@"
