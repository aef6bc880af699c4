"""The cache's folders are for their owner alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tree_kernels.cache import make_private


def test_all_folders_that_are_made_are_for_their_owner_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        (tmp_path / "there").mkdir(0o755)
        folder = tmp_path / "there" / "first" / "second" / "third"
        for _ in range(2):
            make_private(folder)
            made = [folder, *folder.parents][:4]
            assert [each.stat().st_mode & 0o777 for each in made] == [0o700] * 3 + [0o755]
    finally:
        os.umask(mask)


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/folder", "file/folder/another"):
        with pytest.raises(OSError, match="file"):
            make_private(tmp_path / folder)
