#!/bin/sh
# Put an engine's pieces together, on the machine that they were carried to, and register the plugins:
#     sh scripts/gpu/unpack.sh .gpu/vllm
# Then `PYTHONPATH=.gpu/vllm/site python` finds the engine, and the package as it is in this folder.
set -eu
cat "$1"/*.tar.xz.* | tar -xJ -C "$1"
site=$1/site
PYTHONPATH=$site python -m pip install --quiet --no-deps --no-build-isolation --target "$site" --upgrade .
# The code is read from here, so that the next change needs no second unpacking.
for package in drafttree lyanna_plugin recycle_plugin rsd_plugin; do
    rm -r "$site/$package"
    ln -s "$PWD/$package" "$site/$package"
done
rm -r "$site/tree_kernels"
ln -s "$PWD/kernels/tree_kernels" "$site/tree_kernels"
