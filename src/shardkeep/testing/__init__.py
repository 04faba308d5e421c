"""What users and we test with: the no-fork jail (`jail`) and N-process clusters (`cluster`).

Nothing here is imported by the library itself, and importing this package imports none of its modules: each
needs its own extras.
"""
