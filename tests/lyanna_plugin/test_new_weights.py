"""While the target is served its weights change, and so does what Lyanna has computed from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lyanna_parts import drafter_for, serve
from tiny_models import make_tiny_llama

from lyanna_plugin.checkpoint import load, save


@pytest.mark.parametrize("table", ["model", "float8"])
def test_the_table_follows_the_embeddings_in_its_place(tmp_path: Path, table: str) -> None:
    target, folder = make_tiny_llama(tmp_path / "target"), tmp_path / "drafter"
    save(drafter_for(target), folder)
    drafter = serve(target, folder, dtype=torch.bfloat16, table=table)
    served = drafter._info.table
    place, old = served.data_ptr(), served.float()
    embedding = drafter._embed
    assert isinstance(embedding, torch.nn.Embedding)
    embedding.weight.normal_()
    drafter.on_new_weights()
    info = load(folder, target).token_info
    new = info.collapse(embedding(info.hot_tokens.long()).float(), served.dtype).float()
    assert drafter._info.table.data_ptr() == place
    assert served.float().tolist() == new.tolist() != old.tolist()
