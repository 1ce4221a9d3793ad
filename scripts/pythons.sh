#!/usr/bin/env bash
# Runs the core, launch and torch tests under every Python from 3.11 that this machine has, each in an environment of
# its own (.venv-python3.12 and so on). Called by `make pythons`, with TORCH, TORCH_INDEX and TESTS; arguments go to pytest.
# VERSIONS="3.12 3.13" chooses some.
set -uo pipefail
cd "$(dirname "$0")/.."

read -ra tests <<<"${TESTS:-tests/core tests/launch tests/torch}"
summary=()
failed=0
seen=" "
shopt -s nullglob
for python in python3.{11..19} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    version=$("$python" -c 'import sys, ensurepip, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    [[ "${version#3.}" -lt 11 || "$seen" == *" $version "* ]] && continue
    [[ -n "${VERSIONS:-}" && " $VERSIONS " != *" $version "* ]] && continue
    seen+="$version "
    place=.venv-python$version
    echo "== Python $version, in $place"
    if [[ ! -e $place/.done || pyproject.toml -nt $place/.done ]]; then
        "$python" -m venv --clear "$place" &&
            bash scripts/torch.sh "$place/bin/python" &&
            "$place/bin/python" -m pip install -qq -e '.[demo,dev,test-frameworks]' && touch "$place/.done" || {
            summary+=("$version cannot be installed")
            failed=1
            continue
        }
    fi
    # compiled before any test's deadline begins
    "$place/bin/python" -m multiverso warmup || echo "make pythons: not all kernels could be compiled beforehand" >&2
    start=$SECONDS
    if PATH="$PWD/$place/bin:$PATH" "$place/bin/python" -m pytest -n 2 --dist loadscope -p no:cacheprovider "${tests[@]}" "$@"; then
        summary+=("$version passed in $((SECONDS - start)) s")
    else
        summary+=("$version FAILED")
        failed=1
    fi
done
[[ "$seen" == " " ]] && { echo "make pythons: no Python from 3.11 with venv and ensurepip was found" >&2; exit 1; }
printf 'make pythons:'
printf ' %s;' "${summary[@]}"
echo
exit "$failed"
