#!/usr/bin/env bash
# offline_bundle.sh FOLDER [--python 3.12] [NAME==VERSION ...]: wheels and kernels for an x86-64 Linux machine without
# network or compiler, which has torch and transformers and lacks others of this package's needs; FOLDER/install.sh
# installs them there.
# NAME==VERSION adds more (transformers==5.23.0). The versions are those of requirements.lock.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
exec "$python" "$root/scripts/offline_bundle.py" "$@"
