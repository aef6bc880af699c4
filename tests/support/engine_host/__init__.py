"""Runs of the real engines for tests: one process imports an engine, each run is forked from it.

`jobs.run_job` is what the tests call, `template` is the process that imports the engine once, and
`spares` gives an engine that starts processes of its own forks of the template as well.
"""
