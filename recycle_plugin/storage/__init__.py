"""Tables on disk: hot start (what was learned) and priming (what can be computed beforehand).

`table_files` reads and writes files of tables and has the writer thread that `hot_start` uses to
keep what an engine learned from one run to the next. `priming` computes the adjacency matrix of a
model before anything is served, `primed_files` reads and writes the result in the user's cache, and
`background` runs priming beside a serving engine.
"""
