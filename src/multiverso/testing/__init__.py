"""Conformance suites for tables, updaters and bindings, one line each, and faults on purpose.

In a test file, with pytest::

    from multiverso.testing import bindings
    TestMyBinding = bindings.suite(make_model)   # a class of tests, run with 1, 2 and 4 real workers

`multiverso.testing.tables` and `multiverso.testing.updaters` are used the same way, and
`multiverso.testing.faults` kills a worker at its n-th operation.
"""
