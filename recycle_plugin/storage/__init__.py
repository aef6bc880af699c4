"""Tables on disk: hot start (what was learned) and priming (what can be computed beforehand).

`table_files` reads and writes files of tables and has the writer thread, with which `hot_start`
keeps what an engine learned from one run to the next. `priming` computes the adjacency matrix of a
model before anything is served, `primed_files` says where its result is stored, and `background`
runs it beside a serving engine.
"""
