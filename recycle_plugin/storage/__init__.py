"""Tables on disk: hot start (what was learned) and priming (what can be computed beforehand).

`table_files` reads and writes files of tables and has the writer thread that `hot_start` uses to
keep what an engine learned from one run to the next. `priming` computes rows of the adjacency
matrix while an engine has no request, and `primed_files` keeps them in the user's cache.
"""
