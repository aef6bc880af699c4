#!/bin/sh
# The first run on a GPU: what works, what fails and how fast it is, in one folder to send home.
#     sh scripts/gpu/first_run.sh OUT
# In the repository's root, with the engines on Python's path: after `pip install '.[vllm,test,bench]'`, or
# as scripts/gpu/README.md says where there is no package index. Takes an hour or two.
#
# A step that fails or takes too long is recorded, and the next one runs. Every step writes its own
# log when it ends, so whatever stops the run leaves what came before. OUT/steps.tsv has a line for
# each: its name, exit status (124: it took too long) and seconds. OUT.tar.gz has all of it.
#
# PYTHON names the interpreter, FIRST_RUN_SECONDS the most that a step may take.
set -u
out=${1:?"usage: sh scripts/gpu/first_run.sh OUT"}
python=${PYTHON:-python}
seconds=${FIRST_RUN_SECONDS:-1500}
mkdir -p "$out" || exit 1
printf 'step\tstatus\tseconds\n' > "$out/steps.tsv"

step() {
    name=$1
    shift
    began=$(date +%s)
    printf '%s ... ' "$name"
    timeout -k 30 "$seconds" "$@" > "$out/$name.log" 2>&1
    status=$?
    printf '%s\t%s\t%s\n' "$name" "$status" "$(($(date +%s) - began))" >> "$out/steps.tsv"
    printf '%s\n' "$status"
    tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
    return "$status"
}

# The tests compare answers in float32, which Triton would multiply in TF32.
pytest() {
    name=$1
    shift
    step "$name" env TRITON_F32_DEFAULT=ieee "$python" -m pytest -m cuda -p no:cacheprovider -v "$@"
}

drafttree() {
    name=$1
    shift
    step "$name" "$python" -m drafttree.cli "$@"
}

has() {
    "$python" -c "import $1" 2> /dev/null
}

several=
has xdist && several="-n 6 --dist worksteal"

bench() {
    name=$1
    method=$2
    shift 2
    drafttree "$name" bench --method "$method" --model "$model" --output "$out/$name.json" "$@"
}

same() {
    (
        export TRITON_F32_DEFAULT=ieee
        bench "$@" --dtype float32
    )
}

step versions sh -c "nvidia-smi; uname -a; git rev-parse HEAD; '$python' -VV; '$python' -m pip list"
drafttree doctor doctor
pytest kernels $several tests/kernels
step kernel-times "$python" scripts/benchmarks/bench_kernels.py --output "$out/kernels.csv"
if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" scripts/benchmarks/bench_kernels.py --quick
    done
fi

drafttree model model smollm2-135m --pinned
model=$(tail -n 1 "$out/model.log")
if has vllm; then
    step attention-routes "$python" scripts/benchmarks/bench_attention_routes.py \
        --output "$out/attention_routes.toml"
    has flashinfer || export VLLM_USE_FLASHINFER_SAMPLER=0
    pytest vllm-eager $several tests/engines/test_vllm_cuda.py -k "greedy and True"
    pytest vllm-graphs $several tests/engines/test_vllm_cuda.py -k "greedy and False"
    pytest vllm-others $several tests/engines/test_vllm_cuda.py -k "not greedy and not timed"
    pytest vllm-times tests/engines/test_vllm_cuda.py -k timed
    for runner in v1 v2; do
        for nodes in 15 80; do
            same "vllm-$runner-same-$nodes" token-recycling --runner "$runner" --option nodes=$nodes
        done
        bench "vllm-$runner-speed" token-recycling --dtype bfloat16 --runner "$runner" --repeat 3
    done
    bench vllm-ngram ngram --dtype bfloat16 --repeat 3
    has arctic_inference && bench vllm-suffix suffix --dtype bfloat16 --repeat 3
    step vllm-step-times "$python" scripts/benchmarks/bench_step.py "$model" --dtype bfloat16 \
        --nodes 80 --output "$out/step.json"
    for method in none ngram token-recycling; do
        step "vllm-profile-$method" "$python" scripts/gpu/profile_steps.py "$model" "$method"
    done
fi
if has sglang; then
    pytest sglang-eager tests/engines/test_sglang_cuda.py -k eager
    pytest sglang-graphs tests/engines/test_sglang_cuda.py -k "plain_decoding and graphs"
    pytest sglang-sizes tests/engines/test_sglang_cuda.py -k several_sizes
    pytest sglang-models tests/engines/test_sglang_cuda.py -k "rsd or lyanna"
    for nodes in 15 80; do
        same "sglang-same-$nodes" token-recycling --engine sglang --option nodes=$nodes
    done
    bench sglang-speed token-recycling --engine sglang --dtype bfloat16 --repeat 3
fi
cat "$out/steps.tsv"
echo "all of it: $out.tar.gz"
