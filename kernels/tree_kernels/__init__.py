"""Operations on draft trees: Triton for GPUs, C++ for CPUs, and a PyTorch reference of each.

The public function or class of an operation checks its arguments and calls the implementation that
`_dispatch.py` chooses: Triton, then C++, then the reference. `DRAFTTREE_KERNELS=reference` forces
the reference of every operation. The reference defines the result, and tests compare the kernels
with it. It also runs on devices for which the table has no kernel.

| Operation | Used by | Triton | C++ | Source |
|---|---|---|---|---|
| `accept.accept_walk` | all methods, greedy requests | yes | yes | Token Recycling, 3.3 |
| `accept.accept_step` | all methods, sampled requests | yes | yes | Token Recycling, 3.3 |
| `adjacency.recycle` | Token Recycling | yes | yes | Token Recycling, 3.2 |
| `adjacency.top_candidates` | all methods | yes | yes | Token Recycling, 3.2 |
| `beam.best_children` | RSD | yes | - | RSD, algorithm 9 |
| `bigrams.update_bigrams` | Token Recycling | yes | yes | this project |
| `cpu_attention.TreeAttention` | all methods on CPUs | - | yes | Token Recycling, 3.3 |
| `draw.draw_tokens` | all methods, sampled requests | yes | - | Gumbel-max; Philox (SC 2011) |
| `expansion.expand_trees` | Token Recycling, dynamic trees | yes | yes | EAGLE-2, 4.1 |
| `full_mask.full_mask` | SGLang | yes | - | SGLang's custom mask |
| `gather.compact_tree` | Token Recycling, static trees | yes | yes | Token Recycling, 3.3 |
| `gather.gather_tree` | Token Recycling, static trees | yes | yes | Token Recycling, algorithm 1 |
| `gumbel_top.gumbel_top` | RSD | yes | - | Gumbel-top-k (arXiv 1903.06059, 2.3) |
| `kept_trees.keep_trees` | vLLM's V2 model runner | yes | - | this project |
| `kept_trees.next_roots` | vLLM's V2 model runner | yes | - | this project |
| `kv_move.KvMover` | all methods | yes | yes | this project |
| `layer_parts.add_norm` | Lyanna | - | yes | RMSNorm (arXiv 1910.07467) |
| `layer_parts.gate` | Lyanna | - | yes | SwiGLU (arXiv 2002.05202) |
| `layer_parts.rotate` | Lyanna | - | yes | RoPE (arXiv 2104.09864) |
| `layer_rows.rows_to_read` | Lyanna in vLLM | yes | - | this project |
| `mask.depths` | all methods | yes | yes | pointer doubling |
| `mask.tree_mask` | all methods | yes | yes | Token Recycling, 3.3 |
| `mask_rows.mask_rows` | vLLM on GPUs | yes | - | this project |
| `memory.append_texts` | Token Recycling, dynamic trees | yes | yes | SuffixDecoding |
| `merge.merge_trees` | Lyanna | yes | yes | Lyanna, verification fusion |
| `ngrams.extend_ngrams` | Token Recycling, dynamic trees | yes | yes | prompt lookup |
| `ngrams.previous_tokens` | Token Recycling, dynamic trees | yes | yes | prompt lookup |
| `noise.uniform_numbers` | RSD | yes | yes | Philox (SC 2011) |
| `rejection.reject_step` | RSD | yes | yes | RSD, algorithm 3 |
| `root_matches.root_matches` | Token Recycling, dynamic trees | yes | yes | SuffixDecoding |
| `scheduled_trees.lay_out` | vLLM's V2 model runner | yes | - | this project |
| `scheduled_trees.node_tokens` | vLLM's V2 model runner | yes | - | this project |
| `selection.best_nodes` | Token Recycling, dynamic trees | yes | yes | EAGLE-2, 4.2 |
| `source_stats.count` | Token Recycling | yes | yes | this project |
| `step_counts.count_step` | all methods | yes | yes | this project |
| `token_info.token_info_top` | Lyanna | yes | - | Lyanna, 4.2, algorithm 1 |
| `token_tree.expand_token_trees` | Lyanna | - | yes | Lyanna, 4.2, algorithm 1 |
| `traversal.traverse_trees` | RSD | yes | yes | arXiv 2505.12398, algorithm 2 |
| `tree_attention.tree_attention` | vLLM on GPUs | yes | - | Token Recycling, 3.3 |

Papers: Token Recycling (arXiv 2408.08696), RSD (arXiv 2402.14160), EAGLE-2 (arXiv 2406.16858),
SuffixDecoding (arXiv 2411.04975);
Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3".
"""
