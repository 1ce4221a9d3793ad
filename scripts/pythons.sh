#!/usr/bin/env bash
# Runs the core, launch and torch tests under every Python from 3.11 that this machine has, each in an environment of
# its own (.venv-python3.12 and so on). Called by `make pythons`, with TORCH, TORCH_INDEX and TESTS; arguments go to pytest.
# VERSIONS="3.12 3.13" chooses some. A Python without the GIL (3.14t) gets no frameworks, but for it the rules' tests, too.
#
# With LIGHT=1, as CI calls it: one newer Python than that of .venv, the newest on PATH into which it can be installed, if
# there is any; no frameworks, and of the tests those in which Python itself has most to say. With .venv's version of
# Numba nothing is compiled anew: object code serves all Pythons. With RETRY=1 what failed is run once more by itself, as
# in scripts/test.sh.
set -uo pipefail
cd "$(dirname "$0")/.."

if [[ -n "${LIGHT:-}" ]]; then
    mine=$(.venv/bin/python -c 'import sys; print(sys.version_info[1])')
    numba=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("numba"))')
    found=
    for minor in {19..12}; do
        [[ "$minor" -gt "$mine" ]] && python=$(command -v "python3.$minor") &&
            "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || continue
        found=1
        place=.venv-light3.$minor
        if [[ ! -e $place/.done || pyproject.toml -nt $place/.done ]]; then
            "$python" -m venv --clear "$place" &&
                "$place/bin/python" -m pip install -qq -e . "numba==$numba" \
                    pytest pytest-timeout pytest-xdist hypothesis greenlet pyopenssl && touch "$place/.done" || {
                echo "make pythons: it cannot be installed into Python 3.$minor (no Numba $numba for it, say)" >&2
                continue
            }
        fi
        echo "== Python 3.$minor without frameworks, in $place"
        tests=("$place/bin/python" -m pytest -o cache_dir="$place/cache"
            tests/interrupts tests/core/test_{nested_calls,calls_again,kernels,sessions,refusals,batches}.py
            tests/launch/test_{function,discovery,replacing}.py "$@")
        export PATH="$PWD/$place/bin:$PATH"
        status=0
        "${tests[@]}" -n 2 --dist loadscope || status=$?
        if [[ "$status" -eq 1 && -n "${RETRY:-}" ]]; then
            echo "== once more, with nothing beside them:"
            status=0
            "${tests[@]}" --last-failed --maxfail=1 || status=$?
            [[ "$status" -eq 0 ]] && echo "make pythons: UNSTABLE (failed beside others, passed alone), see above"
        fi
        exit "$status"
    done
    [[ -z "$found" ]] || exit 1
    echo "make pythons: no Python newer than 3.$mine is on PATH, so the tests ran with that one"
    exit 0
fi

read -ra tests <<<"${TESTS:-tests/core tests/launch tests/torch}"
summary=()
failed=0
seen=" "
shopt -s nullglob
for python in python3.{11..19} python3.{13..19}t "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    version=$("$python" -c 'import sys, ensurepip, venv; print("%d.%d%s" % (*sys.version_info[:2], sys.abiflags))' 2>/dev/null) || continue
    minor=${version#3.}
    [[ "${minor%t}" -lt 11 || "$seen" == *" $version "* ]] && continue
    [[ -n "${VERSIONS:-}" && " $VERSIONS " != *" $version "* ]] && continue
    seen+="$version "
    place=.venv-python$version
    echo "== Python $version, in $place"
    install="demo,dev,test-frameworks" run=("${tests[@]}")
    [[ "$version" == *t ]] && install="demo,dev" run=(tests/core tests/rules tests/launch)
    if [[ ! -e $place/.done || pyproject.toml -nt $place/.done ]]; then
        "$python" -m venv --clear "$place" &&
            { [[ "$version" == *t ]] || bash scripts/torch.sh "$place/bin/python"; } &&
            "$place/bin/python" -m pip install -qq -e ".[$install]" && touch "$place/.done" || {
            summary+=("$version cannot be installed")
            failed=1
            continue
        }
    fi
    # compiled before any test's deadline begins
    "$place/bin/python" -m multiverso warmup || echo "make pythons: not all kernels could be compiled beforehand" >&2
    start=$SECONDS
    if PATH="$PWD/$place/bin:$PATH" "$place/bin/python" -m pytest -n 2 --dist loadscope -p no:cacheprovider "${run[@]}" "$@"; then
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
