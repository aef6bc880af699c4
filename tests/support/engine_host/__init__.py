"""Runs of the real engines for tests: one process imports an engine, each run is forked from it.

Tests call `jobs.run_job`, `template` is the process that imports the engine once, and `spares` lets
an engine that spawns processes use forks of the template for these too.
"""
