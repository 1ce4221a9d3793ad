"""What a worker of `multiverso.run(function)` executes: read the call, make it, write the answer.

Run as a script by its path: the caller's module search path, perhaps the only one that has this package, comes
with the call.

Arguments: two inherited file descriptors of anonymous memory, with the call and for the answer. Both hold two
pickles: [module search path, program name, sources of a notebook's cells] then [function, args, kwargs]; [kind,
traceback text] then the value or the exception.
"""

import linecache
import os
import pickle
import sys
import traceback
from typing import IO, Any


def main() -> None:
    """Calls the function and answers; every exception is an answer."""
    call_descriptor, answer_descriptor = (int(text) for text in sys.argv[1:3])
    for descriptor in (call_descriptor, answer_descriptor):
        os.set_inheritable(descriptor, False)
    # Opened again: the inherited descriptor shares its position with the other workers'.
    with open(f"/proc/self/fd/{call_descriptor}", "rb") as call, open(answer_descriptor, "w+b") as file:
        well = answer(call, file)
    sys.exit(0 if well else 1)


def answer(call: IO[bytes], file: IO[bytes], *, by_its_path: bool = True) -> bool:
    """Makes a call and writes the answer, which every exception is, too; returns whether it was none.

    Args:
        call: has it.
        file: takes the answer.
        by_its_path: modules are looked for where the caller does.
    """
    try:
        path, program, cells = pickle.load(call)
        if by_its_path:
            sys.path[:], sys.argv[:] = path, program
        linecache.cache.update(cells)
        function, args, kwargs = pickle.load(call)
        value = function(*args, **kwargs)
        if "multiverso.api" in sys.modules:
            sys.modules["multiverso.api"].shutdown()  # if the function has not
        _write(file, "value", "", value)
    except BaseException as error:
        _write_error(file, error)
        return False
    return True


def _write(file: IO[bytes], kind: str, text: str, value: Any) -> None:
    """Writes an answer, in place of what is there."""
    import cloudpickle  # found on the caller's search path only

    file.seek(0)
    file.truncate()
    pickle.dump((kind, text), file)
    try:
        cloudpickle.dump(value, file)
    except Exception as error:
        what = f"The worker's {kind}, of type {type(value).__qualname__}, cannot be sent back"
        raise TypeError(f"{what}: {error}") from error
    file.flush()


def _write_error(file: IO[bytes], error: BaseException) -> None:
    """Writes an exception as an answer; its traceback only, where it cannot be sent."""
    text = "".join(traceback.format_exception(error))
    try:
        import cloudpickle

        pickle.loads(cloudpickle.dumps(error))  # some exceptions can be written and not read
        _write(file, "error", text, error)
    except Exception:
        _write(file, "error", text, None)


if __name__ == "__main__":
    main()
