#!/bin/sh
# Join pieces, on the machine that they were carried to:
#     sh scripts/gpu/unpack.sh .gpu/vllm
# makes .gpu/vllm/site, a folder for PYTHONPATH with the engine and this checkout's packages. The
# pieces of a model are joined into wheels.
set -eu
for first in "$1"/*.00; do
    whole=${first%.00}
    cat "$whole".[0-9][0-9] > "$whole"
    case $whole in *.tar.xz) python -m tarfile -e "$whole" "$1" && rm "$whole" ;; esac
done
site=$1/site
test -d "$site" || exit 0
# This registers the plugins.
PYTHONPATH=$site python -m pip install --quiet --no-deps --no-build-isolation --upgrade --target "$site" .
# Link the packages to this checkout, so that changes need no second unpacking.
for package in drafttree lyanna_plugin recycle_plugin rsd_plugin kernels/tree_kernels; do
    rm -r "$site/${package##*/}"
    ln -s "$PWD/$package" "$site/${package##*/}"
done
