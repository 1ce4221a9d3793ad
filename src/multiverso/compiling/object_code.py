"""Object code of a group of kernels: what it holds, what it needs, and its form as a file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from types import FunctionType

LOOPS = {6: "pppnpn", 7: "pppnppn"}
"""What a loop of an updater or a rule takes, by its number of arguments: pointers to numbers (p) and numbers (n)."""

PYTHON_FACTS = "multiverso.python"
"""The name of two numbers that compiled code asks for: the address of the type of NumPy's arrays, and the size of the
head of an object, which is larger in a Python without the GIL."""

PYTHON = {
    *("PyLong_AsLongLong", "PyLong_FromLongLong", "Py_BuildValue", "PyType_IsSubtype", "PyExc_TypeError"),
    *("PyErr_Occurred", "PyErr_SetString", "PyEval_SaveThread", "PyEval_RestoreThread", PYTHON_FACTS),
}
LIBC = {
    *("syscall", "__errno_location", "clock_gettime", "sched_yield", "memcpy", "memset", "memmove"),
    *("sqrt", "sqrtf"),  # declared beside the instruction, which is what runs
}


def group_of(name: str, dtype: str | None) -> str:
    """Returns what the kernels or loops are called together that a module has for a dtype, or (None) for none."""
    short = name.removeprefix("multiverso.").removeprefix("kernels.")
    return f"{short}-{dtype}" if dtype else short


def is_loop(value: object, module: str) -> bool:
    """Returns whether something in one of our modules is a loop of an updater or a rule."""
    if not isinstance(value, FunctionType) or value.__module__ != module:
        return False
    code = value.__code__
    return code.co_argcount in LOOPS and code.co_varnames[code.co_argcount - 1] == "count"


_MAGIC = b"multiverso object code 1\n"


@dataclass(frozen=True)
class Code:
    """Functions in one object file.

    Attributes:
        names: its functions, each after its group and a dot.
        needed: what it calls: names of LIBC and PYTHON.
        content: an ELF object for this processor.
    """

    names: tuple[str, ...]
    needed: tuple[str, ...]
    content: bytes

    def to_bytes(self) -> bytes:
        """Returns it as a file holds it, with a checksum."""
        head = json.dumps({"names": self.names, "needed": self.needed}).encode()
        body = len(head).to_bytes(4, "little") + head + self.content
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Code:
        """The inverse of `to_bytes`.

        Raises:
            ValueError: something else, or not whole.
        """
        magic, digest, body = data[: len(_MAGIC)], data[len(_MAGIC) :][:32], data[len(_MAGIC) + 32 :]
        if magic != _MAGIC or hashlib.sha256(body).digest() != digest:
            raise ValueError("this is no object code of multiverso, or it is damaged")
        length = int.from_bytes(body[:4], "little")
        head = json.loads(body[4 : 4 + length])
        return cls(tuple(head["names"]), tuple(head["needed"]), body[4 + length :])
