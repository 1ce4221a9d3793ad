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
    with open(answer_descriptor, "w+b") as answer:
        try:
            # Opened again: the inherited descriptor shares its position with the other workers'.
            with open(f"/proc/self/fd/{call_descriptor}", "rb") as call:
                sys.path[:], sys.argv[:], cells = pickle.load(call)
                linecache.cache.update(cells)
                function, args, kwargs = pickle.load(call)
            value = function(*args, **kwargs)
            leave()
            write(answer, "value", "", value)
        except BaseException as error:
            write_error(answer, error)
            answer.close()
            sys.exit(1)


def leave() -> None:
    """Calls `multiverso.shutdown` if the function has not."""
    if "multiverso.api" in sys.modules:
        sys.modules["multiverso.api"].shutdown()


def write(file: IO[bytes], kind: str, text: str, value: Any) -> None:
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


def write_error(file: IO[bytes], error: BaseException) -> None:
    """Writes an exception as an answer; its traceback only, where it cannot be sent."""
    text = "".join(traceback.format_exception(error))
    try:
        import cloudpickle

        pickle.loads(cloudpickle.dumps(error))  # some exceptions can be written and not read
        write(file, "error", text, error)
    except Exception:
        write(file, "error", text, None)


if __name__ == "__main__":
    main()
