#!/usr/bin/env bash
# torch.sh PYTHON: installs torch into PYTHON's environment, in its build without CUDA wherever that can be had: from the
# configured index, or from PyTorch's own. Where neither has it or can be reached, PyPI's, which brings CUDA along.
# Called by the Makefile and scripts/pythons.sh with TORCH and TORCH_INDEX.
set -euo pipefail
install=("$1" -m pip install -qq)
"${install[@]}" "$TORCH+cpu" 2>/dev/null && exit
# No retries: asked is for one thing, and a machine that cannot reach that index would wait for each of its files.
"${install[@]}" --retries 0 --extra-index-url "$TORCH_INDEX" "$TORCH+cpu" 2>/dev/null && exit
echo "make: the build of torch without CUDA cannot be had here; installing PyPI's (some gigabytes)"
"${install[@]}" "$TORCH"
