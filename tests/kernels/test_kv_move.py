"""KV rows move as if all reads came before all writes, whatever the cache's layout."""

import pytest
import torch
from cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from tree_kernels import kv_move
from tree_kernels.kv_move import KvMover

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def make_cache(blocks, heads, block_size, head_dim, dtype, layout):
    """Views of [blocks, heads, block_size, head_dim]; "interleaved" has K and V side by side."""
    if layout == "heads_last":
        cache = torch.randn(blocks, block_size, heads, head_dim).to(dtype)
        return cache.transpose(1, 2)
    if layout == "interleaved":
        return torch.randn(blocks, heads, block_size, 2 * head_dim).to(dtype)[..., head_dim:]
    if layout == "dims_first":
        return torch.randn(blocks, heads, head_dim, block_size).to(dtype).transpose(2, 3)
    return torch.randn(blocks, heads, block_size, head_dim).to(dtype)


LAYOUTS = ["plain", "heads_last", "interleaved", "dims_first"]


def move_by_kernel(caches, src, dst):
    addresses = torch.tensor([cache.data_ptr() for cache in caches])
    kv_move._move_triton(caches[0], addresses, src, dst)


@st.composite
def moves(draw):
    """Every request owns some slots; paths run within them, overlap and have holes."""
    requests, owned = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    block_size = draw(st.sampled_from([1, 4, 16]))
    slots = draw(st.permutations(range(requests * owned + 3)))
    steps = draw(st.integers(1, owned))
    src, dst = [], []
    for request in range(requests):
        mine = slots[request * owned : (request + 1) * owned]
        src.append([draw(st.sampled_from([*mine, -1])) for _ in range(steps)])
        to = draw(st.permutations(mine))[:steps]
        dst.append([slot if draw(st.integers(0, 4)) else -1 for slot in to])
    blocks = -(-(requests * owned + 3) // block_size)
    heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 8, 12]))
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    torch.manual_seed(draw(st.integers(0, 99)))
    cache = make_cache(blocks, heads, block_size, head_dim, dtype, layout)
    return cache, torch.tensor(src), torch.tensor(dst)


def moved(cache, src, dst):
    block_size, before, after = cache.shape[2], cache.float(), cache.float().clone()
    pairs = zip(src.flatten().tolist(), dst.flatten().tolist(), strict=True)
    for come, go in pairs:
        if come >= 0 and go >= 0:
            row = before[come // block_size, :, come % block_size]
            after[go // block_size, :, go % block_size] = row
    return after


@CASES
@given(moves())
def test_rows_move_as_if_all_were_read_first(cpu_path, case):
    expected = moved(*case)
    cache, src, dst = case
    KvMover([cache])(src, dst)
    assert torch.equal(case[0].float(), expected)


@CASES
@given(moves())
def test_kernel_moves_the_same_rows(interpreter, case):
    expected = moved(*case)
    cache, src, dst = case
    move_by_kernel([cache], src, dst)
    assert torch.equal(case[0].float(), expected)


def test_an_accepted_path_moves_to_the_front(cpu_path, interpreter):
    cache = torch.arange(24.0).view(3, 1, 8, 1).repeat(1, 2, 1, 4)
    src, dst = torch.tensor([[3, 10, 11, -1]]), torch.tensor([[1, 2, 3, 4]])
    by_kernel = cache.clone()
    KvMover([cache])(src, dst)
    assert cache[0, 1, :, 0].tolist() == [0, 3, 10, 11, 4, 5, 6, 7]
    move_by_kernel([by_kernel], src, dst)
    assert torch.equal(by_kernel, cache)


def test_rows_move_bit_by_bit(cpu_path, interpreter):
    bits = torch.tensor([0x7FC1, -0x003F, -0x8000, 1], dtype=torch.int16)
    for move in (lambda caches, *slots: KvMover(caches)(*slots), move_by_kernel):
        cache = bits.clone().view(torch.bfloat16).view(1, 1, 4, 1)
        move([cache], torch.tensor([[0, 1]]), torch.tensor([[2, 3]]))
        assert cache.view(torch.int16).flatten().tolist() == bits[[0, 1, 0, 1]].tolist()


def test_shapes_that_do_not_fit_are_errors():
    slots = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="four dimensions"):
        KvMover([torch.zeros(2, 3, 4)])
    with pytest.raises(ValueError, match="alike"):
        KvMover([torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 6)])
    with pytest.raises(ValueError, match="both be"):
        KvMover([torch.zeros(2, 3, 4, 5)])(slots, slots[:1])


def engine_caches(layout):
    """Five layers, as vLLM lays them out, keys beside values, and as SGLang does, slot by slot."""
    if layout == "sglang":
        return [torch.randn(16, 3, 4).unsqueeze(2) for _ in range(5)]
    stored = [torch.randn(2, 8, 3, 8).transpose(1, 2) for _ in range(5)]
    return [half for layer in stored for half in layer.split(4, dim=3)]


@pytest.mark.parametrize("layout", ["vllm", "sglang"])
def test_every_cache_of_a_group_moves(cpu_path, interpreter, layout):
    src, dst = torch.tensor([[5, 6], [13, -1]]), torch.tensor([[4, 5], [12, 13]])
    for move in (lambda caches, *slots: KvMover(caches)(*slots), move_by_kernel):
        caches = engine_caches(layout)
        expected = [moved(cache, src, dst) for cache in caches]
        move(caches, src, dst)
        assert all(torch.equal(cache, after) for cache, after in zip(caches, expected, strict=True))


def test_one_launch_moves_all_caches(monkeypatch):
    grids = []

    class Launched:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **constants: None

    monkeypatch.setattr(kv_move, "_move_kernel", Launched())
    slots = torch.tensor([[5, 6], [13, -1]])
    move_by_kernel(engine_caches("sglang"), slots, slots)
    assert grids == [(2, 3, 5)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("requests", "head_dim"), [(1, 64), (8, 128), (64, 80)])
def test_cuda_agrees_with_the_cpu(requests, head_dim, layout, dtype):
    caches = [make_cache(requests * 6, 8, 16, head_dim, dtype, layout) for _ in range(3)]
    first = torch.arange(requests)[:, None] * 96 + 10
    path = torch.stack([torch.randperm(80)[:7].sort().values + 1 for _ in range(requests)])
    src, dst = first + path, first + torch.arange(1, 8)
    on_device = [
        torch.empty_strided(each.shape, each.stride(), dtype=dtype, device="cuda").copy_(each)
        for each in caches
    ]
    KvMover(on_device)(src.cuda(), dst.cuda())
    KvMover(caches)(src, dst)
    for found, each in zip(on_device, caches, strict=True):
        assert torch.equal(found.cpu().float(), each.float())
