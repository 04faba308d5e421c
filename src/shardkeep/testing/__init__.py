"""What users and we test with: the no-fork jail (`jail`), N-process clusters (`cluster`), storages that fail
(`faults`) or are slow (`slow`).

Nothing here is imported by the library itself, and importing this package imports none of its modules: each
needs its own extras.
"""
