"""Why a kernel came back: what it returns, or the low 16 bits of it. 0 is done; any other says why it stopped.

The first are the operating system's error numbers, as libc returns them; the others begin where those end. After
EINTR and TIMED_OUT a call goes in again and continues; after the others it cannot.
"""

from __future__ import annotations

DONE = HELD = 0  # HELD: the lock was got
LOST_SOMEONE = 1  # a worker that is waited for is lost
EINTR = 4  # a signal came
BUSY = 16  # EBUSY: another one has the lock
TIMED_OUT = 110  # ETIMEDOUT: a slice of waiting is over
OWNER_DEAD = 130  # EOWNERDEAD: the lock was got, and its last owner died with it
NOT_RECOVERABLE = 131  # ENOTRECOVERABLE: the lock's owner died, and who noticed first did not repair it
BAD_ROW = 256  # a row id out of range; its position is in the higher bits
MISMATCH = 257  # the workers of a reduction called with different things
FULL = 258  # a keyed table has no room for another row
