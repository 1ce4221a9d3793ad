"""Complete programs over tables: ``python -m multiverso.apps.word2vec --help``.

Each runs alone or with many workers (``multiverso run -n 4 -m multiverso.apps.word2vec ...``), continues where it was
when it is started again, and continues without a worker that was killed (``--on-failure continue``).
"""
