#!/usr/bin/env bash
# torch.sh PYTHON: installs torch into PYTHON's environment, in its build without CUDA wherever that can be had: from the
# configured index, or from PyTorch's own. Where that cannot be reached either, pip says so and takes PyPI's, which
# brings CUDA along (several gigabytes). Called by the Makefile with TORCH and TORCH_INDEX.
set -euo pipefail
install=("$1" -m pip install -qq)
"${install[@]}" "$TORCH+cpu" 2>/dev/null || "${install[@]}" --extra-index-url "$TORCH_INDEX" "$TORCH"
