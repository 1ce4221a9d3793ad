"""Where each word of a publication lies: its data, which readers cannot write to, and what they pin.

The data::

    HEADER                  what is current, and a word that readers sleep on     one page
    slot 0                  META, a checksum for each tensor, the tensors         as large as the tensors ask for
    slot 1 ...

The readers' memory is one READER after another, a process each. A pin is a copy of the word ``CURRENT``; as long as it
stands the publisher leaves that slot alone.

    CURRENT, a pin    [version 60 | slot + 1: 4], 0: none
"""

from __future__ import annotations

from multiverso.layout.records import CACHE_LINE, Record

HEADER = Record(4096)
CURRENT = HEADER.int64("CURRENT")
EVENT = HEADER.int32("EVENT", apart=True)  # changes with each version

META = Record(4096)
STEP = META.int64("STEP")
HAS_STEP = META.int64("HAS_STEP")
TIME = META.float64("TIME")  # seconds since 1970
TEXT_BYTES = META.int64("TEXT_BYTES")
MOST_TEXT = META.size - CACHE_LINE
TEXT = META.bytes("TEXT", MOST_TEXT)

READER = Record(1024)
LIFE = READER.mutex("LIFE")  # held by a thread of the reader as long as it may have pins
MOST_PINS = (READER.size - CACHE_LINE) // 8
PINS = READER.int64("PINS", MOST_PINS)
READER_BYTES = READER.size
MOST_READERS = 256

MOST_SLOTS = 8
SLOT_BITS = 4
SLOT_MASK = (1 << SLOT_BITS) - 1
TAKEN = 1 << SLOT_BITS  # what a pin holds for a moment: it is taken, and says of no slot yet
