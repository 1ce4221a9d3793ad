#!/usr/bin/env bash
# Runs the core, launch and torch tests under every Python from 3.11 that this machine has, each in an environment of
# its own (.venv-python3.12 and so on). Called by `make pythons`, with TORCH, TORCH_INDEX and TESTS; arguments go to pytest.
# VERSIONS="3.12 3.13" chooses some.
#
# With LIGHT=1, as CI calls it: one newer Python than that of .venv, the newest on PATH, if there is any; no frameworks,
# and of the tests those in which Python itself has most to say. With .venv's version of Numba nothing is compiled anew:
# object code serves all Pythons.
set -uo pipefail
cd "$(dirname "$0")/.."

if [[ -n "${LIGHT:-}" ]]; then
    mine=$(.venv/bin/python -c 'import sys; print(sys.version_info[1])')
    for minor in {19..12}; do
        if [[ "$minor" -gt "$mine" ]] && python=$(command -v "python3.$minor") &&
            "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            place=.venv-light3.$minor
            numba=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("numba"))')
            echo "== Python 3.$minor without frameworks, in $place"
            if [[ ! -e $place/.done || pyproject.toml -nt $place/.done ]]; then
                "$python" -m venv --clear "$place" &&
                    "$place/bin/python" -m pip install -qq -e . "numba==$numba" \
                        pytest pytest-timeout pytest-xdist hypothesis greenlet pyopenssl && touch "$place/.done" || exit 1
            fi
            PATH="$PWD/$place/bin:$PATH" exec "$place/bin/python" -m pytest -n 2 --dist loadscope -p no:cacheprovider \
                tests/interrupts tests/core/test_{nested_calls,calls_again,kernels,sessions,refusals,batches}.py \
                tests/launch/test_{function,discovery,replacing}.py "$@"
        fi
    done
    echo "make pythons: no Python newer than 3.$mine is on PATH, so the tests ran with that one"
    exit 0
fi

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
