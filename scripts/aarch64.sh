#!/usr/bin/env bash
# Builds the wheel for aarch64 here, and tries it in a Debian for arm64 whose programs qemu runs: the README's lines with
# four workers, and tests of the core. Called by `make aarch64`; arguments go to pytest.
#
# It shows that the code runs. It shows nothing about the order of memory, since the emulated processor keeps that of the
# real one (tests/core/test_memory_order.py looks at that), nor about deaths: qemu has no robust futexes, by which a
# worker's end is noticed. Wants root, debootstrap, binutils-aarch64-linux-gnu, and qemu-user of version 8 or later
# (Debian 13): older ones cannot map memory twice. ROOT= is where the Debian is made, or lies from the last time; WHEEL=
# is one to try instead of building it.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$(realpath -m "${ROOT:-build/aarch64-root}")

for tool in debootstrap aarch64-linux-gnu-ld; do
    command -v "$tool" >/dev/null || {
        echo "make aarch64: there is no $tool; apt-get install debootstrap binutils-aarch64-linux-gnu qemu-user-binfmt" >&2
        exit 2
    }
done
[[ $EUID -eq 0 ]] || { echo "make aarch64: only root can change into another root" >&2; exit 2; }
mountpoint -q /proc/sys/fs/binfmt_misc || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
[[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]] ||
    cat /usr/lib/binfmt.d/qemu-aarch64.conf >/proc/sys/fs/binfmt_misc/register

wheels=build/wheels-aarch64
if [[ -z "${WHEEL:-}" ]]; then
    rm -rf "$wheels"
    MULTIVERSO_BUILD_KERNELS=1 MULTIVERSO_BUILD_MACHINE=aarch64 .venv/bin/python -m hatchling build -t wheel -d "$wheels"
    WHEEL=$(echo "$wheels"/*.whl)
fi

if [[ ! -e $root/usr/bin/python3 ]]; then
    debootstrap --arch arm64 --variant=minbase --include=python3,python3-venv,ca-certificates,binutils bookworm "$root"
fi
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
for place in proc sys dev; do
    mountpoint -q "$root/$place" || mount --rbind --make-rslave "/$place" "$root/$place"
done
trap 'umount -l "$root/proc" "$root/sys" "$root/dev"' EXIT
rm -rf "$root/try" && mkdir "$root/try"
mkdir "$root/try/wheels"
cp "$WHEEL" "$root/try/wheels"
cp -r tests benchmarks examples scripts pyproject.toml "$root/try/"
sed -n '/^```python/,/^```$/p' README.md | sed '1d;/^```/,$d' >"$root/try/train.py"
chroot "$root" env -i HOME=/root PATH=/try/venv/bin:/usr/bin:/bin LANG=C.UTF-8 bash -euc '
    cd /try
    python3 -m venv venv
    pip install -q wheels/*.whl
    python -c "from multiverso.compiling import prebuilt; print(\"kernels for\", prebuilt.level())"
    time multiverso run -n 4 train.py
    pip install -q pytest pytest-timeout pytest-xdist hypothesis greenlet numba
    python -m pytest -q -p no:cacheprovider --timeout 600 -k "not killed" "$@" \
        tests/core/test_{table_calls,rounds,keyed,plain_arrays,saving,kernels,nested_calls}.py tests/rules
' try "$@"
