#!/usr/bin/env bash
# Runs every test and fails if any failed. Called by `make test`, which makes the environments and passes them as BIN
# (.venv/bin) and LEGACY (.venv-legacy); arguments go to each call of pytest.
# Three runs side by side: what needs no framework is seen as it goes, the others are printed whole after it.
set -uo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
beside=()
leave() {
    if [ "${#beside[@]}" -gt 0 ]; then
        kill -INT "${beside[@]}"
        wait "${beside[@]}"
    fi 2>/dev/null
    rm -rf "$scratch"
}
trap leave EXIT
trap 'exit 129' HUP
trap 'exit 143' TERM

# judge NAME STATUS SECONDS: 5 ("no tests collected", as -k may cause) is no failure
summary=()
failed=0
selected="$*"
judge() {
    if [ "$2" -eq 0 ] || { [ "$2" -eq 5 ] && [ -n "$selected" ]; }; then
        summary+=("$1 passed in $3 s")
    else
        summary+=("$1 FAILED ($2)")
        failed=1
    fi
}

# again NAME STATUS PYTEST...: on a machine that is shared, where a process may not be run for seconds, up to three
# tests that failed are run once more, with nothing beside them. What passes then is named as unstable, for somebody to
# look at; what fails twice has failed. Only where RETRY is set, as CI does: a developer sees each failure.
again() {
    local name="$1" status="$2"
    shift 2
    if [ "$status" -ne 1 ] || [ -z "${RETRY:-}" ]; then
        return "$status"
    fi
    local ids
    ids=$("$@" --last-failed --collect-only -q 2>/dev/null | grep '::') || return "$status"
    if [ "$(wc -l <<<"$ids")" -gt 3 ]; then
        return "$status"
    fi
    echo "== once more, with nothing beside them:"
    "$@" --last-failed || return $?
    summary+=("UNSTABLE (failed beside others, passed alone): $(tr '\n' ' ' <<<"$ids")")
}

# What depends on the version of NumPy: what is asked of arrays, dtypes, files and its parts. Everything else, such as
# what the compiled kernels compute once they have their pointers, would only run twice.
on_numpy=(tests/legacy tests/theano)
for name in checkpoints compiling conversions creating kernels partition refusals saving saving_together shared_memory; do
    on_numpy+=("tests/core/test_$name.py")
done

# What imports PyTorch, JAX and Keras into the process of the tests: once, in one process.
frameworks=(tests/torch tests/jax tests/keras tests/test_framework_examples.py)

# Keras writes to the home directory, and the old one takes what it finds there for granted: two that are imported at
# once must not both begin the file of its settings.
mkdir -p "$scratch/home/.keras" "$scratch/theano"
echo '{}' >"$scratch/home/.keras/keras.json"
home=~  # also where nobody has set HOME
theano_flags="device=cpu,floatX=float32,cxx=,mode=FAST_COMPILE,optimizer_excluding=AbstractConvCheck"

# Compiled before any test's deadline begins: on a machine that has never run them it takes minutes. All environments
# share the code.
"$BIN/python" -m multiverso warmup || echo "make test: not all kernels could be compiled beforehand" >&2

SECONDS=0
names=("newest NumPy" "frameworks" "NumPy 1.23.5 and Theano 1.0.5")
with_new=(env PATH="$BIN:$PATH" KERAS_HOME="$scratch/keras"
    "$BIN/python" -m pytest -o cache_dir="$scratch/new" tests "${frameworks[@]/#/--ignore=}" "$@")
with_frameworks=(env PATH="$BIN:$PATH" KERAS_HOME="$scratch/keras"
    "$BIN/python" -m pytest -o cache_dir="$scratch/frameworks" "${frameworks[@]}" "$@")
with_old=(env PATH="$LEGACY/bin:$PATH" HOME="$scratch/home"
    XDG_CACHE_HOME="${XDG_CACHE_HOME:-$home/.cache}" KERAS_BACKEND=theano OMP_NUM_THREADS=1
    THEANO_FLAGS="$theano_flags,base_compiledir=$scratch/theano"
    "$LEGACY/bin/python" -m pytest -o cache_dir="$scratch/old" "${on_numpy[@]}" "$@")

"${with_old[@]}" >"$scratch/old.log" 2>&1 </dev/null &
beside+=($!)
"${with_frameworks[@]}" >"$scratch/frameworks.log" 2>&1 </dev/null &
beside+=($!)

# Tests wait for processes more than they compute. Those of one file share what they start; tests/conftest.py puts the
# longest files first.
echo "== ${names[0]}"
status=0
"${with_new[@]}" -n 4 --dist loadscope --no-loadscope-reorder || status=$?
seconds=$SECONDS

old_status=0 frameworks_status=0
wait "${beside[0]}" || old_status=$?
wait "${beside[1]}" || frameworks_status=$?
beside=()
echo "== ${names[1]} (side by side with the others)"
cat "$scratch/frameworks.log"
echo "== ${names[2]} (side by side with the others)"
cat "$scratch/old.log"
rest_seconds=$SECONDS

again "${names[0]}" "$status" "${with_new[@]}" && status=0 || status=$?
judge "${names[0]}" "$status" "$seconds"
again "${names[1]}" "$frameworks_status" "${with_frameworks[@]}" && status=0 || status=$?
judge "${names[1]}" "$status" "$rest_seconds"
again "${names[2]}" "$old_status" "${with_old[@]}" && status=0 || status=$?
judge "${names[2]}" "$status" "$rest_seconds"

printf 'make test:'
printf ' %s;' "${summary[@]}"
echo
exit "$failed"
