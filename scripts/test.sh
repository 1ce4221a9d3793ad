#!/usr/bin/env bash
# Runs every test, once per environment, and fails if any failed. Called by `make test`, which makes the environments
# and passes them as BIN (.venv/bin) and LEGACY (.venv-legacy); arguments go to both calls of pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# run NAME COMMAND...: 5 ("no tests collected", as -k may cause) is no failure
summary=()
failed=0
run() {
    local name=$1 start=$SECONDS status=0
    shift
    echo "== $name"
    "$@" || status=$?
    if [ "$status" -eq 0 ] || { [ "$status" -eq 5 ] && [ -n "${selected:-}" ]; }; then
        summary+=("$name passed in $((SECONDS - start)) s")
    else
        summary+=("$name FAILED ($status)")
        failed=1
    fi
}
selected="$*"

# Tests wait for processes more than they compute; tests of one file share what they start.
together=(-n 2 --dist loadscope)

# Keras writes to the home directory, and the old one takes what it finds there for granted: two that are imported at
# once must not both begin the file of its settings.
mkdir -p "$scratch/home/.keras" "$scratch/theano"
echo '{}' >"$scratch/home/.keras/keras.json"
theano_flags="device=cpu,floatX=float32,cxx=,mode=FAST_COMPILE,optimizer_excluding=AbstractConvCheck"

run "core, NumPy 1.23.5 and Theano 1.0.5" env PATH="$LEGACY/bin:$PATH" HOME="$scratch/home" \
    XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}" KERAS_BACKEND=theano OMP_NUM_THREADS=1 \
    THEANO_FLAGS="$theano_flags,base_compiledir=$scratch/theano" \
    "$LEGACY/bin/python" -m pytest "${together[@]}" -p no:cacheprovider tests/core tests/legacy tests/theano "$@"
run "all, newest NumPy and frameworks" env PATH="$BIN:$PATH" KERAS_HOME="$scratch/keras" \
    "$BIN/python" -m pytest "${together[@]}" tests "$@"

printf 'make test:'
printf ' %s;' "${summary[@]}"
echo
exit "$failed"
