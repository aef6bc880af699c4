"""Random verified trees."""

import torch
from tree_kernels.candidates import NUM_SOURCES


def verification(seed, batch, width, few=5):
    """Trees with free columns at the end, accepted paths, and sources for 3 columns more.

    Siblings are side by side or apart.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    tokens = torch.full((batch, width), -1, dtype=torch.int32)
    parents, path = tokens.clone(), torch.full((batch, 6), -1, dtype=torch.int32)
    for line in range(batch):
        there = drawn(1, width + 1)
        above = [drawn(0, node) for node in range(1, there)]
        parents[line, 1:there] = torch.tensor(above, dtype=torch.int32)
        tokens[line, :there] = torch.randint(0, 9, (there,), generator=generator).int()
        node = path[line, 0] = 0
        for step in range(1, drawn(1, 7)):
            children = [child for child in range(1, there) if parents[line, child] == node]
            if not children:
                break
            node = path[line, step] = children[drawn(0, len(children))]
    kinds = torch.randint(0, NUM_SOURCES, (few,), generator=generator).int()
    sources = kinds[torch.randint(0, few, (batch, width + 3), generator=generator)]
    return tokens, parents, sources, path
