"""What dynamic trees remember of finished answers, and what requests keep from one another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tree_kernels.copies import BUCKETS

from drafttree.target import Target
from drafttree.verify import verify_target
from recycle_plugin import DynamicTreeDrafter, RecycleOptions, make_drafter
from recycle_plugin.storage.table_files import load_tables, save_tables

VOCAB = 200
PROMPT, ANSWER = list(range(100, 120)), list(range(20, 70))
TEXTS = {"1": list(range(60)), "2": list(range(60, 120)), "3": list(range(120, 180))}


def make(**options: object) -> DynamicTreeDrafter:
    parsed = RecycleOptions.model_validate({"prime": False, "nodes": 80, **options})
    target = Target("target", VOCAB, torch.device("cpu"), torch.float32, logging.getLogger("t"))
    drafter = make_drafter(parsed, target)
    assert isinstance(drafter, DynamicTreeDrafter)
    drafter.allocate(4, 256)
    return drafter


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def serve(
    drafter: DynamicTreeDrafter, slot: int, prompt: Sequence[int], answer: Sequence[int]
) -> None:
    """A request whose answer is not drafted."""
    drafter.start(slot, prompt)
    drafter.extend(slots(slot), ids(*answer)[None])
    drafter.release([slot])


def drafted(drafter: DynamicTreeDrafter, slot: int, root: int) -> list[int]:
    """The tokens of a tree without branches, below its root."""
    trees = drafter.propose(slots(slot), ids(root))
    count = int(trees.tree_size[0])
    assert trees.parents[0, :count].tolist() == [*range(-1, count - 1)]
    return trees.tokens[0, 1:count].tolist()


def test_a_finished_answer_is_copied_from_its_first_token_on() -> None:
    drafter = make()
    serve(drafter, 0, PROMPT, ANSWER)
    drafter.start(3, PROMPT)
    copied = drafted(drafter, 3, PROMPT[-1])
    # As far as the least score of a spine, beyond the levels of the tree.
    assert copied == ANSWER[: len(copied)]
    assert len(copied) > 30


def test_a_copy_becomes_longer_as_copies_are_accepted() -> None:
    drafter = make()
    prompt, answer = list(range(30)), list(range(30, 190))
    serve(drafter, 0, prompt, answer)
    for _ in range(20):
        drafter.start(1, prompt)
        done = 0
        while done < len(answer) - 66:
            trees = drafter.propose(slots(1), ids([*prompt, *answer][29 + done]))
            expected = torch.zeros(VOCAB, dtype=torch.int32)
            expected[torch.tensor(prompt + answer[:-1])] = ids(*prompt[1:], *answer)
            target = expected[trees.tokens.long().clamp(min=0)]
            verified = verify_target(trees, target, drafter.max_depth)
            drafter.on_verified(slots(1), trees, verified)
            done += int(verified.num_emitted)
        drafter.release([1])
    drafter.start(2, prompt)
    assert drafted(drafter, 2, 29) == answer[:64]
    sources = {row["source"]: row["share"] for row in drafter.acceptance()["sources"]}
    assert sources["memory match of 37 or more"] == 1.0


def test_a_shorter_match_than_four_tokens_is_not_followed() -> None:
    drafter = make()
    serve(drafter, 0, [], [1, 2, 3, 4, 5, 6])
    drafter.start(1, [9, 2, 3, 4])
    assert drafted(drafter, 1, 4) == []
    drafter.start(2, [9, 1, 2, 3, 4])
    assert drafted(drafter, 2, 4) == [5, 6]


def test_the_prompt_is_remembered_no_further_than_16_tokens() -> None:
    drafter = make()
    serve(drafter, 0, PROMPT, ANSWER)
    assert drafter.tables.memory.text().tolist() == [*PROMPT[-16:], *ANSWER, -1]


def test_a_request_that_starts_in_a_running_ones_slot_ends_it() -> None:
    drafter = make()
    drafter.start(0, PROMPT)
    drafter.extend(slots(0), ids(*ANSWER)[None])
    drafter.start(0, PROMPT)
    assert drafted(drafter, 0, PROMPT[-1])[:8] == ANSWER[:8]
    # A slot that was never used, or is released twice, has nothing to remember.
    drafter.release([0, 0])
    drafter.release([2])
    assert drafter.tables.memory.text().tolist().count(-1) == 1


@pytest.mark.parametrize("how", ["reset", "idle"])
def test_what_is_forgotten_is_not_copied(how: str) -> None:
    drafter = make(hot_start=how != "idle")
    serve(drafter, 0, PROMPT, ANSWER)
    if how == "reset":
        drafter.reset()
    drafter.start(1, PROMPT)
    assert drafted(drafter, 1, PROMPT[-1]) == []


def test_a_request_that_runs_during_a_reset_is_not_remembered() -> None:
    """An engine may release a request only when the next one arrives."""
    drafter = make()
    drafter.start(0, PROMPT)
    drafter.extend(slots(0), ids(*ANSWER)[None])
    drafter.reset()
    drafter.release([0])
    assert drafter.tables.memory.text().tolist() == []


def test_without_hot_start_the_memory_lasts_while_requests_run() -> None:
    drafter = make(hot_start=False)
    drafter.start(2, [5])
    serve(drafter, 0, PROMPT, ANSWER)
    drafter.start(1, PROMPT)
    assert drafted(drafter, 1, PROMPT[-1])[:8] == ANSWER[:8]


@pytest.mark.parametrize("options", [{"memory": 0}, {"sharing": "request"}], ids=str)
def test_without_a_memory_no_answer_is_copied(options: dict[str, object]) -> None:
    drafter = make(**options)
    serve(drafter, 0, PROMPT, ANSWER)
    drafter.start(1, PROMPT)
    assert drafted(drafter, 1, PROMPT[-1]) == []
    assert drafter.tables.memory.text().tolist() == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"memory": 0}, "memory=0"),
        ({"sharing": "request"}, "sharing='request'"),
        ({"hot_start": False}, "leave hot_start=false out"),
    ],
)
def test_texts_that_would_not_be_kept_are_refused(options: dict[str, object], named: str) -> None:
    drafter = make(**options)
    with pytest.raises(ValueError, match=named):
        drafter.remember(ids(*ANSWER))
    assert drafter.tables.memory.text().tolist() == []


@pytest.mark.parametrize("sharing", ["engine", "request"])
def test_no_draft_of_a_request_has_anothers_text_unless_the_engine_shares(sharing: str) -> None:
    """Three requests with texts of their own tokens, side by side and after one another."""
    drafter = make(sharing=sharing)
    foreign = 0
    for _ in range(2):
        for slot, text in enumerate(TEXTS.values()):
            # The texts begin alike, so that all of them can be matched.
            drafter.start(slot, [190, 191, 192, 193, *text[:4]])
        for step in range(4, 60):
            roots = ids(*(text[step - 1] for text in TEXTS.values()))
            trees = drafter.propose(slots(0, 1, 2), roots)
            for row, text in enumerate(TEXTS.values()):
                tokens = trees.tokens[row, 1 : int(trees.tree_size[row])].tolist()
                foreign += len(set(tokens) - {*text, *range(190, 194)})
            likely = torch.zeros(3, VOCAB)
            likely[range(3), [text[step] for text in TEXTS.values()]] = 1.0
            likely[:, 190:197] = 0.5
            before = drafter.previous_tokens(slots(0, 1, 2))
            drafter.observe(slots(0, 1, 2), roots, before, likely)
            emitted = ids(*(text[step] for text in TEXTS.values()))
            drafter.extend(slots(0, 1, 2), emitted[:, None])
        # The next texts begin where another one's does.
        drafter.release([0, 1, 2])
    drafter.start(0, TEXTS["2"][:8])
    copied = drafter.propose(slots(0), ids(67)).tokens[0].tolist()
    assert (68 in copied) == (sharing == "engine")
    if sharing == "request":
        assert foreign == 0


def test_a_request_finds_its_own_rows_where_others_overwrote_the_shared_ones() -> None:
    drafter = make(nodes=3, memory=0)

    def learn(slot: int, *likely: int) -> None:
        logits = torch.zeros(VOCAB)
        logits[list(likely)] = torch.arange(len(likely), 0, -1.0)
        drafter.observe(slots(slot), ids(5), ids(4), logits[None])

    def first(*which: int) -> list[int]:
        roots = ids(*[5] * len(which))
        return drafter.propose(slots(*which), roots).tokens[:, 1].tolist()

    for slot in (0, 1, 2):
        drafter.start(slot, [4, 5])
    first(0, 1)  # from now on two requests decode together
    learn(0, 10, 11)
    learn(1, 20, 21)
    assert first(0, 1) == [10, 20]
    # A request without rows of its own finds the shared ones, which the last request wrote.
    assert first(0, 1, 2) == [10, 20, 20]
    # Alone, a request uses the shared tables, which it then writes itself.
    assert first(0) == [20]
    drafter.release([0])
    drafter.start(0, [4, 5])
    assert first(0, 1) == [20, 20]


def test_a_file_keeps_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "tables.safetensors"
    drafter = make(hot_start=file)
    serve(drafter, 0, PROMPT, ANSWER)
    assert drafter.tables.saver is not None
    drafter.tables.saver.save()
    drafter.tables.saver.close()
    for memory in (1 << 20, 32):
        again = make(hot_start=file, memory=memory)
        assert again.tables.saver is not None
        again.tables.saver.close()
        again.start(1, ANSWER[20:30])
        assert drafted(again, 1, ANSWER[29])[:8] == ANSWER[30:38]


def closed(drafter: DynamicTreeDrafter) -> DynamicTreeDrafter:
    """The drafter, once its file is saved for the last time."""
    assert drafter.tables.saver is not None
    drafter.tables.saver.close()
    return drafter


def copies(drafter: DynamicTreeDrafter) -> bool:
    """Whether the answer is remembered."""
    drafter.start(3, ANSWER[20:30])
    return drafted(drafter, 3, ANSWER[29])[:8] == ANSWER[30:38]


def answer(drafter: DynamicTreeDrafter) -> None:
    """A request that ends without a step in which its slot is released."""
    drafter.start(0, PROMPT)
    drafter.extend(slots(0), ids(*ANSWER)[None])


def release(drafter: DynamicTreeDrafter) -> None:
    serve(drafter, 0, PROMPT, ANSWER)


def remember(drafter: DynamicTreeDrafter) -> None:
    drafter.remember(ids(*ANSWER))


@pytest.mark.parametrize("learn", [answer, release, remember])
def test_texts_reach_the_file_whenever_they_came(
    tmp_path: Path, learn: Callable[[DynamicTreeDrafter], None]
) -> None:
    file = tmp_path / "tables"
    drafter = make(hot_start=file)
    learn(drafter)
    closed(drafter)
    kept = drafter.tables.memory.text()
    drafter.release([0])
    assert kept.equal(drafter.tables.memory.text())
    assert copies(closed(make(hot_start=file)))


def test_a_later_engine_of_the_process_takes_over_the_file(tmp_path: Path) -> None:
    """The earlier one saves once more when the later one starts, and not when the process ends."""
    file = tmp_path / "tables"
    earlier = make(hot_start=file)
    answer(earlier)
    later = make(hot_start=file)
    assert copies(later)
    later.remember(ids(*reversed(ANSWER)))
    closed(later)
    texts = later.tables.memory.text()
    answer(earlier)
    closed(earlier)
    kept = closed(make(hot_start=file)).tables.memory.text()
    assert kept[kept >= 0].equal(texts[texts >= 0])


def test_what_is_forgotten_leaves_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tables"
    drafter = make(hot_start=file)
    release(drafter)
    assert drafter.tables.saver is not None
    drafter.tables.saver.save()
    answer(drafter)
    drafter.reset()
    closed(drafter)
    again = closed(make(hot_start=file))
    assert not len(again.tables.memory.text())


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    file, link = tmp_path / "folder" / "tables", tmp_path / "link"
    link.symlink_to(file)
    drafter = make(hot_start=link)
    release(drafter)
    closed(drafter)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "link"]
    assert link.is_symlink()
    assert copies(closed(make(hot_start=file)))


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It has counts of other sources, and no memory."""
    file = tmp_path / "tables.safetensors"
    drafter = make(hot_start=file)
    drafter.start(0, [4, 5])
    logits = torch.zeros(1, VOCAB)
    logits[0, 17] = 1.0
    drafter.observe(slots(0), ids(5), ids(4), logits)
    assert drafter.tables.saver is not None
    drafter.tables.saver.save()
    drafter.tables.saver.close()
    from safetensors import safe_open

    with safe_open(file, "pt") as content:
        identity = content.metadata()
        tables = {name: content.get_tensor(name) for name in ("matrix", "pairs")}
    save_tables(file, {**tables, "tried": ids(1), "hit": ids(1)}, identity)
    again = make(hot_start=file)
    assert again.tables.saver is not None
    again.tables.saver.close()
    again.start(0, [4, 5])
    assert again.propose(slots(0), ids(5)).tokens[0, 1] == 17
    assert load_tables(file, {}, {}) == {}


def test_a_copy_of_the_longest_match_is_worth_what_its_length_has_earned() -> None:
    """Short matches that mislead do not lower the worth of long ones, nor the other way round."""
    drafter = make(nodes=8, memory=0)
    priors = drafter.tables.source_stats.priors.view(-1, 10, 9)
    before = priors.clone()
    drafter.start(0, [7, 8, 9, 1, 7])
    for _ in range(10):
        trees = drafter.propose(slots(0), ids(7))
        assert trees.tokens[0, 1] == 8
        target = torch.full_like(trees.tokens, 150)
        drafter.on_verified(slots(0), trees, verify_target(trees, target, drafter.max_depth))
        drafter.start(0, [7, 8, 9, 1, 7])
    changed = (priors != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [1]  # a match of one token
    assert before[BUCKETS].equal(priors[BUCKETS])
