"""Tree attention on a CPU, in C++ and in PyTorch, compared with the definition in float64."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import _build, _native
from tree_kernels.attention_variant import PLAIN, AttentionVariant
from tree_kernels.cpu_attention import (
    DecodeOrder,
    TreeAttention,
    tiles_fit,
    untiled,
)
from tree_kernels.mask import tree_mask
from tree_kernels.paged_trees import PagedTrees

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@st.composite
def steps(draw, tiles=False):
    """Trees of different sizes between rows of other requests, with scattered KV blocks.

    The rows of the first nodes of a tree may be missing.
    """
    torch.manual_seed(draw(st.integers(0, 99)))
    if tiles:
        dtype, (sizes, blocks) = torch.bfloat16, ((32, 64, 96, 128), (32, 64, 128))
        groups = [(1, 1), (3, 3), (2, 7), (1, 16), (1, 32)]
    else:
        dtype = draw(st.sampled_from(list(TOLERANCE)))
        sizes, blocks = (32, 64, 80, 112), (1, 16, 32, 128)
        groups = [(1, 1), (3, 3), (2, 7), (1, 16)]
    kv_heads, group = draw(st.sampled_from(groups))
    size, block_size = draw(st.sampled_from(sizes)), draw(st.sampled_from(blocks))
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    lengths = [n + draw(st.integers(0, 300)) for n in sizes]
    gaps = [draw(st.integers(0, 2)) for _ in sizes]
    firsts = None
    if draw(st.booleans()):
        firsts = [draw(st.integers(0, n - (at == 0))) for at, n in enumerate(sizes)]
    starts, token = [], 0
    for n, gap, first in zip(sizes, gaps, firsts or [0] * len(sizes), strict=True):
        starts.append(token + gap - first)
        token += gap + n - first
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2).int()
    blocks = torch.zeros(len(sizes), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        blocks[row, :count] = order[sum(counts[:row]) :][:count]
    parents = torch.full((len(sizes), max(sizes)), -1, dtype=torch.int32)
    for row, n in enumerate(sizes):
        steps_up = torch.randint(1, 4, (n - 1,))
        parents[row, 1:n] = (torch.arange(1, n) - steps_up).clamp(min=0).cummax(0).values
    trees = PagedTrees(
        starts=torch.tensor(starts),
        tree_sizes=torch.tensor(sizes),
        lengths=torch.tensor(lengths),
        blocks=blocks,
        masks=tree_mask(parents, torch.tensor(sizes, dtype=torch.int32)),
        first_nodes=None if firsts is None else torch.tensor(firsts),
    )
    # Unused slots have arbitrary values.
    cache = torch.randn(len(order), kv_heads, 2 * block_size * size).to(dtype)
    query = (3 * torch.randn(token + 1, kv_heads * group, size)).to(dtype)
    return trees, query, cache, kv_heads, size, block_size


def views(cache, size, block_size):
    halves = cache.view(*cache.shape[:2], 2, -1)
    keys = halves[:, :, 0].unflatten(-1, (size, block_size))
    return keys, halves[:, :, 1].unflatten(-1, (block_size, size))


def tiled(keys, values):
    """The same keys and values, stored as AMX tiles."""
    return (
        keys.unflatten(2, (-1, 2)).unflatten(4, (-1, 16)).permute(0, 1, 4, 2, 5, 3).contiguous(),
        values.unflatten(2, (-1, 2)).unflatten(4, (-1, 16)).permute(0, 1, 4, 2, 5, 3).contiguous(),
    )


def first_nodes(trees):
    return [0] * len(trees.starts) if trees.first_nodes is None else trees.first_nodes.tolist()


def defined(trees, query, keys, values, scale, before, variant=PLAIN):
    """The definition, row by row: the softmax over the tokens that a node attends to."""
    output = before.clone()
    block_size, group = keys.shape[3], query.shape[1] // keys.shape[1]
    for row in range(len(trees.starts)):
        start, tree_size, length = (
            int(x[row]) for x in (trees.starts, trees.tree_sizes, trees.lengths)
        )
        slots = torch.arange(length)
        block, offset = trees.blocks[row, slots // block_size].long(), slots % block_size
        k = keys[block, :, :, offset].double().repeat_interleave(group, 1)
        v = values[block, :, offset].double().repeat_interleave(group, 1)
        for node in range(first_nodes(trees)[row], tree_size):
            sees = torch.ones(length, dtype=torch.bool)
            sees[length - tree_size :] = trees.masks[row, node, :tree_size]
            # What a node sees, in order of position, are the context and its ancestors.
            seen = sees.nonzero()[:, 0][-(variant.window or length) :]
            scores = torch.einsum("hd,thd->ht", query[start + node].double(), k[seen]) * scale
            if cap := variant.soft_cap:
                scores = cap * (scores / cap).tanh()
            if variant.sinks is not None:
                scores = torch.cat((scores, variant.sinks.double()[:, None]), 1)
            weights = scores.softmax(1)[:, : len(seen)]
            attended = torch.einsum("ht,thd->hd", weights, v[seen])
            output[start + node] = attended.to(output.dtype)
    return output


@CASES
@given(step=steps())
def test_nodes_attend_to_the_context_and_their_ancestors(cpu_path, step):
    trees, query, cache, kv_heads, size, block_size = step
    keys, values = views(cache, size, block_size)
    attend = TreeAttention(query.shape[1], kv_heads, size, block_size, query.dtype)
    assert attend.is_cpp == (cpu_path != "reference")
    before = torch.randn_like(query)
    output = before.clone()
    attend(trees, query, keys, values, output, 0.3)
    expected = defined(trees, query, keys, values, 0.3, before)
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    rows = torch.zeros(len(query), dtype=torch.bool)
    for start, first, tree_size in zip(
        trees.starts, first_nodes(trees), trees.tree_sizes, strict=True
    ):
        rows[start + first : start + tree_size] = True
    assert torch.equal(output[~rows], before[~rows])


@CASES
@given(
    step=steps(),
    window=st.sampled_from([0, 3, 17, 100, 1000]),
    soft_cap=st.sampled_from([0.0, 5.0, 50.0]),
    has_sinks=st.booleans(),
)
def test_windows_soft_caps_and_sinks(cpu_path, step, window, soft_cap, has_sinks):
    trees, query, cache, kv_heads, size, block_size = step
    keys, values = views(cache, size, block_size)
    sinks = 5 * torch.randn(query.shape[1]).to(query.dtype) if has_sinks else None
    variant = AttentionVariant(window, soft_cap, sinks)
    attend = TreeAttention(query.shape[1], kv_heads, size, block_size, query.dtype)
    before = torch.randn_like(query)
    output = before.clone()
    expected = defined(trees, query, keys, values, 0.3, before, variant)
    if window and cpu_path != "reference":
        # Blocks before the window of the root may be another request's by now.
        roots = (trees.lengths - trees.tree_sizes).tolist()
        unused = min({*range(len(keys))} - {*trees.blocks.flatten().tolist()})
        cache[unused] = torch.nan
        for row, root in enumerate(roots):
            trees.blocks[row, : max(root - window + 1, 0) // block_size] = unused
    attend(trees, query, keys, values, output, 0.3, variant)
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@CASES
@given(
    step=steps(),
    order=st.sampled_from([None, DecodeOrder(32, 32, 64), DecodeOrder(16, 64, 4096)]),
    threads=st.integers(1, 5),
    window=st.sampled_from([0, 100]),
    has_sinks=st.booleans(),
)
def test_keys_are_summed_in_shares_and_tiles(cpu_path, step, order, threads, window, has_sinks):
    trees, query, cache, kv_heads, size, block_size = step
    keys, values = views(cache, size, block_size)
    sinks = 5 * torch.randn(query.shape[1]).to(query.dtype) if has_sinks else None
    variant = AttentionVariant(window, sinks=sinks)
    if order is not None:
        order = replace(order, window=window)
        # Another request shares the threads.
        lengths = torch.cat((torch.tensor([150]), trees.lengths - trees.tree_sizes + 1))
        places = torch.arange(1, len(lengths))
        trees = replace(trees, requests=places, step_lengths=lengths)
    attend = TreeAttention(query.shape[1], kv_heads, size, block_size, query.dtype, order=order)
    before = torch.randn_like(query)
    output = before.clone()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        attend(trees, query, keys, values, output, 0.3, variant)
    finally:
        torch.set_num_threads(threads_before)
    expected = defined(trees, query, keys, values, 0.3, before, variant)
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="the CPU has no AMX")
@CASES
@given(
    step=steps(tiles=True),
    order=st.sampled_from([None, DecodeOrder(32, 32, 64), DecodeOrder(32, 128, 4096)]),
    window=st.sampled_from([0, 3, 100]),
    soft_cap=st.sampled_from([0.0, 5.0]),
    has_sinks=st.booleans(),
)
def test_amx_tiles(cpu_path, step, order, window, soft_cap, has_sinks):
    """Weights are rounded to bfloat16 before they are multiplied, as the engine rounds them."""
    trees, query, cache, kv_heads, size, block_size = step
    keys, values = views(cache, size, block_size)
    as_tiles = tiled(keys, values)
    for stored, restored in zip((keys, values), untiled(*as_tiles), strict=True):
        assert torch.equal(stored, restored)
    sinks = 5 * torch.randn(query.shape[1]).to(query.dtype) if has_sinks else None
    variant = AttentionVariant(window, soft_cap, sinks)
    layer = query.shape[1], kv_heads, size, block_size, query.dtype
    if order is not None:
        order = replace(order, window=window)
        lengths = trees.lengths - trees.tree_sizes + 1
        trees = replace(trees, requests=torch.arange(len(lengths)), step_lengths=lengths)
    attend = TreeAttention(*layer, order=order, tiles=True)
    assert attend.is_cpp == tiles_fit(*layer) == (cpu_path != "reference")
    before = torch.randn_like(query)
    output = before.clone()
    attend(trees, query, *as_tiles, output, 0.3, variant)
    expected = defined(trees, query, keys, values, 0.3, before, variant)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=3e-2)


def test_tiles_need_whole_rows():
    assert not tiles_fit(4, 2, 64, 128, torch.float32)
    assert not tiles_fit(4, 2, 80, 128, torch.bfloat16)
    assert not tiles_fit(4, 2, 64, 16, torch.bfloat16)
    assert not tiles_fit(40, 2, 64, 128, torch.bfloat16)


def test_trees_without_a_mask_have_one_node(cpu_path):
    size, sizes, lengths = 32, torch.tensor([3, 1, 1]), torch.tensor([40, 7, 33])
    parents = torch.tensor([[-1, 0, 0], [-1, -1, -1], [-1, -1, -1]]).int()
    masks = tree_mask(parents, sizes.int())
    trees = PagedTrees(
        starts=torch.tensor([0, 3, 4]),
        tree_sizes=sizes,
        lengths=lengths,
        blocks=torch.arange(9).int().view(3, 3),
        masks=masks,
    )
    keys, values = views(torch.randn(9, 2, 2 * 16 * size), size, 16)
    query = torch.randn(5, 4, size)
    attend = TreeAttention(4, 2, size, 16, torch.float32)
    first, second = torch.empty_like(query), torch.empty_like(query)
    attend(trees, query, keys, values, first, 0.3)
    attend(replace(trees, masks=masks[:1]), query, keys, values, second, 0.3)
    assert torch.equal(first, second)


def test_scores_may_be_large_and_far_apart():
    size, tree_size, length = 64, 3, 300
    cache = torch.randn(3, 1, 2 * 128 * size) * 40
    keys, values = views(cache, size, 128)
    trees = PagedTrees(
        torch.tensor([0]),
        torch.tensor([tree_size]),
        torch.tensor([length]),
        torch.tensor([[2, 0, 1]], dtype=torch.int32),
        torch.eye(tree_size, dtype=torch.bool)[None],
    )
    query, output = torch.randn(tree_size, 2, size) * 40, torch.zeros(tree_size, 2, size)
    TreeAttention(2, 1, size, 128, torch.float32)(trees, query, keys, values, output, 1.0)
    expected = defined(trees, query, keys, values, 1.0, output)
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)


def test_a_head_size_that_is_no_multiple_of_16_runs_the_reference():
    assert not TreeAttention(2, 1, 40, 128, torch.float32).is_cpp


def test_shapes_that_do_not_fit_are_errors():
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="blocks must be"):
        PagedTrees(one, one, one, one[None], torch.ones(1, 1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="requests and step_lengths must be given together"):
        PagedTrees(
            one, one, one, one[None].int(), torch.ones(1, 1, 1, dtype=torch.bool), requests=one
        )
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2"):
        TreeAttention(5, 2, 64, 128, torch.float32)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    return source


def test_a_parallel_loop_has_the_number_of_threads_that_is_given(source):
    source.write_text(
        """
        #include <set>
        extern "C" int omp_get_thread_num();
        extern "C" long threads_of(long threads) {
          std::set<int> seen;
        #pragma omp parallel num_threads(threads)
        #pragma omp critical
          seen.insert(omp_get_thread_num());
          return seen.size();
        }
        """
    )
    library = _native.load_native(source)
    assert [library.threads_of(threads) for threads in (1, 3)] == [1, 3]


def test_a_kernel_is_compiled_once_and_cached(source, tmp_path, monkeypatch):
    assert _native.load_native(source).one() == 1
    kept = list((tmp_path / "cache" / "kernels").iterdir())
    assert [path.suffix for path in kept] == [".so"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    _native.load_native.cache_clear()
    calls = []
    run = _build.run
    monkeypatch.setattr(_build, "run", lambda *command: calls.append(command) or run(*command))
    assert _native.load_native(source).one() == 1
    assert all("--version" in command for command in calls)


def test_without_a_compiler_the_reference_runs(source, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert _native.load_native(source) is None
    assert "No C++ compiler" in caplog.text


def test_a_kernel_that_does_not_compile_is_logged_and_the_reference_runs(source, tmp_path, caplog):
    source.write_text("nonsense")
    assert _native.load_native(source) is None
    assert "nonsense" in caplog.text
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_a_library_without_its_openmp_is_logged_and_not_kept(source, tmp_path, caplog):
    source.write_text('extern "C" void __kmpc_barrier(); extern "C" void f() { __kmpc_barrier(); }')
    assert _native.load_native(source) is None
    assert "use g++" in caplog.text
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_a_damaged_library_in_the_cache_is_compiled_anew(source, tmp_path):
    assert _native.load_native(source).one() == 1
    _native.load_native.cache_clear()
    (kept,) = (tmp_path / "cache" / "kernels").iterdir()
    kept.unlink()  # What is loaded stays whole.
    kept.write_bytes(b"")
    assert _native.load_native(source).one() == 1
    assert kept.stat().st_size > 0


def test_a_damaged_library_of_the_wheel_is_compiled_anew(source, tmp_path, caplog):
    (tmp_path / _build.SHIPPED).mkdir()
    for instructions in _build.INSTRUCTION_SETS:
        (tmp_path / _build.SHIPPED / _build.shipped_name(source, instructions)).write_bytes(b"")
    assert _native.load_native(source).one() == 1
    assert (_build.shipped_library(source) is None) or "is compiled anew" in caplog.text


def test_a_compiler_may_have_arguments(source, monkeypatch):
    source.write_text('extern "C" int one() { return ONE; }')
    monkeypatch.setenv("CXX", "g++ -DONE='1 + 0'")
    assert _native.load_native(source).one() == 1
    _native.load_native.cache_clear()
    monkeypatch.setenv("CXX", "g++ -DONE=2")
    assert _native.load_native(source).one() == 2


def test_without_a_writable_cache_kernels_are_compiled_elsewhere(
    source, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path / "file"))
    assert _native.load_native(source).one() == 1
    assert "cannot keep compiled kernels" in caplog.text
    assert not [path for path in (tmp_path / "temporary").iterdir() if "one" in path.name]


def test_a_cache_that_may_not_be_read_is_not_used(source, monkeypatch, caplog):
    """As a cache in another user's home; the tests themselves may run as root."""

    def refuse(*_):
        raise PermissionError("another user's")

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(_native, "make_private", refuse)
    monkeypatch.setattr(_build, "shipped_library", lambda source: None)
    assert _native.load_native(source).one() == 1
    assert "cannot keep compiled kernels" in caplog.text


def test_this_machine_has_a_compiler():
    """Without a compiler the C++ cases above fail; they do not fall back to PyTorch."""
    assert shutil.which("g++")
