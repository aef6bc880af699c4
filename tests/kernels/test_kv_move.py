"""KV compaction reads all rows before it writes any, for every layout of the cache."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import kv_move
from tree_kernels.kv_move import KvMover, movers_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def make_cache(blocks, heads, block_size, head_dim, dtype, layout):
    """A view `[blocks, heads, block_size, head_dim]`; "interleaved" has K and V side by side."""
    if layout == "heads_last":
        cache = torch.randn(blocks, block_size, heads, head_dim).to(dtype)
        return cache.transpose(1, 2)
    if layout == "interleaved":
        return torch.randn(blocks, heads, block_size, 2 * head_dim).to(dtype)[..., head_dim:]
    if layout == "dims_first":
        return torch.randn(blocks, heads, head_dim, block_size).to(dtype).transpose(2, 3)
    return torch.randn(blocks, heads, block_size, head_dim).to(dtype)


LAYOUTS = ["plain", "heads_last", "interleaved", "dims_first"]


def move_by_kernel(caches, slots, path, places=None):
    kv_move._move_triton(KvMover(caches), slots, path, places)


@st.composite
def moves(draw):
    """Requests with disjoint slots, and paths that may end before the maximum depth."""
    requests, width = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    block_size = draw(st.sampled_from([1, 4, 16]))
    slots = draw(st.permutations(range(requests * width + 3)))[: requests * width]
    length = draw(st.integers(1, width + 2))
    path = torch.full((requests, length), -1, dtype=torch.int32)
    path[:, 0] = 0
    for request in range(requests):
        below = draw(st.sets(st.integers(1, width - 1), max_size=length - 1))
        path[request, 1 : 1 + len(below)] = torch.tensor(sorted(below), dtype=torch.int32)
    blocks = -(-(requests * width + 3) // block_size)
    heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 8, 12]))
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    torch.manual_seed(draw(st.integers(0, 99)))
    cache = make_cache(blocks, heads, block_size, head_dim, dtype, layout)
    return cache, torch.tensor(slots).view(requests, width), path


def moved(cache, slots, path):
    block_size, before, after = cache.shape[2], cache.float(), cache.float().clone()
    for mine, accepted in zip(slots.tolist(), path.tolist(), strict=True):
        for place, node in enumerate(accepted):
            if node > 0:
                come, go = mine[node], mine[place]
                row = before[come // block_size, :, come % block_size]
                after[go // block_size, :, go % block_size] = row
    return after


@CASES
@given(moves())
def test_rows_move_as_if_all_were_read_first(cpu_path, case):
    expected = moved(*case)
    cache, slots, path = case
    KvMover([cache])(slots, path)
    assert torch.equal(case[0].float(), expected)


def test_rows_of_tiles_move_on_a_cpu(cpu_path):
    """Neither the tokens of a block nor the elements of a row are one dimension of a view."""
    rows = torch.arange(4 * 2 * 8 * 12.0).view(4, 2, 8, 12)
    # 4 blocks, 2 heads, 2 groups of 4 tokens, 3 parts of 4 elements; tokens are stored last.
    stored = rows.view(4, 2, 2, 4, 3, 4).permute(0, 1, 4, 2, 5, 3).contiguous()
    tiles = stored.permute(0, 1, 3, 5, 2, 4)
    assert torch.equal(tiles.flatten(4, 5).flatten(2, 3), rows)
    KvMover([tiles])(SLOTS, PATH)
    assert torch.equal(tiles.flatten(4, 5).flatten(2, 3), moved(rows, SLOTS, PATH))


@CASES
@given(moves())
def test_kernel_moves_the_same_rows(interpreter, case):
    expected = moved(*case)
    cache, slots, path = case
    move_by_kernel([cache], slots, path)
    assert torch.equal(case[0].float(), expected)


SLOTS = torch.tensor([[4, 9, 10, 11, 12], [20, 21, 22, 23, 24]])
PATH = torch.tensor([[0, 2, 4, -1], [0, 1, 3, -1]], dtype=torch.int32)


def test_an_accepted_path_moves_to_the_front(cpu_path, interpreter):
    cache = torch.arange(32.0).view(4, 1, 8, 1).repeat(1, 2, 1, 4)
    by_kernel = cache.clone()
    KvMover([cache])(SLOTS, PATH)
    assert cache[1, 1, :, 0].tolist() == [8, 10, 12, 11, 12, 13, 14, 15]
    assert cache[2, 1, :, 0].tolist() == [16, 17, 18, 19, 20, 21, 23, 23]
    move_by_kernel([by_kernel], SLOTS, PATH)
    assert torch.equal(by_kernel, cache)


def test_slots_are_found_by_place(cpu_path, interpreter):
    slots = torch.arange(40).flip(0)
    places = slots.argsort()[SLOTS]
    for move in (lambda caches, *moves: KvMover(caches)(*moves), move_by_kernel):
        caches = torch.randn(4, 3, 8, 5), torch.randn(4, 3, 8, 5)
        expected = [moved(cache, SLOTS, PATH) for cache in caches]
        move(caches, slots, PATH, places)
        assert all(torch.equal(cache, after) for cache, after in zip(caches, expected, strict=True))


def test_rows_move_bit_by_bit(cpu_path, interpreter):
    bits = torch.tensor([1, 2, 0x7FC1, -0x003F, -0x8000], dtype=torch.int16)
    slots = torch.arange(5)[None]
    path = torch.tensor([[0, 2, 3, 4]], dtype=torch.int32)
    for move in (lambda caches, *moves: KvMover(caches)(*moves), move_by_kernel):
        cache = bits.clone().view(torch.bfloat16).view(1, 1, 5, 1)
        move([cache], slots, path)
        assert cache.view(torch.int16).flatten().tolist() == bits[[0, 2, 3, 4, 4]].tolist()


def test_shapes_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match="four or six dimensions"):
        KvMover([torch.zeros(2, 3, 4)])
    with pytest.raises(ValueError, match="same layout"):
        KvMover([torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 6)])
    with pytest.raises(ValueError, match="must be \\[B, N\\]"):
        KvMover([torch.zeros(2, 3, 4, 5)])(SLOTS, PATH[:1])
    with pytest.raises(ValueError, match="places"):
        KvMover([torch.zeros(2, 3, 4, 5)])(SLOTS.flatten(), PATH, SLOTS.flatten())


def engine_caches(layout):
    """Five layers: vLLM stores keys beside values, SGLang stores rows by slot."""
    if layout == "sglang":
        return [torch.randn(32, 3, 4).unsqueeze(2) for _ in range(5)]
    stored = [torch.randn(4, 8, 3, 8).transpose(1, 2) for _ in range(5)]
    return [half for layer in stored for half in layer.split(4, dim=3)]


@pytest.mark.parametrize("layout", ["vllm", "sglang"])
def test_every_cache_of_a_group_moves(cpu_path, interpreter, layout):
    for move in (lambda caches, *moves: KvMover(caches)(*moves), move_by_kernel):
        caches = engine_caches(layout)
        expected = [moved(cache, SLOTS, PATH) for cache in caches]
        move(caches, SLOTS, PATH)
        assert all(torch.equal(cache, after) for cache, after in zip(caches, expected, strict=True))


def test_keys_and_values_with_the_same_layout_have_one_mover(cpu_path):
    for caches, movers in (
        (engine_caches("vllm"), 1),
        (engine_caches("sglang"), 1),
        ([*engine_caches("vllm")[:2], torch.randn(4, 3, 4, 8).transpose(2, 3)], 2),
    ):
        expected = [moved(cache, SLOTS, PATH) for cache in caches]
        found = movers_of(caches)
        assert len(found) == movers
        for move in found:
            move(SLOTS, PATH)
        assert all(torch.equal(cache, after) for cache, after in zip(caches, expected, strict=True))


def test_one_launch_moves_all_caches(monkeypatch):
    grids = []

    class Launched:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **constants: None

    monkeypatch.setattr(kv_move, "_move_kernel", Launched())
    move_by_kernel(engine_caches("sglang"), SLOTS, PATH)
    assert grids == [(2, 3, 5)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("requests", "head_dim"), [(1, 64), (8, 128), (64, 80)])
def test_cuda_agrees_with_the_cpu(requests, head_dim, layout, dtype):
    caches = [make_cache(requests * 6, 8, 16, head_dim, dtype, layout) for _ in range(3)]
    slots = torch.arange(requests)[:, None] * 96 + 10 + torch.arange(81)
    below = torch.stack([torch.randperm(80)[:7].sort().values + 1 for _ in range(requests)])
    path = torch.cat((torch.zeros(requests, 1), below), 1).int()
    on_device = [
        torch.empty_strided(each.shape, each.stride(), dtype=dtype, device="cuda").copy_(each)
        for each in caches
    ]
    KvMover(on_device)(slots.cuda(), path.cuda())
    KvMover(caches)(slots, path)
    for found, each in zip(on_device, caches, strict=True):
        assert torch.equal(found.cpu().float(), each.float())
