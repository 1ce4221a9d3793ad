"""Conformance suites for tables, updaters and bindings, one line each, and faults on purpose.

In a test file, with pytest::

    from multiverso.testing import bindings
    TestMyBinding = bindings.suite(make_model)   # a class of tests, run with 1, 2 and 4 real workers

`multiverso.testing.tables` and `multiverso.testing.updaters` are used the same way, and
`multiverso.testing.faults` kills a worker at its n-th operation. For tests of a program that uses multiverso there is a
fixture::

    from multiverso.testing import session

    def test_my_table(session):
        table = multiverso.ArrayTableHandler(3)
"""

from typing import TYPE_CHECKING

from multiverso.lazy_names import lazy_names

if TYPE_CHECKING:
    from multiverso.testing.fixtures import session

__all__ = ["session"]

if not TYPE_CHECKING:  # pytest is imported for those who ask for it
    __getattr__, __dir__ = lazy_names(__name__, {"multiverso.testing.fixtures": "session"})
