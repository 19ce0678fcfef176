#!/usr/bin/env bash
# The kernel tests on ARM, emulated: Debian's arm64 Python under qemu, numpy's and numba's wheels for it.
#
#   tests/core/kernels/arm64.sh FOLDER [-k EXPRESSION …]      as root, with Debian's debootstrap and qemu-user-static
#
# The level is `dotprod`; KNOTCTL_SIMD=generic forces the other one, and CPU=cortex-a72 is a CPU that has no other.
# Half of test_matmul.py takes eight minutes, most of it compiling: for whoever changes kernels, and not in .ci/run.
set -euo pipefail

folder=$(realpath -m "${1:?usage: arm64.sh FOLDER [pytest arguments]}")
shift
root=$folder/root site=$folder/site
if [ ! -e "$folder/python" ]; then
  mkdir -p "$folder"
  debootstrap --foreign --variant=minbase --arch=arm64 --include=python3 bookworm "$root"
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  python3 -m pip install -q --target "$site" --only-binary=:all: --python-version 311 --implementation cp \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
    numpy numba pytest
  # sys.executable is this script, so that a test's own processes are emulated too
  cat >"$folder/python" <<END
#!/bin/sh
export PYTHONHOME=$root/usr PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$site:$(realpath "$(dirname "$0")/../../..")
exec qemu-aarch64-static -cpu \${CPU:-max} -L $root -0 $folder/python $root/usr/bin/python3 "\$@"
END
  chmod +x "$folder/python"
fi
cd "$(dirname "$0")"
export KNOTCTL_CACHE_DIR=$folder/cache
exec "$folder/python" -m pytest -q --noconftest -p no:cacheprovider -c /dev/null --rootdir . \
  test_levels.py test_matmul.py test_layer_kernels.py test_threads.py "$@"
